"""HPS v2: its bars, and files that are not its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import pictures, shake

from flowalign.rewards import build
from flowalign.rewards.clip import letterbox

CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def saved(open_clip: ModuleType, folder: Path) -> dict:
    """The options of a small one in a folder."""
    (folder / "flowalign-small.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(folder / "flowalign-small.json")
    torch.manual_seed(0)
    model = open_clip.create_model("flowalign-small")
    shake(model)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, folder / "HPS_v2.1_compressed.pt")
    weights = str(folder / "HPS_v2.1_compressed.pt")
    return {"weights": weights, "architecture": "flowalign-small", "device": "cpu"}


@pytest.fixture(scope="module")
def options(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return saved(open_clip, tmp_path_factory.mktemp("hps"))


@pytest.mark.parametrize(("height", "width"), [(32, 20), (21, 64), (64, 64), (9, 7)])
def test_bars_are_black_and_leave_the_picture_in_the_middle(height: int, width: int):
    _, (picture,) = pictures(1, height, width)
    white = Image.new("RGB", picture.size, (255, 255, 255))
    mask = letterbox(np.asarray(white), 32)[:, :, 0]
    rows, columns = (mask == 255).any(1).nonzero()[0], (mask == 255).any(0).nonzero()[0]
    assert ((mask == 255) | (mask == 0)).all() and max(len(rows), len(columns)) == 32
    assert abs(rows[0] - (31 - rows[-1])) <= 1 and abs(columns[0] - (31 - columns[-1])) <= 1
    assert len(rows) / len(columns) == pytest.approx(height / width, rel=0.05)


def test_another_architecture_is_refused(options: dict):
    with pytest.raises(ValueError, match="ViT-H-41"):
        build("hpsv2", **{**options, "architecture": "ViT-H-41"})
