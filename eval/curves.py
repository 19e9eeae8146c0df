"""The held-out scores of several training runs in one figure.

flowalign eval curves outputs/a outputs/b --out curves.pdf
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.training import metrics

FORMATS = (".pdf", ".svg", ".png")


@refusing("eval curves")
def main(argv: Sequence[str]) -> int:
    """The command line; exit status 0 = drawn, 2 = refused."""
    text = "Draw the held-out scores of training runs, a chart for each score."
    parser = argparse.ArgumentParser("flowalign eval curves", description=text)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="output folders of runs")
    help = f"the figure, a {', '.join(FORMATS)} (default: curves.pdf)"
    parser.add_argument("--out", type=Path, default=Path("curves.pdf"), help=help)
    parser.add_argument("--over", choices=(metrics.UPDATE, metrics.EVALUATIONS),
                        default=metrics.UPDATE, help="what the axis counts")  # fmt: skip
    args = parser.parse_args(argv)
    logs, out = named_logs(args.runs), expanded(args.out)
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"--out: got {str(out)!r}; want a file that ends in {', '.join(FORMATS)}.")
    from flowalign.training.report.pictures import held_out_plot  # matplotlib and torch

    held_out_plot(logs, out, args.over)
    print(out)
    return 0


def named_logs(texts: Sequence[str]) -> dict[str, Path]:
    """{name: metrics.jsonl} of NAME=RUN, or of folders, whose names are their last parts if these
    differ. Raises ValueError for a folder without the log of a run."""
    logs, last = {}, [Path(text).name for text in texts]
    for text in texts:
        name, _, run = text.rpartition("=")
        folder = Path(expanded(run))
        name = name or (folder.name if last.count(folder.name) == 1 else run)
        logs[name] = log = folder / "metrics.jsonl"
        if not log.is_file():
            inside = ", ".join(str(path.parent) for path in sorted(folder.glob(f"*/{log.name}")))
            hint = f"; there are {inside}" if inside else ""
            raise ValueError(f"{folder} holds no {log.name} of a training run{hint}.")
    return logs
