"""Fills the tables of docs/before-you-spend.md with the doctor's predictions.

    python scripts/docs/costs.py

Prompt sets are stood in for by files of their sizes, and public adapters by LoRAs of rank 32, so
that no network is needed. It takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flowalign.commands.doctor.advise import GIB, Device, forecasts
from flowalign.commands.doctor.count import foreseen
from flowalign.commands.recipe import read_stages
from flowalign.config import Stage, TrainingStage, load
from flowalign.training.inputs import Inputs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "before-you-spend.md"
TABLE = "(?<=<!-- table: {} -->\n).*?(?=<!-- end -->)"
SETS = {"geneval_test.jsonl": 553, "ocr_test.txt": 1018, "drawbench.txt": 200}  # prompts
ROW = {"prompt": "a photo of a bench", "tag": "single_object"}
ROW["include"] = [{"class": "bench", "count": 1}]  # type: ignore[assignment]
SMALL = {"1x24gb": "4090", "1x48gb": "l40s", "1x80gb": "h100"}
LARGE = {"1x24gb_nf4": "4090", "1x48gb_checkpointing": "l40s", "1x80gb_checkpointing": "h100"}
RUNS = {
    "teacher_geneval": " (GRPO)",
    "teacher_geneval_nft": "",
    "teacher_geneval_nft_published": "",
    "teacher_geneval_awm": "",
    "student_flow_opd": "",
    "student_flow_opd_paper": "",
}
FAMILIES = {
    "flux": " (FLUX.1-dev)",
    "flux2": " (klein-base-4B)",
    "qwen_image": "",
    "z_image": "",
    "sana": " (1.6B, 1024 pixels)",
}


class Cost(NamedTuple):
    """peak in GiB; hours by stage; changes: whether it fits only after the doctor's."""

    peak: float
    hours: dict[str, float]
    fits: bool
    changes: bool

    @property
    def after(self) -> str:
        return " after the doctor's changes" if self.changes else ""


@cache
def cost(config: str, variant: str | None, gpu: str) -> Cost:
    """What a config costs on a GPU."""
    path = ROOT / "configs" / config
    given = ROOT / "configs" / "variants" / f"{variant}.yaml" if variant else None
    root = load(path, stage=Stage, variant=given)
    stages, problems = read_stages(root, path.parent)
    assert not problems, problems
    inputs = Inputs(root.model)
    written = {str(stage.folder.adapter) for stage in stages.values()}
    like = load(path.parent / "teacher_ocr_nft.yaml", stage=TrainingStage)
    for stage in stages.values():
        for source in {*stage.inputs.values()} - written:
            inputs.pending[str(source)] = foreseen(like, inputs)
    found = forecasts(stages, Device(1, gpu), inputs)
    told = [one.fitting.timed() for one in found if one.estimate]
    return Cost(
        max(one.estimate.peak for one in told) / GIB,
        {one.name: one.hours for one in told},
        not any(one.too_large for one in told),
        any(one.advice for one in found if one.estimate),
    )


def hours(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def of_runs() -> Iterator[list[str]]:
    yield ["config, updates x images", "`1x24gb`, RTX 4090", "`1x48gb`, L40S", "`1x80gb`, H100"]
    for name, note in RUNS.items():
        config = f"sd35_medium/{name}.yaml"
        stage = load(ROOT / "configs" / config, stage=TrainingStage)
        row = [f"`{name}.yaml`{note}, {stage.train.updates} x {stage.rollout.images}"]
        for variant, gpu in SMALL.items():
            found = cost(config, variant, gpu)
            row.append(f"{found.peak:.1f}, {hours(sum(found.hours.values()))} h{found.after}")
        yield row


def of_families() -> Iterator[list[str]]:
    yield [
        "family", "`1x24gb_nf4`, RTX 4090", "`1x48gb_checkpointing`, L40S",
        "`1x80gb_checkpointing`, H100",
    ]  # fmt: skip
    for family, note in FAMILIES.items():
        row = [f"`{family}`{note}"]
        for variant, gpu in LARGE.items():
            names = ("teacher_pickscore_nft", "student_flow_opd", "eval")
            parts = [cost(f"{family}/{name}.yaml", variant, gpu) for name in names]
            if not all(part.fits for part in parts):
                row.append(f"does not fit ({max(part.peak for part in parts):.0f})")
                continue
            sums = " + ".join(hours(sum(part.hours.values())) for part in parts)
            changed = next((part.after for part in parts if part.changes), "")
            row.append(f"{parts[0].peak:.1f}, {sums} h{changed}")
        yield row


def of_weekends() -> Iterator[list[str]]:
    yield ["family", "RTX 4090 (`1x24gb_nf4`)", "L40S (`1x48gb_checkpointing`)",
           "H100 (`1x80gb_checkpointing`)"]  # fmt: skip
    for family in ("sd35_medium", *FAMILIES):
        row = [f"`{family}`"]
        for variant, gpu in (SMALL if family == "sd35_medium" else LARGE).items():
            found = cost(f"{family}/weekend.yaml", variant, gpu)
            whole = f"{found.peak:.1f}, {hours(sum(found.hours.values()))} h{found.after}"
            row.append(whole if found.fits else f"does not fit ({found.peak:.0f} GiB)")
        yield row


def of_recipes() -> Iterator[list[str]]:
    yield ["recipe", "GPU", "hours of its stages", "in all"]
    recipes = [("smoke", "1x24gb", "4090"), ("flow_opd_public", "1x24gb", "4090"),
               ("flow_opd", "1x80gb", "h100")]  # fmt: skip
    for name, variant, gpu in recipes:
        found = cost(f"sd35_medium/{name}.yaml", variant, gpu)
        listed = ", ".join(f"{stage} {hours(value)}" for stage, value in found.hours.items())
        yield [f"`{name}.yaml`", gpu.upper(), listed, hours(sum(found.hours.values()))]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    tables = {"runs": of_runs, "recipes": of_recipes, "families": of_families,
              "weekends": of_weekends}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("data").mkdir()
        for name, count in SETS.items():
            line = json.dumps(ROW) if name.endswith("jsonl") else 'a sign that says "OPEN"'
            Path("data", name).write_text(f"{line}\n" * count, encoding="utf-8")
        for name, rows in tables.items():
            found = markdown(list(rows()))
            print(f"\n{name}\n{found}", flush=True)
            page = PAGE.read_text(encoding="utf-8")  # now: somebody may have written it meanwhile
            page = re.sub(TABLE.format(name), lambda _, t=found: t, page, flags=re.DOTALL)
            PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
