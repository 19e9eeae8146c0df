"""`make demo`: train a teacher on the tiny world, then show base and teacher side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs" / "tiny"
SHORT = "train.updates=50"  # of the config's 70 or 90: a first look, within a coffee break


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the training or of the evaluation that follows it."""
    parser = argparse.ArgumentParser("flowalign demo", description=__doc__)
    parser.add_argument("--teacher", choices=["ocr", "geneval"], default="ocr")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    args = parser.parse_args(argv)
    from flowalign.eval.__main__ import main as evaluate
    from flowalign.train import main as train

    teacher = args.output / f"teacher_{args.teacher}"
    print(f"Training a LoRA teacher with GRPO; its log and pictures go to {teacher}", flush=True)
    config = str(CONFIGS / f"teacher_{args.teacher}.yaml")
    status = train(["--config", config, "--resume", f"output={teacher}", SHORT, *args.overrides])
    if status:
        return status
    print("\nScoring base and teacher on held-out prompts, same noise:", flush=True)
    table = args.output / "eval"
    models = f"models={{base: null, teacher: {teacher / 'adapter'}}}"
    limit = ["benchmarks.0.limit=256", "benchmarks.1.limit=256"]
    status = evaluate(["--config", str(CONFIGS / "eval.yaml"), f"output={table}", models, *limit])
    print(f"\nLook at {teacher / 'before_after.png'}, {teacher / 'metrics.png'} and {table}/")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
