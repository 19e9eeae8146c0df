"""Pictures for people: image files, labelled grids of images, and the plot of a run's metrics."""

from __future__ import annotations

import base64
import io
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from flowalign.system.escape import shown
from flowalign.system.files import read_lines, replacing
from flowalign.system.images import to_uint8
from flowalign.training import metrics

SMALL_IMAGE = 128  # pixels: narrower images are drawn with sharp pixels
LONGEST_SIDE = 256  # pixels of an image in a page or a JSON file
COLUMNS = 8  # images in a row
Curve = list[tuple[int, float]]  # (update, value), ...


def png(image: Tensor) -> bytes:
    """A PNG file of an image [3,H,W] in [0,1]; NaN is black."""
    return _encoded(_picture(image), format="PNG")


def webp(image: Tensor) -> str:
    """base64 of a small WebP file of an image [3,H,W] in [0,1]; a tiny one without loss."""
    picture = _picture(image)
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    lossless = max(picture.size) <= SMALL_IMAGE
    file = _encoded(picture, format="WEBP", quality=85, lossless=lossless)
    return base64.b64encode(file).decode()


def _picture(image: Tensor) -> Image.Image:
    return Image.fromarray(to_uint8(image.nan_to_num(0.0, 1.0, 0.0)))


def _encoded(picture: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, **options)
    return file.getvalue()


# Grids -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Images in a row, a caption below each; to the left a name, and a note in grey."""

    images: Sequence[Tensor | Image.Image] | Tensor  # tensors [3,H,W] in [0,1]
    captions: Sequence[str]
    name: str = ""
    note: str = ""


