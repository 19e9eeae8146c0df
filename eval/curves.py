"""The held-out scores of several training runs in one figure.

flowalign eval curves outputs/a outputs/b --out curves.pdf
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.system.folder import RunFolder
from flowalign.training import metrics


@refusing("eval curves")
def main(argv: Sequence[str]) -> int:
    """The command line; exit status 0 = drawn, 2 = refused."""
    text = "Draw the held-out scores of training runs, a chart for each score."
    parser = argparse.ArgumentParser("flowalign eval curves", description=text)
    help = "output folders of runs; TEACHER+STUDENT counts the evaluations of both"
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help=help)
    help = "the figure, a .pdf, .svg or .png (default: curves.pdf)"
    parser.add_argument("--out", type=Path, default=Path("curves.pdf"), help=help)
    parser.add_argument("--over", choices=(metrics.UPDATE, metrics.EVALUATIONS),
                        default=metrics.UPDATE, help="what the axis counts")  # fmt: skip
    parser.add_argument("--of", nargs="+", default=(), metavar="CHART",
                        help="the charts to draw: names of tasks (default: all)")  # fmt: skip
    args = parser.parse_args(argv)
    logs = named_logs(args.runs)
    out = expanded(args.out)
    if args.over == metrics.UPDATE and (chained := [n for n, run in logs.items() if len(run) > 1]):
        raise ValueError(
            f"--over: {', '.join(chained)} has several runs; use {metrics.EVALUATIONS}."
        )
    from flowalign.report.pictures import held_out_plot  # matplotlib and torch

    held_out_plot(logs, out, args.over, args.of)
    print(out)
    return 0


def named_logs(texts: Sequence[str]) -> dict[str, list[Path]]:
    """{name: metrics.jsonl of the runs} from NAME=RUN+RUN. Without NAME the last folder's name is
    used; if it is not unique, the whole text is. Raises ValueError for a folder without a training
    log."""
    logs = {}
    last = [Path(text).name for text in texts]
    for text in texts:
        name, _, runs = text.rpartition("=")
        folders = [Path(expanded(run)) for run in runs.split("+")]
        name = name or (folders[-1].name if last.count(folders[-1].name) == 1 else runs)
        logs[name] = [RunFolder(folder).log for folder in folders]
        for folder, log in zip(folders, logs[name], strict=True):
            if not log.is_file():
                inside = ", ".join(
                    str(path.parent) for path in sorted(folder.glob(f"*/{log.name}"))
                )
                hint = f"; there are {inside}" if inside else ""
                raise ValueError(f"{folder} holds no {log.name} of a training run{hint}.")
    return logs
