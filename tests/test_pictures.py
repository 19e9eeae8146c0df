"""The gallery: every image in its place, under its model's name and beside its prompt."""

import numpy as np
import pytest
import torch
from PIL import Image

import flowalign
from flowalign.report.pictures import gallery

COLOURS = torch.tensor(
    [[[220, 0, 0], [0, 180, 0], [0, 0, 240]], [[240, 200, 0], [0, 200, 200], [150, 0, 150]]]
)  # [model, prompt, RGB]
PROMPTS = ["one", "two", "three"]
pytestmark = pytest.mark.usefixtures("drawn")


def plain(model: int, prompt: int, size: int = 64) -> torch.Tensor:
    return (COLOURS[model, prompt] / 255)[:, None, None].expand(3, size, size)


def models() -> dict[str, list[torch.Tensor]]:
    return {f"m{m}": [plain(m, p) for p in range(3)] for m in range(2)}


def place(picture: Image.Image, colour: torch.Tensor) -> tuple[float, float, int]:
    """Mean row and column, and number, of the pixels of a colour."""
    alike = np.abs(np.asarray(picture).astype(int) - colour.numpy()).max(2) < 3
    rows, columns = np.nonzero(alike)
    return rows.mean(), columns.mean(), len(rows)


def test_models_are_columns_and_prompts_rows() -> None:
    picture = flowalign.gallery(models(), PROMPTS, {"m0": [1.0, 2.0, 3.0]})
    places = np.array([[place(picture, COLOURS[m, p]) for p in range(3)] for m in range(2)])
    rows, columns, sizes = places[..., 0], places[..., 1], places[..., 2]
    assert np.ptp(rows, 0).max() < 2 and (np.diff(rows, axis=1) > 100).all()
    assert np.ptp(columns, 1).max() < 2 and (np.diff(columns, axis=0) > 100).all()
    assert sizes.min() > 150**2 and np.ptp(sizes) < 0.03 * sizes.min()


def test_a_score_is_shown_to_two_places_and_a_failed_one_as_failed() -> None:
    scores = torch.tensor([0.126, float("nan"), -1.0])
    texts = ["0.13", "failed", "-1.00"]
    drawn = gallery(models(), PROMPTS, {"m1": scores})
    assert drawn.tobytes() == gallery(models(), PROMPTS, {"m1": texts}).tobytes()
    assert drawn.tobytes() != gallery(models(), PROMPTS, {"m0": texts}).tobytes()