@dataclass(frozen=True)
class Block:
    """A title, heads of the columns, and rows below them."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Row]


def comparison(path: Path, blocks: Sequence[Block], *, title: str = "") -> None:
    """Write blocks below one another: a row per model, a column per prompt."""
    _save(_draw(blocks, cell=0.8, dpi=160, head=title), path)


def grid(
    path: Path, images: Tensor | Sequence[Tensor], captions: Sequence[str], *, title: str = ""
) -> None:
    """Write images [N,3,H,W] in [0,1] with a caption under each, as a PNG of COLUMNS columns."""
    _save(_grid(images, captions, title), path)


def sheet(images: Tensor | Sequence[Tensor], captions: Sequence[str]) -> Image.Image:
    """An image for a notebook: the `grid` of images, without a file."""
    return _image(_grid(images, captions))


def _grid(images: Any, captions: Sequence[str], title: str = "") -> Figure:
    starts = range(0, len(images), COLUMNS)
    rows = [Row(images[i : i + COLUMNS], captions[i : i + COLUMNS]) for i in starts]
    return _draw([Block(title, [], rows)])


def _image(figure: Figure) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file)
    return Image.open(file).convert("RGB")


def gallery(
    models: Mapping[str, Sequence[Tensor | Image.Image] | Tensor],
    prompts: Sequence[str],
    captions: Mapping[str, Sequence[str | float] | Tensor] | None = None,
) -> Image.Image:
    """Several models on the same prompts, for a notebook: one row per prompt, one column per model.

    models: name -> its images, one per prompt, in the order of `prompts`: PIL images, or tensors
    [3,H,W] in [0,1] (also a batch [N,3,H,W]). captions: name -> the captions of its images, texts
    or numbers (the `value` of Scores; NaN is drawn as "failed"); models may be left out.
    `.save("gallery.png")` writes it. Raises ValueError if their numbers differ.
    """
    captions = captions or {}
    for kind, by_name in (("images", models), ("captions", captions)):
        for name, items in by_name.items():
            if len(items) != len(prompts):
                raise ValueError(
                    f"{len(items)} {kind} of {name!r} for {len(prompts)} prompts; give one each."
                )

    def caption(name: str, row: int) -> str:
        value: Any = captions[name][row] if name in captions else ""
        return value if isinstance(value, str) else score_text(float(value))

    rows = [
        Row([models[name][row] for name in models], [caption(name, row) for name in models], prompt)
        for row, prompt in enumerate(prompts)
    ]
    return _image(_draw([Block("", list(models), rows)]))


LABEL, GAP = 1.55, 0.07  # inches: left of the images, and between them
FONT = 8  # points
SPACING = 1.2  # of lines, in fonts
LETTERS_AN_INCH = 17  # of FONT in an inch
LINES = 12  # of a caption before it is wrapped


def _draw(blocks: Sequence[Block], *, cell: float = 1.6, dpi: int = 120, head: str = "") -> Figure:
    """A figure of blocks, one below another, with the title `head`. cell: width of an image in
    inches. An image of 64 pixels is drawn at an integer multiple of its size."""
    figure = Figure(dpi=dpi)
    axis = figure.add_axes((0, 0, 1, 1))  # its coordinates are inches from the upper left corner
    rows = [row for block in blocks for row in block.rows]
    columns = max(len(row.images) for row in rows)
    left = LABEL if rows[0].name else GAP
    width = max(4.0, left + columns * (cell + GAP))
    y = 0.1

    def write(x: float, y: float, text: str, size: float = FONT, **style: Any) -> float:
        """Write a text below y; returns its height."""
        axis.text(x, y, text, fontsize=size, va="top", linespacing=SPACING, **style)
        return (text.count("\n") + 1) * size * SPACING / 72 if text else 0.0

    y += write(0.1, y, textwrap.fill(_plain(head), int(12.5 * width)), 10)
    for block in blocks:
        y += write(0.1, y + 0.08, _plain(block.title), 11.5, weight="bold") + 0.12
        heights = [
            write(left + column * (cell + GAP), y, _wrapped(text, cell))
            for column, text in enumerate(block.heads)
        ]
        if heights:
            y += max(heights) + 0.04
        for row in block.rows:
            label = write(0.1, y, _wrapped(row.name, LABEL - 0.4), FONT + 1)
            label += write(0.1, y + label, _plain(row.note), color="0.35")
            bottom = y + label
            for column, (image, caption) in enumerate(zip(row.images, row.captions, strict=True)):
                x = left + column * (cell + GAP)
                pixels = _pixels(image)
                end = y + cell * pixels.shape[0] / pixels.shape[1]
                axis.imshow(
                    pixels,
                    extent=(x, x + cell, end, y),
                    interpolation="nearest" if pixels.shape[1] < SMALL_IMAGE else "antialiased",
                )
                text = _wrapped(caption, cell)
                bottom = max(
                    bottom, end + 0.03 + write(x + cell / 2, end + 0.03, text, ha="center")
                )
            y = bottom + 0.1
    axis.set(xlim=(0, width), ylim=(y, 0), aspect="auto")
    axis.axis("off")
    figure.set_size_inches(width, y)
    return figure


def score_text(score: float) -> str:
    """A score as printed below an image; NaN = no score."""
    return f"{score:.2f}" if math.isfinite(score) else "failed"


def _wrapped(text: str, width: float) -> str:
    """A text in lines of `width` inches; textwrap alone would drop its line breaks."""
    lines = _plain(text).split("\n")
    return "\n".join(textwrap.fill(line, int(LETTERS_AN_INCH * width)) for line in lines)


def _plain(text: str) -> str:
    """A text as matplotlib draws it: no formulas, no control characters, and not without end."""
    return "\n".join(shown(line, 500) for line in text.split("\n")[:LINES]).replace("$", r"\$")


def _pixels(image: Tensor | Image.Image) -> np.ndarray:
    """[H,W,3] for imshow."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    return image.detach().float().cpu().permute(1, 2, 0).clamp(0, 1).numpy()


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix.removeprefix(".") or None)


# The metrics of a run ----------------------------------------------------------------------------

