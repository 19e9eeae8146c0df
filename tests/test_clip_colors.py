"""The colour of an object is the official script's, asked lazily and once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import geneval_models
import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.rewards.geneval_judge import COLORS
from flowalign.rewards.mask2former import ClipColors, _open_clip_weights


@pytest.fixture(scope="module")
def options(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return geneval_models.clip(open_clip, tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def colors(options: dict[str, Any]) -> ClipColors:
    return ClipColors(**options, device="cpu")


def scenes(count: int) -> list[tuple[np.ndarray, np.ndarray, tuple[int, int, int, int]]]:
    """(pixels [H,W,3], mask [H,W], its tight box) of ellipses of one colour before noise."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        pixels = rng.integers(0, 256, (60, 80, 3), np.uint8)
        (x, y), (a, b) = rng.integers(20, 40, 2), rng.integers(5, 20, 2)
        rows, columns = np.mgrid[:60, :80]
        mask = ((columns - x) / a) ** 2 + ((rows - y) / b) ** 2 < 1
        pixels[mask] = rng.integers(0, 256, 3)
        ys, xs = np.nonzero(mask)
        found.append((pixels, mask, (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)))
    return found


def asked(colors: ClipColors, scene: tuple) -> str:
    pixels, mask, (x1, y1, x2, y2) = scene
    return colors.color(pixels[y1:y2, x1:x2], mask[y1:y2, x1:x2], "dog")


def official_texts(colors: ClipColors, thing: str) -> list[torch.Tensor]:
    """The unit vector of each colour of a thing, by the official steps."""
    rows = []
    for c in COLORS:
        texts = [f"a photo of a {c} {thing}", f"a photo of a {c}-colored {thing}"]
        read = colors.model.encode_text(colors.tokenizer([*texts, f"a photo of a {c} object"]))
        vectors = [vector / vector.norm() for vector in read]
        mean = (vectors[0] + vectors[1] + vectors[2]) / 3
        rows.append(mean / mean.norm())
    return rows


def official(colors: ClipColors, scene: tuple, rows: list[torch.Tensor]) -> tuple[str, float]:
    """The official steps one by one: the colour, and by how much it leads."""
    pixels, mask, box = scene
    image = Image.fromarray(pixels)
    painted = Image.composite(image, Image.new("RGB", image.size, "#999"), Image.fromarray(mask))
    seen = colors.model.encode_image(colors.preprocess(painted.crop(box))[None])[0]
    scores = [float(seen @ row / seen.norm()) for row in rows]
    best, second = sorted(scores, reverse=True)[:2]
    return COLORS[int(np.argmax(scores))], best - second


@torch.no_grad()
def test_the_colour_is_that_of_the_official_steps(colors: ClipColors):
    told, texts = [], official_texts(colors, "dog")
    for scene in scenes(12):
        expected, lead = official(colors, scene, texts)
        if lead > 1e-5:  # below, rounding decides
            told.append(expected)
            assert asked(colors, scene) == expected
    assert len(told) >= 8 and len(set(told)) >= 2  # else it could not have failed


def test_a_box_is_looked_at_when_asked_for_and_once(monkeypatch: pytest.MonkeyPatch, colors):
    scene = scenes(2)
    boxes = {"dog": [[*map(float, box), 0.9] for _, _, box in scene]}
    masks = {"dog": [mask[y1:y2, x1:x2] for _, mask, (x1, y1, x2, y2) in scene]}
    looks: list[int] = []
    encode = colors.model.encode_image
    monkeypatch.setattr(colors.model, "encode_image", lambda x: looks.append(len(x)) or encode(x))
    lazy = colors.of_boxes(scene[1][0], boxes, masks)
    assert looks == []
    assert lazy("dog", 1) == lazy("dog", 1) == asked(colors, scene[1])
    assert looks == [1, 1]  # one for the box, one for our own question


def test_openai_weights_get_their_quick_gelu(open_clip: ModuleType, options: dict[str, Any]):
    """open_clip 3 only warns where ViT-L-14 without it loads weights that need it."""
    assert _open_clip_weights(open_clip, "ViT-L-14", "openai") == ("openai", True)
    assert _open_clip_weights(open_clip, "ViT-L-14", "laion2b_s32b_b82k") == (
        "laion2b_s32b_b82k",
        False,
    )
    built = ClipColors(**options, device="cpu").model
    assert type(built.visual.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
    assert type(built.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
