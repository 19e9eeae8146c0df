"""`flowalign watch RUN`: one page that shows a run while it goes on, and its report at the end.

It reads the files that the run writes, so it works on any machine that sees the disk: no server and
no network. The page is one HTML file that loads itself anew while the run goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flowalign.commands.watch.view import OVER, NoRun, View, look
from flowalign.system.files import replacing
from flowalign.training.report import page

PAGE = "watch.html"

__all__ = ["NoRun", "PAGE", "View", "look", "main", "write"]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 the run is over, or the page was written once; 2 no run; 130 interrupted."""
    parser = argparse.ArgumentParser(
        "flowalign watch",
        description="Write one page that shows a run while it goes on, and end with it.",
    )
    parser.add_argument("run", type=Path, help="the output folder of a run or a recipe")
    parser.add_argument("--out", type=Path, help=f"the page; default: RUN/{PAGE}")
    parser.add_argument("--once", action="store_true", help="write the page once, and end")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two pages")
    args = parser.parse_args(argv)
    out = args.out or args.run / PAGE
    try:
        view = write(args.run, out, every=args.every)
        print(f"{out}: open it in a browser", flush=True)
        while not args.once and view.state not in OVER:
            time.sleep(args.every)
            view = write(args.run, out, every=args.every)
    except (NoRun, OSError) as error:
        print(f"flowalign watch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{view.name}: {view.about}")
    return 0


def write(run: Path, out: Path | None = None, *, every: float = 15.0) -> View:
    """Write the page of a run; returns what it shows. Raises NoRun for a folder without one.

    out: the file, by default RUN/watch.html. every: seconds after which an open page of a run that
    goes on loads itself anew.
    """
    view, out = look(run), out or run / PAGE
    text = page.render(
        "watch.html.j2",
        title=f"{view.name} ({view.kind})",
        view=view,
        refresh=0 if view.state in OVER else max(1, round(every)),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        clock=lambda seconds: time.strftime("%m-%d %H:%M", time.localtime(seconds)),
    )
    with replacing(out) as part:
        part.write_text(text, encoding="utf-8")
    return view
