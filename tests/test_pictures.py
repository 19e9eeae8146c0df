"""The gallery: every image in its place, under its model's name and beside its prompt."""

import base64
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import flowalign
from flowalign.training.report import pictures
from flowalign.training.report.pictures import (
    Block,
    comparison,
    gallery,
    metrics_plot,
    scored_row,
)

COLOURS = torch.tensor(
    [[[220, 0, 0], [0, 180, 0], [0, 0, 240]], [[240, 200, 0], [0, 200, 200], [150, 0, 150]]]
)  # [model, prompt, RGB]
PROMPTS = ["one", "two", "three"]


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


def test_a_picture_may_be_a_tensor_a_batch_or_of_pil() -> None:
    tensors = models()
    batches = {name: torch.stack(images) for name, images in tensors.items()}
    arrays = {name: (images * 255).round().byte().numpy() for name, images in batches.items()}
    pil = {
        name: [Image.fromarray(image.transpose(1, 2, 0)) for image in images]
        for name, images in arrays.items()
    }
    one = gallery(tensors, PROMPTS)
    assert one.tobytes() == gallery(batches, PROMPTS).tobytes() == gallery(pil, PROMPTS).tobytes()


def test_a_score_is_shown_to_two_places_and_a_failed_one_as_failed() -> None:
    scores = torch.tensor([0.126, float("nan"), -1.0])
    texts = ["0.13", "failed", "-1.00"]
    drawn = gallery(models(), PROMPTS, {"m1": scores})
    assert drawn.tobytes() == gallery(models(), PROMPTS, {"m1": texts}).tobytes()
    assert drawn.tobytes() != gallery(models(), PROMPTS, {"m0": texts}).tobytes()


def test_long_captions_get_the_room_they_need() -> None:
    captions = {"m0": ["a reason that takes more than one line of a caption\nand another"] * 3}
    tall, short = gallery(models(), PROMPTS, captions), gallery(models(), PROMPTS, {"m0": "abc"})
    assert tall.width == short.width and tall.height > short.height + 3 * 30


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


@pytest.mark.slow
def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'diffusers', 'matplotlib', 'PIL', 'numpy'}"
    code = f"import sys, flowalign; assert not {heavy} & set(sys.modules); flowalign.gallery"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'galery'"):
        flowalign.galery  # noqa: B018  # pyright: ignore


def test_a_run_that_logs_nothing_but_its_loss_has_a_plot(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"update": 1, "loss": 0.5}\n{"update": 2, "loss": 0.4}\n'
    )
    metrics_plot(tmp_path / "metrics.jsonl", tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").stat().st_size > 1000


# A comparison ------------------------------------------------------------------------------------


def block(title: str, scores: list[float]) -> Block:
    numbers = {"judge": 0.25}
    rows = [
        scored_row(name, images, {"judge": scores}, numbers) for name, images in models().items()
    ]
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


def test_a_row_has_the_mean_of_what_is_shown_and_the_number_of_the_whole_set() -> None:
    row = scored_row("m", [], {"a": [0.5, float("nan"), 1.0]}, {"a": 0.25})
    assert row.note == "shown 0.75\nall 0.25" and row.captions == ["0.50", "failed", "1.00"]
    both = scored_row("m", [], {"a": [0.5], "b": [2.0]}, {"a": 0.25, "b": float("nan")})
    assert both.note == "a\nshown 0.50\nall 0.25\nb\nshown 2.00"
    assert both.captions == ["0.50\n2.00"]


# The metrics -------------------------------------------------------------------------------------


def drawn_steps(tmp_path: Path, *, anew: bool) -> dict[str, pictures.Chart]:
    """A log whose distance halves over 40 updates, and is ten times larger at step 1."""
    lines = []
    for update in range(40):
        step = update % 3 % 2 if anew else 0
        size = (10 if step else 1) * 0.5 ** (update / 40)
        lines.append({"update": update, f"weight/step_{step}": 1.0, "distill": size,
                      "kl/task": size, f"kl/step_{step}": size})  # fmt: skip
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    metrics_plot(log, tmp_path / "metrics.png", "title")
    assert (tmp_path / "metrics.png").stat().st_size > 1000
    return {chart.title: chart for chart in pictures.charts(pictures.read_metrics(log))}


def test_a_distance_is_compared_with_that_of_the_same_step_only(tmp_path: Path) -> None:
    panels = drawn_steps(tmp_path, anew=True)
    for title, curve in (("distance to teacher and anchor", "distill"),
                         ("KL to the teacher, by task", "task")):  # fmt: skip
        values = [value for _, value in panels[title].curves[curve]]
        assert len(values) == 40 and 1.3 < values[0] < 1.6 and 0.6 < values[-1] < 0.8
        assert max(abs(b - a) for a, b in pairwise(values)) < 0.1  # a step does not show
    assert list(panels["KL to the teacher, by step"].curves) == ["step_0", "step_1"]


def test_a_distance_of_the_same_steps_is_drawn_as_it_is(tmp_path: Path) -> None:
    panels = drawn_steps(tmp_path, anew=False)
    assert panels["KL to the teacher, by task"].curves["task"][0] == (0, 1.0)


@pytest.mark.parametrize("updates", [5, 40])
def test_curves_that_are_equal_are_all_seen(tmp_path: Path, updates: int) -> None:
    rows = [{"update": n, "clip_fraction": 0.0, "invalid_share": 0.0} for n in range(updates)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    metrics_plot(log, tmp_path / "metrics.png")
    picture = np.asarray(Image.open(tmp_path / "metrics.png").convert("RGB")).astype(int)
    axes = picture[: picture.shape[0] * 3 // 4]  # the legend is below
    for colour in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):  # matplotlib's first two
        assert (np.abs(axes - colour).sum(-1) < 20).sum() > 30
    (chart,) = pictures.charts(pictures.read_metrics(log))
    text = base64.b64decode(chart.source.partition(",")[2]).decode()
    assert text.count(": 0 throughout") >= 2


def test_every_panel_says_what_is_good(tmp_path: Path) -> None:
    names = ["reward", "eval/headline", "distill", "anchor", "kl", "kl/a", "kl/step_0",
             "velocity_error/a", "velocity_error/step_0", "gradient_cosine/a~b", "kept_share",
             "clip_fraction", "invalid_share"]  # fmt: skip
    found = pictures.charts({name: [(0, 1.0), (1, 0.5)] for name in names})
    assert len(found) == 10 and all(chart.about.endswith(".") for chart in found)
    assert all(f"{name}: " in found[-1].about for name in names[-3:])
    (loss,) = pictures.charts({"loss": [(0, 1.0), (1, 0.5)]})
    assert loss.about
