"""FLUX.2-dev has a PixtralProcessor, which needs torchvision from transformers 5 on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import pipeline
from transformers.utils import is_torchvision_available

from flowalign.backbone import ModelError, load_pipeline

FOLDER = Path(__file__).parent
TORCHVISION = Path(sys.prefix) / "open_clip"  # where scripts/setup.sh puts it


@pytest.mark.slow
@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)  # of the fixture open_clip
    pipeline("flux2").save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PixtralProcessor"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"PixtralProcessor .* torchvision.*\[vision\]"):
        load_pipeline(str(tmp_path))


@pytest.mark.skipif(not is_torchvision_available(), reason="torchvision is not installed")
def test_flux2_has_the_real_processor() -> None:
    assert type(pipeline("flux2").tokenizer).__name__ == "PixtralProcessor"


@pytest.mark.long
@pytest.mark.skipif(not TORCHVISION.is_dir(), reason="run scripts/setup.sh")
def test_flux2_is_its_pipeline_with_the_real_processor() -> None:
    """`families.flux2` has it where there is a torchvision."""
    names = "flux2 and (pipelines or folder_is_enough or below or room or has_the)"
    files = [str(FOLDER / f"test_{x}.py") for x in ("families", "prompt_length", "processor")]
    found = [str(TORCHVISION), str(FOLDER.parent), str(FOLDER)]
    marks = ["-m", "slow or not slow", "-W", "ignore"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "with_torchvision", "-p", "no:cacheprovider",
         *marks, "-k", names, *files],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
