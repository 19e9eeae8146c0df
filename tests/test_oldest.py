"""The families on the oldest diffusers, transformers, peft and accelerate that are admitted.

scripts/setup.sh puts them beside the environment. A family that is right only in a newer diffusers
is refused in an older one.
"""

import os
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest

from flowalign.backbone import ModelError, family_of
from flowalign.backbone.loading import FAMILIES

FOLDER = Path(__file__).parent
OLDEST = Path(sys.prefix) / "oldest"


PIPELINES = "not z_image and (pipelines or diffusers_and_back or folder_is_enough)"
# diffusers 0.37 reads no kohya files of FLUX.2, and fewer of ComfyUI's; flowalign reads these
LORAS = "(public_lora and not comfy or does_not_read or guard) and not z_image and not kohya_flux2"


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="run scripts/setup.sh")
@pytest.mark.parametrize(("file", "names"), [("families", PIPELINES), ("lora_formats", LORAS)])
def test_pipelines_and_loras_are_right_with_the_oldest_versions(file: str, names: str) -> None:
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "-o", "filterwarnings=ignore"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", names, str(FOLDER / f"test_{file}.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(OLDEST), str(FOLDER.parent)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("pipeline", "version"), [(name, "0.36.0") for name in FAMILIES] + [("ZImagePipeline", "0.38")]
)
def test_a_family_is_refused_where_it_is_not_right(
    pipeline: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffusers, "__version__", FAMILIES[pipeline].since)
    assert family_of(pipeline) is FAMILIES[pipeline]
    monkeypatch.setattr(diffusers, "__version__", version)
    with pytest.raises(ModelError, match=FAMILIES[pipeline].since):
        family_of(pipeline)