ACROSS = 3  # charts in a row
WINDOW = 9  # updates of a moving average
NOISY, LOG = "noisy", "log"  # drawn as points with their moving average; on a logarithmic axis
DISTANCE = "held-out distance to the teachers"
PANELS = (  # title, axis, metrics or the beginning of their names, style
    ("training reward", "mean of the rollout", [metrics.REWARD], NOISY),
    ("held-out score", "mean of the tasks", [metrics.HEADLINE], ""),
    ("distance to teacher and anchor", "loss", [metrics.DISTILL, metrics.ANCHOR], NOISY),
    ("KL to the base (drift)", "KL per dimension", [metrics.KL], NOISY),
    ("velocity drift from the base", "mean square", [metrics.VELOCITY_DRIFT], NOISY),
    ("KL to the teacher, by task", "KL per dimension", metrics.TEACHER_KL, NOISY),
    ("KL to the teacher, by step", "KL per dimension", metrics.TEACHER_KL + metrics.STEP, LOG),
    ("velocity error, by task", "mean square", metrics.TEACHER_ERROR, NOISY),
    ("velocity error, by step", "mean square", metrics.TEACHER_ERROR + metrics.STEP, LOG),
    (DISTANCE, "of the base model's", metrics.FIXED_MEAN, ""),
    ("shares of the images", "share",
     [metrics.KEPT_SHARE, metrics.CLIP_FRACTION, metrics.INVALID_SHARE], ""),
    ("pairs ranked as chosen", "share", [metrics.PAIR_ACCURACY], NOISY),
    ("gain of the pairs", "mean square", [metrics.MARGIN, metrics.CHOSEN_GAIN], NOISY),
    ("loss", "loss", [metrics.LOSS], ""),
)  # fmt: skip


def read_metrics(path: Path) -> dict[str, Curve]:
    """metrics.jsonl, which may be growing -> {name: [(update, value), ...]}."""
    curves: dict[str, Curve] = {}
    for row in read_lines(path):
        for name, value in row.items():
            if name != metrics.UPDATE and isinstance(value, int | float):
                curves.setdefault(name, []).append((row[metrics.UPDATE], value))
    return curves


class Chart(NamedTuple):
    """Curves {label: points} with one axis. about: what is good. style: NOISY, LOG or "". labels:
    of all charts of a figure, so that a label has one colour in it; () = those of `curves`."""

    title: str
    axis: str
    curves: Mapping[str, Curve]
    about: str
    style: str = ""
    over: str = "rollouts"
    labels: Sequence[str] = ()


def charts(curves: Mapping[str, Curve]) -> list[Chart]:
    """The charts of those KINDS that were logged. The loss is drawn only if nothing else was
    (sft)."""
    drawn = []
    for title, axis, names, style in PANELS:
        if isinstance(names, str):
            steps = metrics.STEP in names
            begun = (name for name in curves if name.startswith(names))
            names = sorted(name for name in begun if (f"/{metrics.STEP}" in name) == steps)
        logged = [name for name in names if name in curves]
        if logged == [metrics.HEADLINE] and not metrics.is_scored(curves):
            continue  # FIXED_MEAN shows this distance
        if logged and (names != [metrics.LOSS] or not drawn):
            about = " ".join(dict.fromkeys(map(metrics.meaning, logged)))
            labelled = {name.rsplit("/", 1)[-1]: curves[name] for name in logged}
            drawn.append(Chart(title, axis, labelled, about, style))
    return drawn


