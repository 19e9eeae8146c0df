"""The Mask2Former detector is its formula, in any batch and shape; what cannot work is refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import geneval_models
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from flowalign.rewards.geneval_judge import NAMES
from flowalign.rewards.mask2former import Mask2Former, instances


@pytest.fixture(scope="module")
def options(open_clip: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("detector")
    clip = geneval_models.clip(open_clip, folder)
    return {
        "model": geneval_models.mask2former(folder / "mask2former"), "clip": clip["architecture"],
        "clip_pretrained": clip["pretrained"], "size": [64, 128], "device": "cpu",
    }  # fmt: skip


@pytest.fixture(scope="module")
def detector(options: dict[str, Any]) -> Mask2Former:
    return Mask2Former(**options)


def pictures(count: int, height: int = 40, width: int = 56) -> Tensor:
    """Images [count,3,height,width] in [0,1] with something large in them."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(count, 3, 4, 5, generator=generator)
    fine = torch.rand(count, 3, height, width, generator=generator)
    return 0.8 * nn.functional.interpolate(coarse, (height, width)) + 0.2 * fine


def bilinear(plane: np.ndarray, height: int, width: int) -> np.ndarray:
    """plane [h,w] resampled between pixel centres, edges repeated."""

    def weights(old: int, new: int) -> np.ndarray:
        matrix = np.zeros((new, old))
        for i in range(new):
            x = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
            low = int(x)
            matrix[i, low] += 1 - (x - low)
            matrix[i, min(low + 1, old - 1)] += x - low
        return matrix

    return weights(len(plane), height) @ plane @ weights(plane.shape[1], width).T


def by_hand(
    class_logits: np.ndarray, mask_logits: np.ndarray, sizes: tuple[Any, Any, Any], top: int = 100
) -> list[tuple[str, list[int], float]]:
    """(class, box, score) of the instances that logits [Q,C+1] and [Q,h,w] stand for."""
    padded, (height, width), image = sizes
    pairs, found = [], []
    for query, logits in enumerate(class_logits.astype(np.float64)):
        chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        pairs += [(chance, query, label) for label, chance in enumerate(chances[:-1])]
    for chance, query, label in sorted(pairs, reverse=True)[:top]:
        plane = bilinear(mask_logits[query].astype(np.float64), *padded)
        plane = bilinear(plane[:height, :width], *image)
        ys, xs = np.nonzero(plane > 0)
        if len(ys):
            sure = float(np.mean(1 / (1 + np.exp(-plane[plane > 0]))))
            box = [int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1]
            found.append((NAMES[label], box, float(chance) * sure))
    return found


def network_input(image: Tensor, size: tuple[int, int], padded: tuple[int, int]) -> Tensor:
    """[1,3,*padded]: PIL's resize of the 8-bit image, ImageNet's normalisation, zeros around."""
    array = (image * 255).round().byte().permute(1, 2, 0).numpy()
    resized = Image.fromarray(array).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    values = np.asarray(resized, np.float64) / 255
    values = (values - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    whole = np.zeros((*padded, 3), np.float32)
    whole[: size[0], : size[1]] = values
    return torch.from_numpy(whole).permute(2, 0, 1)[None]


def listed(boxes: Any) -> list[tuple[str, list[float], float]]:
    return [(name, box[:4], box[4]) for name, of in boxes.items() for box in of]


def agree(ours: Any, expected: list, tolerance: float = 1e-4) -> None:
    """The same boxes in any order, each with its score."""
    ours, expected = (sorted(each) for each in (ours, expected))
    assert [(name, list(box)) for name, box, _ in ours] == [(n, list(b)) for n, b, _ in expected]
    np.testing.assert_allclose([s for *_, s in ours], [s for *_, s in expected], atol=tolerance)


@pytest.mark.parametrize(
    ("height", "width", "resized", "padded"),
    [
        (64, 64, (64, 64), (64, 64)),
        (40, 56, (64, 89), (64, 96)),  # 89.6: transformers cuts where mmdet rounds
        (90, 30, (128, 43), (128, 64)),  # the longer would pass 128
    ],
)
def test_boxes_and_scores_are_the_formula(detector, height, width, resized, padded):
    image = pictures(1, height, width)
    with torch.no_grad():
        seen = detector.network(pixel_values=network_input(image[0], resized, padded))
    logits = seen.class_queries_logits[0].numpy(), seen.masks_queries_logits[0].numpy()
    expected = by_hand(*logits, (padded, resized, (height, width)))
    ((found),) = detector(image)
    agree(listed(found.boxes), expected)
    assert len(expected) > 20 and max(s for *_, s in expected) > 0.05


def test_boxes_of_masks_of_all_sizes_are_the_formula():
    generator = torch.Generator().manual_seed(4)
    spots = 3 * torch.randn(20, 4, 6, generator=generator) - torch.arange(20)[:, None, None] / 2
    masks = nn.functional.interpolate(spots[None], (16, 24), mode="bilinear")[0]
    classes = 3 * torch.randn(20, 81, generator=generator)
    for image in ((48, 88), (37, 90), (120, 200)):
        sizes = (64, 96), (48, 88), image
        expected = by_hand(classes.numpy(), masks.numpy(), sizes, 30)
        found = instances(classes, masks, *sizes, top=30)
        rows = zip(found.labels, found.boxes.tolist(), found.scores, strict=True)
        agree([(NAMES[label], box, score) for label, box, score in rows], expected, 1e-5)
        assert len({tuple(box) for _, box, _ in expected}) > 5 and len(expected) < 30  # some empty
        for mask, (x1, y1, x2, y2) in zip(found.masks, found.boxes.tolist(), strict=True):
            assert mask.shape == (y2 - y1, x2 - x1) and mask[0].any() and mask[:, -1].any()


def test_batch_size_and_order_do_not_matter(options: dict[str, Any], detector: Mask2Former):
    """Up to rounding: matrix products of other shapes may add in another order."""
    images = pictures(5)
    whole = [listed(found.boxes) for found in detector(images)]
    singly = [listed(found.boxes) for found in Mask2Former(**options, batch_size=1)(images)]
    turned = [listed(found.boxes) for found in detector(images.flip(0))][::-1]
    for row in range(5):
        agree(singly[row], whole[row], 1e-5)
        agree(turned[row], whole[row], 1e-5)
    assert whole[0] != whole[1]
    assert detector(images[:0]) == []


def test_broken_pixels_and_a_broken_answer_raise(detector: Mask2Former):
    images = pictures(2)
    images[1, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        detector(images)
    with pytest.raises(ValueError, match="NaN"):
        instances(torch.zeros(1, 81), torch.full((1, 2, 2), torch.nan), (8, 8), (8, 8), (8, 8))


def test_a_model_of_other_labels_or_without_its_weights_is_refused(options, tmp_path: Path):
    panoptic = geneval_models.mask2former(tmp_path / "panoptic", labels=133)
    with pytest.raises(ValueError, match="133 labels"):
        Mask2Former(**(options | {"model": panoptic}))
    from safetensors.torch import load_file, save_file

    broken = geneval_models.mask2former(tmp_path / "broken") + "/model.safetensors"
    state = load_file(broken)
    del state["class_predictor.weight"]
    save_file(state, broken, {"format": "pt"})
    with pytest.raises(ValueError, match="class_predictor.weight"):
        Mask2Former(**(options | {"model": str(tmp_path / "broken")}))


def test_the_names_are_the_official_ones_in_their_order():
    assert len(set(NAMES)) == 80
    assert NAMES[0] == "person" and NAMES[64] == "computer mouse" and NAMES[79] == "toothbrush"
