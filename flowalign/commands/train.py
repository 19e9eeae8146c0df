"""Read a config, build the parts of a run, run it: `accelerate launch train.py` and the CLI."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from flowalign.config import ConfigError, Job, load
from flowalign.training.run import lock

DEMO = Path(__file__).parent / "configs" / "tiny" / "demo.yaml"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flowalign train", description="Train from a config file.")
    parser.add_argument("--config", required=True, help="a YAML file, such as configs/tiny/...")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    help = "resume with another number of processes, though the last digits then differ"
    parser.add_argument("--allow-world-change", action="store_true", help=help)
    parser.add_argument("--variant", help="a YAML file of keys by stage: other hardware")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
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


def demo(argv: Sequence[str]) -> int:
    """`make demo`: distil the shipped tiny teachers into one student, then show them side by side.
    Exit status of the recipe."""
    parser = argparse.ArgumentParser("flowalign demo", description=demo.__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the recipe")
    args = parser.parse_args(argv)
    print(f"Merging three teachers, then distilling them into one student: {DEMO}", flush=True)
    # its last lines name the pictures, the report and the student's adapter
    return main(["--config", str(DEMO), f"output={args.output}", *args.overrides])
