# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# (diffusers annotates a pipeline's result loosely)
"""The shipped model and the commands that a stranger types, at the command line."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import StableDiffusion3Pipeline

import flowalign
from flowalign.backbone.adapters import adapter_folder, read_lora
from flowalign.backbone.tiny import MODEL
from flowalign.config import ADAPTER

ROOT = Path(__file__).parents[1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m ...` in the root of the checkout."""
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_model_is_small_and_stock_diffusers_loads_it() -> None:
    size = sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file())
    assert size <= 16_000_000
    pipe = StableDiffusion3Pipeline.from_pretrained(MODEL)
    assert pipe.text_encoder_3 is not None
    assert pipe.transformer.config.qk_norm == "rms_norm"
    assert pipe.tokenizer.tokenize('a sign that says "CAT"')[-3:] == ["C", "A", "T"]


@pytest.mark.parametrize("name", ["geneval", "guided", "ocr", "preference"])
def test_the_shipped_teachers_are_small_and_know_their_base(name: str) -> None:
    folder = adapter_folder(f"tiny/{name}")
    assert (folder / ADAPTER).stat().st_size < 1_000_000
    assert read_lora(folder).base == "tiny"
    pipe = flowalign.load("tiny", lora=f"tiny/{name}")
    assert pipe.get_list_adapters()["transformer"]


@pytest.mark.long
def test_the_demo_leaves_the_pictures_that_it_names_and_readmes_are_drawn_from_it(tmp_path: Path):
    """In small: one rollout of 8 images, and 9 prompts per task, of which 8 are shown."""
    limits = ", ".join(f"benchmarks.{i}.limit=9" for i in range(3))
    small = ["stages.student.train.updates=1", "stages.student.rollout={prompts: 8}",
             "stages.student.optimizer={updates_per_rollout: 1}",
             f"stages.table.set=[{limits}]", "stages.table.fidelity=null"]  # fmt: skip
    given = ["--config", "configs/tiny/demo.yaml", f"output={tmp_path}/demo", *small]
    done = command("flowalign.commands.cli", "train", *given)
    assert done.returncode == 0, done.stderr
    named = [Path(word) for word in done.stdout.split() if word.startswith(f"{tmp_path}/demo/")]
    files = {path for path in named if path.suffix in (".png", ".html")}
    assert {"grid.png", "report.html"} <= {path.name for path in files}
    for path in files:
        assert path.stat().st_size > 10_000
    page = (tmp_path / "demo" / "table" / "report.html").read_text()
    assert "all 9 prompts" in page
    results = json.loads((tmp_path / "demo" / "table" / "results.json").read_text())
    block = runpy.run_path(str(ROOT / "scripts" / "docs" / "pictures.py"))["block"]
    drawn = block(tmp_path / "demo" / "table", results, "ocr", 8)
    assert [row.name for row in drawn.rows][1:] == ["OCR teacher", "merge of the three", "student"]
    for row in drawn.rows:
        assert len(row.images) == len(drawn.heads) == 8
    model = next(row for row in results["models"]["flow_opd"]["rows"] if row["benchmark"] == "ocr")
    assert float(drawn.rows[3].note.split("all ")[1]) == pytest.approx(model["mean"], abs=0.01)
