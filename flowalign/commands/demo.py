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
    from flowalign.commands.train import main as train

    print(f"Merging three teachers, then distilling them into one student: {CONFIG}", flush=True)
    # its last lines name the pictures, the report and the student's adapter
    return train(["--config", str(CONFIG), f"output={args.output}", *args.overrides])


if __name__ == "__main__":
    raise SystemExit(main())
