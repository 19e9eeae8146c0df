"""Predicted memory and hours of the configs of every family on GPUs of three sizes:
`python benchmarks/family_memory.py`, without weights.

Prints a Markdown table, a row a stage: peak GiB and hours of the whole stage with each variant of
configs/variants, on one GPU of a kind. "no": it does not fit. Prompt sets that are not here are
taken to be long enough. --weekend: a row for each weekend.yaml, hours of its teacher, student and
table, as `flowalign doctor` adds them.
"""

from __future__ import annotations

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from flowalign.commands import recipe
from flowalign.commands.doctor.advise import GIB, Device, forecasts, usable
from flowalign.commands.doctor.count import predict
from flowalign.commands.doctor.pace import GPUS, Pace, times
from flowalign.config import EvalStage, Stage, TrainingStage, load

FAMILIES = ("flux", "flux2", "qwen_image", "z_image", "sana")
PLAIN = ("sd35_medium",)  # whose variants have no suffix
STAGES = ("teacher_pickscore_nft", "student_flow_opd", "eval")
VARIANTS = {  # bytes of the GPU, and its kind
    "1x24gb_nf4": (24e9, "4090"),
    "1x48gb_checkpointing": (48e9, "l40s"),
    "1x80gb_checkpointing": (80e9, "h100"),
}


def cell(path: Path, variant: str) -> str:
    """Peak and hours of a stage with a variant."""
    (size, kind), file = VARIANTS[variant], Path("configs/variants", f"{variant}.yaml")
    config = load(path, variant=file, stage=Stage)
    assert isinstance(config, TrainingStage | EvalStage)
    estimate = predict(config, ranks={})
    if estimate.peak > usable(size, "cuda"):
        return f"no ({estimate.peak / GIB:.0f})"
    hours = times(estimate, Pace.of_gpu(GPUS[kind], estimate)).hours
    return f"{estimate.peak / GIB:.1f}, {hours:,.{0 if hours >= 10 else 1}f} h"


def weekend(family: str, variant: str) -> str:
    """Peak and hours of the teacher, the student and the table of a family's weekend recipe."""
    path, (size, kind) = Path("configs", family, "weekend.yaml"), VARIANTS[variant]
    name = variant.partition("_")[0] if family in PLAIN else variant
    config = load(path, variant=f"configs/variants/{name}.yaml", stage=Stage)
    with redirect_stdout(StringIO()):  # notes about downloads
        found = forecasts(recipe.examine(config, path.parent)[0], Device(1, kind))
    listed = [forecast.timed() for forecast in found]
    peak = max(forecast.estimate.peak for forecast in listed if forecast.estimate)
    if peak > usable(size, "cuda"):
        return f"no ({peak / GIB:.0f})"
    hours = [forecast.hours for forecast in listed]
    return f"{peak / GIB:.1f}, {' + '.join(f'{h:.1f}' for h in hours)} = {sum(hours):.1f} h"


def main() -> None:
    """Print the table of these families and stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=(*FAMILIES, *PLAIN))
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--weekend", action="store_true")
    args = parser.parse_args()
    heads = [f"`{variant}`, {kind}" for variant, (_, kind) in VARIANTS.items()]
    print("| config | " + " | ".join(heads) + " |\n" + "|---" * (1 + len(heads)) + "|")
    for family in args.families:
        if args.weekend:
            cells = " | ".join(weekend(family, variant) for variant in VARIANTS)
            print(f"| `{family}` | {cells} |", flush=True)
            continue
        for name in args.stages:
            path = Path("configs", family, f"{name}.yaml")
            cells = " | ".join(cell(path, variant) for variant in VARIANTS)
            print(f"| `{family}/{path.name}` | {cells} |", flush=True)


if __name__ == "__main__":
    main()
