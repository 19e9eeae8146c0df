"""`make demo`: distil the shipped tiny teachers into one student, then show them side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

CONFIG = Path(__file__).parent / "configs" / "tiny" / "demo.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the recipe."""
    parser = argparse.ArgumentParser("flowalign demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the recipe")
    args = parser.parse_args(argv)
    from flowalign.train import main as train

    print(f"Merging three teachers, then distilling them into one student: {CONFIG}", flush=True)
    status = train(["--config", str(CONFIG), f"output={args.output}", *args.overrides])
    if status == 0:
        table, student = args.output / "table", args.output / "student"
        print("\nThe base model, three teachers, their merge and the student, on the same prompts:")
        print(f"  {table / 'grid.png'}      some images of every task")
        print(f"  {table / 'report.html'}   tables, more images, every score")
        print(f"  {student / 'metrics.png'} how the student was trained")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
