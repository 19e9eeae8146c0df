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


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="run scripts/setup.sh")
def test_families_are_the_pipelines_of_the_oldest_versions() -> None:
    names = "not z_image and (pipelines or diffusers_and_back or folder_is_enough)"
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=ignore", "-k", names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER / "test_families.py")],
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
