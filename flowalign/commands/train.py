"""Read a config, build the parts of a run, run it: `accelerate launch train.py` and the CLI."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pkgutil import resolve_name

from flowalign.commands.arguments import add_changes, with_examples
from flowalign.config import ConfigError, Job, load
from flowalign.training.run import lock


def parser() -> argparse.ArgumentParser:
    parser = with_examples(
        "flowalign train",
        "Train from a config file.",
        "flowalign train --config opd.yaml",
        "flowalign train --config opd.yaml train.updates=100 output=outputs/longer --resume",
    )
    add = parser.add_argument
    add("--config", required=True, help="a YAML file, such as configs/tiny/...")
    add("--resume", action="store_true", help="continue from the last checkpoint")
    help = "resume with another number of processes, though the last digits then differ"
    add("--allow-world-change", action="store_true", help=help)
    add_changes(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run had to stop, 2 the config is refused; interrupted, 130 by
    Ctrl-C, 143 by SIGTERM, and 75 by SIGUSR1 or the clock."""
    began = time.monotonic()
    args = parser().parse_args(argv)
    try:
        config = load(args.config, args.overrides, stage=Job, variant=args.variant)
        if int(os.environ.get("RANK") or 0) == 0:
            lock.check_free(config.output)
    except ConfigError as error:  # before the libraries are imported, which takes many seconds
        print(error, file=sys.stderr)
        return 2
    return resolve_name("flowalign.commands.run:main")(config, args, began)
