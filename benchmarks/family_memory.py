"""Predicted peak memory of the configs of every family on GPUs of three sizes:
`python benchmarks/family_memory.py`, without weights.

Prints a Markdown table: GiB of the preference teacher, the student and the evaluation of
configs/FAMILY, with each variant. Numbers in parentheses do not fit the variant's GPU.
"""

from __future__ import annotations

from pathlib import Path

from flowalign.config import EvalStage, Stage, TrainingStage, load
from flowalign.forecast.budget import GIB, usable
from flowalign.forecast.estimate import predict

FAMILIES = ("flux", "flux2", "qwen_image", "z_image", "sana")
STAGES = ("teacher_pickscore_nft", "student_flow_opd", "eval")
VARIANTS = {"1x24gb_nf4": 24, "1x48gb_checkpointing": 48, "1x80gb_checkpointing": 80}


def cell(family: str, variant: str) -> str:
    """The three peaks of a family with a variant."""
    peaks = []
    for name in STAGES:
        path = Path("configs", family, f"{name}.yaml")
        config = load(path, variant=Path("configs/variants", f"{variant}.yaml"), stage=Stage)
        assert isinstance(config, TrainingStage | EvalStage)
        peak = predict(config, ranks={}).peak
        fits = peak <= usable(VARIANTS[variant] * 1e9, "cuda")
        peaks.append(f"{peak / GIB:.1f}" if fits else f"({peak / GIB:.1f})")
    return ", ".join(peaks)


def main() -> None:
    """Print the table."""
    print("| config | " + " | ".join(VARIANTS) + " |\n" + "|---" * (1 + len(VARIANTS)) + "|")
    for family in FAMILIES:
        print(f"| `{family}` | " + " | ".join(cell(family, v) for v in VARIANTS) + " |", flush=True)


if __name__ == "__main__":
    main()
