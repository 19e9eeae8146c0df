"""Score models on held-out prompts: `python -m flowalign.eval --config FILE [key.path=value ...]`.

Writes into `output`: results.json, table.md, report.html (one page with tables and images), images/
(with the scores of every image: `flowalign.eval.store`), grid.png (some images of every model) and
layouts/ where a benchmark asks for it. The same command continues a run that was killed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flowalign.config import ConfigError, EvalStage, load
from flowalign.training.run import lock


def parser() -> argparse.ArgumentParser:
    """The command line of `eval`."""
    arguments = argparse.ArgumentParser("flowalign eval", description="Score models from a config.")
    arguments.add_argument("--config", required=True, help="a YAML file: configs/tiny/eval.yaml")
    arguments.add_argument("--variant", help="a YAML file of keys by stage: other hardware")
    arguments.add_argument("overrides", nargs="*", metavar="key.path=value",
                           help="change the config")  # fmt: skip
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """`compare A B`, or an evaluation.

    Exit status: 0 done, 1 too many images have no score, 2 refused; interrupted, 130 by Ctrl-C, 143
    by SIGTERM, 75 by SIGUSR1.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "compare":
        from flowalign.eval.compare import main as compare

        return compare(argv[1:])
    args = parser().parse_args(argv)
    try:
        config = load(args.config, args.overrides, stage=EvalStage, variant=args.variant)
        if int(os.environ.get("RANK") or 0) == 0:
            lock.check_free(config.output)
    except ConfigError as error:  # before the libraries are imported, which takes many seconds
        print(error, file=sys.stderr)
        return 2
    from flowalign.eval.evaluation import run_command

    return run_command(config, args.config)