def metrics_plot(drawn: Sequence[Chart], path: Path, title: str = "") -> None:
    """Plot the `charts` of a run. Without any there is no plot."""
    if not drawn:
        return
    columns = min(ACROSS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(3.5 * columns, 3.3 * rows + 0.3), dpi=130, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, chart in itertools.zip_longest(axes, drawn):
        _draw_chart(axis, chart) if chart else axis.axis("off")
    figure.suptitle(_plain(title), fontsize=11)
    _save(figure, path)


def held_out_plot(
    logs: Mapping[str, Sequence[Path]],
    path: Path,
    over: str = metrics.UPDATE,
    wanted: Sequence[str] = (),
) -> None:
    """Plot the held-out scores of runs {name: metrics.jsonl}: a chart for the mean of the tasks and
    one per task (its `overall` if there is one). Runs without rewards show their distance to the
    teachers. If a name has several runs, the last one is plotted.

    over: metrics.UPDATE, or EVALUATIONS, the cumulative count over all runs of a name. wanted: the
    charts to draw, () = all. Raises ValueError if a run has no score, or no such metric, or there
    is no such chart.
    """
    scores: dict[str, dict[str, Curve]] = {}  # by chart, then by run
    for run, files in logs.items():
        *before, log = map(read_metrics, files)
        if over == metrics.EVALUATIONS:
            log = _over_evaluations(log, before, run)
        for name, curve in log.items():
            task, _, metric = name.removeprefix(metrics.EVAL).partition("/")
            overall = f"{metrics.EVAL}{task}/overall" in log
            if name == metrics.HEADLINE and not metrics.is_scored(log):
                scores.setdefault(DISTANCE, {})[run] = [(x, -y) for x, y in curve]
            elif name == metrics.HEADLINE:
                scores.setdefault("mean of the tasks", {})[run] = curve
            elif name.startswith(metrics.EVAL) and metric == ("overall" if overall else "reward"):
                scores.setdefault(task, {})[run] = curve
    if not scores:
        raise ValueError(f"no held-out score in {', '.join(str(f[-1]) for f in logs.values())}.")
    if unknown := [title for title in wanted if title not in scores]:
        raise ValueError(f"--of: no chart is named {unknown[0]!r}; there are {', '.join(scores)}.")
    about = "rollouts" if over == metrics.UPDATE else "function evaluations"
    made = []
    for title in wanted or scores:
        axis = "of the base model's" if title == DISTANCE else "held-out score"
        made.append(Chart(title, axis, scores[title], "", over=about, labels=[*logs]))
    metrics_plot(made, path)


def _over_evaluations(
    log: Mapping[str, Curve], before: Sequence[Mapping[str, Curve]], run: str
) -> dict[str, Curve]:
    """The curves over the cumulative function evaluations; before: logs of earlier runs."""
    if any(metrics.EVALUATIONS not in part for part in (*before, log)):
        raise ValueError(
            f"{run} has no {metrics.EVALUATIONS!r}: it was trained before they were logged."
        )
    first = sum(count for part in before for _, count in part[metrics.EVALUATIONS])
    updates, counts = zip(*log[metrics.EVALUATIONS], strict=True)
    sums = first + np.cumsum(counts)

    def spent(update: int) -> int:
        done = int(np.searchsorted(updates, update, "right"))
        return int(sums[done - 1] if done else first)

    return {name: [(spent(x), y) for x, y in curve] for name, curve in log.items()}


def _draw_chart(axis: Axes, chart: Chart) -> None:
    about = chart.over
    ones = np.ones(WINDOW)
    labels = [*(chart.labels or chart.curves)]
    for label, points in chart.curves.items():
        color = f"C{labels.index(label)}"
        x, y = zip(*points, strict=True)
        line = y
        smooth = chart.style == NOISY and len(x) > WINDOW
        if smooth:  # over fewer values at the ends
            line = np.convolve(y, ones, "same") / np.convolve(np.ones(len(y)), ones, "same")
            about = f"{chart.over} (line: mean of {WINDOW} points)"
        marker = "o" if len(x) < 20 else ""  # a short run would be a bare line, or invisible
        axis.plot(x, line, color=color, linewidth=1.2, marker=marker, label=_plain(label))
        if smooth:
            axis.plot(x, y, ".", color=color, markersize=2.5, alpha=0.35)
    axis.set_title(_plain(chart.title), fontsize=10)
    axis.set_xlabel(about, fontsize=8)
    axis.set_ylabel(chart.axis, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    if chart.style == LOG:
        axis.set_yscale("log")
    if len(chart.curves) > 1:  # below the axes, so that it covers no point
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        columns = 2 if len(chart.curves) < 5 else 4
        axis.legend(**place, ncols=columns, fontsize=7, frameon=False)
