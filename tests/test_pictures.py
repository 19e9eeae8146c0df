"""The gallery: every image in its place, under its model's name and beside its prompt."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import flowalign
from flowalign.training.report import pictures
from flowalign.training.report.pictures import (
    Block,
    Row,
    comparison,
    gallery,
    metrics_plot,
)

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
    picture = flowalign.gallery(models(), PROMPTS, {"m0": [1.0, 2.0, 3.0]}, title="a title")
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


@pytest.mark.parametrize(
    ("images", "prompts", "captions", "message"),
    [
        (models(), PROMPTS[:2], {}, "3 images of 'm0' for 2 prompts"),
        (models(), PROMPTS, {"m1": [0.5]}, "1 captions of 'm1' for 3 prompts"),
    ],
)
def test_what_does_not_fit_together_is_refused(images, prompts, captions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gallery(images, prompts, captions)


def test_a_name_that_the_package_lacks_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'galery'"):
        flowalign.galery  # noqa: B018  # pyright: ignore


def block(title: str, scores: list[float]) -> Block:
    captions = [f"{score:.2f}" for score in scores]
    rows = [Row(images, captions, name, "judge 0.25") for name, images in models().items()]
    return Block(title, PROMPTS, rows)


def test_models_of_a_comparison_are_rows_and_blocks_stand_below_one_another(tmp_path: Path) -> None:
    comparison(tmp_path / "one.png", [block("a", [0, 1, 0])], title="T")
    comparison(tmp_path / "two.png", [block("a", [0, 1, 0]), block("b", [0, 1, 0])], title="T")
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "two.png") as two:
        picture, taller = one.convert("RGB"), two.convert("RGB")
    assert picture.width == taller.width and taller.height > 1.7 * picture.height
    places = np.array([[place(picture, COLOURS[m, p]) for p in range(3)] for m in range(2)])
    rows, columns = places[..., 0], places[..., 1]
    assert np.ptp(rows, 1).max() < 2 and (np.diff(rows, axis=0) > 100).all()
    assert np.ptp(columns, 0).max() < 2 and (np.diff(columns, axis=1) > 100).all()


def test_two_kinds_of_charts_are_drawn(tmp_path: Path) -> None:
    rows = [{"update": n, "reward": n / 40, "kl/task": 1.0, "kl/step_0": 2.0} for n in range(40)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    drawn = pictures.charts(pictures.read_metrics(log))
    metrics_plot(drawn, tmp_path / "metrics.png", "title")
    assert (tmp_path / "metrics.png").stat().st_size > 1000
    charts = {chart.title: chart for chart in drawn}
    assert list(charts["KL to the teacher, by task"].curves) == ["task"]
    assert list(charts["KL to the teacher, by step"].curves) == ["step_0"]


def test_every_panel_says_what_is_good(tmp_path: Path) -> None:
    names = ["reward", "eval/headline", "distill", "anchor", "kl", "kl/a", "kl/step_0",
             "velocity_error/a", "velocity_error/step_0", "kept_share",
             "clip_fraction", "invalid_share"]  # fmt: skip
    found = pictures.charts({name: [(0, 1.0), (1, 0.5)] for name in names})
    assert len(found) == 9 and all(chart.about.endswith(".") for chart in found)
    assert all(f"{name}: " in found[-1].about for name in names[-3:])
    (loss,) = pictures.charts({"loss": [(0, 1.0), (1, 0.5)]})
    assert loss.about
