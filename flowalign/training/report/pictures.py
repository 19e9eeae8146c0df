"""Pictures for people: PNG files, labelled grids of images, and the plot of a run's metrics."""

from __future__ import annotations

import base64
import io
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowalign.system.escape import shown
from flowalign.system.files import read_lines, replacing
from flowalign.system.images import to_float, to_uint8
from flowalign.training import metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL = 128  # pixels: narrower images are drawn with sharp pixels
CAPTION = 24  # characters in a line of a caption
LINES = 12  # of a caption before it is wrapped
NARROW = 14  # characters in a line above a column of a comparison
COLUMNS = 8  # images in a row
Curve = list[tuple[int, float]]  # (update, value), ...
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and its subfolders, sorted; empty if there is no such folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)


def png(image: Tensor) -> bytes:
    """A PNG file of an image [3,H,W] in [0,1]; NaN is black."""
    return _encoded(Image.fromarray(to_uint8(image.nan_to_num(0.0, 1.0, 0.0))))


def pixels_of(file: bytes) -> Tensor:
    """The image [3,H,W] in [0,1] of a PNG file, as its EXIF turns it."""
    pixels = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB"))
    return to_float(torch.from_numpy(pixels).permute(2, 0, 1))


def thumbnail(file: bytes, longest: int) -> bytes:
    """The PNG file itself, or a smaller one if the image has a side above `longest` pixels."""
    image = Image.open(io.BytesIO(file))
    if max(image.size) <= longest:
        return file
    image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    return _encoded(image)


def _encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def grid(
    path: Path, images: Tensor | Sequence[Tensor], captions: Sequence[str], *, title: str = ""
) -> None:
    """Write images [N,3,H,W] in [0,1] with a caption under each, as a PNG of COLUMNS columns."""
    _save(_drawn(list(images), captions, min(COLUMNS, len(images)), title), path)


@dataclass(frozen=True)
class Row:
    """One model of a `Block`."""

    name: str
    images: Sequence[Tensor]  # [3,H,W] in [0,1], one per prompt
    scores: Mapping[str, Sequence[float]]  # {judge: one per image, NaN = it has no score}
    numbers: Mapping[str, float]  # {judge: its number for the whole set, NaN = it has none}

    @property
    def captions(self) -> list[str]:
        """The scores of each image, one line per judge."""
        return [
            "\n".join(map(_number, scores)) for scores in zip(*self.scores.values(), strict=True)
        ]

    @property
    def means(self) -> str:
        """The means of the images shown, and the numbers for the whole set."""
        lines = []
        for judge, scores in self.scores.items():
            known = [score for score in scores if math.isfinite(score)]
            mean = _number(sum(known) / len(known)) if known else "–"
            number = self.numbers[judge]
            whole = f"\nall {_number(number)}" if math.isfinite(number) else ""
            which = f"{judge}\n" if len(self.scores) > 1 else ""
            lines.append(f"{which}shown {mean}{whole}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Block:
    """A part of a `comparison`: every model on the same prompts and seeds."""

    title: str
    prompts: Sequence[str]
    rows: Sequence[Row]


LEGEND = (
    "Same prompts and seeds in every row. Below each image: its score. shown: the mean of these "
    "images; all: the score of the whole set."
)


def comparison(path: Path, blocks: Sequence[Block], *, title: str = "") -> None:
    """Write blocks below one another: a labelled row per model, a column per prompt.

    The prompts stand above the first row of a block.
    """
    from matplotlib.figure import Figure

    columns = max(len(block.prompts) for block in blocks)
    width = max(4.0, LABEL + columns * (CELL + GAP))  # inches, as all lengths below
    heads = textwrap.wrap(_plain(f"{title} {LEGEND}".strip()), int(12.5 * width))
    height = 0.2 * len(heads) + 0.15 + sum(map(_height, blocks))
    figure = Figure(figsize=(width, height), dpi=DPI)
    figure.text(
        0.1 / width, 1 - 0.1 / height, "\n".join(heads), fontsize=10, va="top", linespacing=1.3
    )
    top = height - 0.2 * len(heads) - 0.1
    for block in blocks:
        _draw(figure, block, top)
        top -= _height(block)
    _save(figure, path)


LABEL, CELL, GAP, LINE = 1.5, 0.8, 0.07, 0.15  # inches: label, image, between, line of text
DPI = 160  # an image of 64 pixels is drawn at twice its size


def _lines(block: Block) -> tuple[int, int]:
    """Lines of text: above the columns, and below an image."""
    above = max(_wrapped(prompt, NARROW).count("\n") + 1 for prompt in block.prompts)
    return above, max(len(row.scores) for row in block.rows)


def _cell(block: Block) -> tuple[float, float]:
    """Inches: the height of an image, and that of a row with its captions."""
    first = block.rows[0].images[0]
    image = CELL * first.shape[-2] / first.shape[-1]
    return image, image + LINE * _lines(block)[1] + 0.06


def _height(block: Block) -> float:
    above, _ = _lines(block)
    return 0.34 + LINE * above + len(block.rows) * _cell(block)[1] + 0.08


def _draw(figure: Figure, block: Block, top: float) -> None:
    """Draw a block below `top`, in inches from the lower edge."""
    width, height = figure.get_size_inches()
    (above, _), (image, pitch) = _lines(block), _cell(block)

    def text(x: float, y: float, words: str, **style: Any) -> None:
        figure.text(x / width, y / height, words, **style)

    def left(column: int) -> float:
        return LABEL + column * (CELL + GAP)

    text(0.1, top - 0.08, _plain(block.title), fontsize=11.5, weight="bold", va="top")
    top -= 0.32 + LINE * above
    for column, prompt in enumerate(block.prompts):
        words = _wrapped(prompt, NARROW)
        text(left(column), top + 0.04, words, fontsize=8, va="bottom", linespacing=1.15)
    for row in block.rows:
        text(0.1, top - 0.08, _plain(row.name), fontsize=10.5, va="top")
        text(
            0.1, top - 0.29, _plain(row.means), fontsize=9, va="top", color="0.35", linespacing=1.25
        )
        for column, (pixels, caption) in enumerate(zip(row.images, row.captions, strict=True)):
            place = (left(column) / width, (top - image) / height, CELL / width, image / height)
            axis = figure.add_axes(place)
            axis.axis("off")
            _show(axis, _pixels(pixels))
            text(left(column) + CELL / 2, top - image - 0.03, caption, fontsize=9, ha="center",
                 va="top", linespacing=1.05)  # fmt: skip
        top -= pitch


def gallery(
    models: Mapping[str, Sequence[Tensor | Image.Image] | Tensor],
    prompts: Sequence[str],
    captions: Mapping[str, Sequence[str | float] | Tensor] | None = None,
    *,
    title: str = "",
) -> Image.Image:
    """Several models on the same prompts, for a notebook: one row per prompt, one column per model.

    models: name -> its images, one per prompt, in the order of `prompts`: PIL images, or tensors
    [3,H,W] in [0,1] (also a batch [N,3,H,W]). captions: name -> the captions of its images, texts
    or numbers (the `value` of Scores; NaN is drawn as "failed"); models may be left out.
    `.save("gallery.png")` writes it. Raises ValueError if their numbers differ.
    """
    captions = captions or {}
    if not models or not len(prompts):
        raise ValueError(
            f"a gallery of {len(models)} models and {len(prompts)} prompts has nothing to show. "
            "Give at least one of each: gallery({name: images}, prompts)."
        )
    if unknown := sorted(set(captions) - set(models)):
        raise ValueError(
            f"captions for {unknown[0]!r}, and the models are {list(models)}. Use these names."
        )
    for kind, by_name in (("images", models), ("captions", captions)):
        for name, items in by_name.items():
            if len(items) != len(prompts):
                raise ValueError(
                    f"{len(items)} {kind} of {name!r} for {len(prompts)} prompts; give one each."
                )

    def caption(value: Any) -> str:
        return value if isinstance(value, str) else _number(float(value))

    places = [(row, name) for row in range(len(prompts)) for name in models]
    images = [models[name][row] for row, name in places]
    texts = [caption(captions[name][row]) if name in captions else "" for row, name in places]
    # inches for one line of a caption, and for each further one
    gap = 0.28 + 0.11 * max(_wrapped(text).count("\n") for text in texts)
    names = list(models)
    figure = _drawn(images, texts, len(names), title, heads=names, sides=prompts, gap=gap)
    file = io.BytesIO()
    figure.savefig(file)
    return Image.open(file).convert("RGB")


def _drawn(
    images: Sequence[Tensor | Image.Image],
    captions: Sequence[str],
    columns: int,
    title: str,
    *,
    heads: Sequence[str] = (),
    sides: Sequence[str] = (),
    gap: float = 0.62,
) -> Figure:
    """Rows of `columns` images. heads: texts above the columns. sides: texts left of the rows. gap:
    inches below an image, for its caption."""
    from matplotlib.figure import Figure

    rows = -(-len(images) // columns)
    side, margin, top = 1.63, 1.25 * bool(sides), 0.4 * bool(title) + 0.25 * bool(heads)  # inches
    width, height = 1.7 * columns + margin, (side + gap) * rows + top
    figure = Figure(figsize=(width, height), dpi=110)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, caption in zip(axes.flat, images, captions, strict=False):
        _show(axis, _pixels(image))
        axis.set_title(_wrapped(caption), fontsize=7, y=-0.04, va="top", pad=0)
    for axis, head in zip(axes[0], heads, strict=False):
        axis.text(
            0.5, 1.04, _plain(head), fontsize=9, ha="center", va="bottom", transform=axis.transAxes
        )
    for axis, label in zip(axes[:, 0], sides, strict=False):
        text = _wrapped(label, 19)
        axis.text(-0.06, 0.5, text, fontsize=8, ha="right", va="center", transform=axis.transAxes)
    figure.suptitle(_plain(title), fontsize=11, y=1 - 0.1 / height, va="top")
    figure.subplots_adjust(
        left=0.01 + margin / width, right=0.99, bottom=(gap - 0.12) / height,
        top=1 - (top + 0.05) / height if top else 0.99, hspace=gap / side, wspace=0.06,
    )  # fmt: skip
    return figure


def _number(score: float) -> str:
    return f"{score:.2f}" if math.isfinite(score) else "failed"


def _wrapped(caption: str, width: int = CAPTION) -> str:  # textwrap would drop its line breaks
    return "\n".join(textwrap.fill(line, width) for line in _plain(caption).split("\n"))


def _plain(text: str) -> str:
    """A text as matplotlib draws it: no formulas, no control characters, and not without end."""
    return "\n".join(shown(line, 500) for line in text.split("\n")[:LINES]).replace("$", r"\$")


def _show(axis: Axes, pixels: np.ndarray) -> None:
    small = pixels.shape[1] < SMALL
    axis.imshow(pixels, interpolation="nearest" if small else "antialiased")


def _pixels(image: Tensor | Image.Image) -> np.ndarray:
    """[H,W,3] for imshow."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    return image.detach().float().cpu().permute(1, 2, 0).clamp(0, 1).numpy()


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix.removeprefix(".") or None)


# The metrics of a run ----------------------------------------------------------------------------


def read_metrics(path: Path) -> dict[str, Curve]:
    """metrics.jsonl, which may be growing -> {name: [(update, value), ...]}."""
    curves: dict[str, Curve] = {}
    for row in read_lines(path):
        for name, value in row.items():
            if name != metrics.UPDATE and isinstance(value, int | float):
                curves.setdefault(name, []).append((row[metrics.UPDATE], value))
    return curves


@dataclass(frozen=True)
class Chart:
    """A panel of `metrics_plot`. source: the data URI of an SVG file. about: what is good."""

    title: str
    source: str
    about: str


def charts(curves: Mapping[str, Curve]) -> list[Chart]:
    """The panels of `metrics_plot`, each as a picture of its own."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = []
    # text stays text, and equal charts have equal names inside
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "flowalign"}
    for panel in [panel for panel in _panels(curves) if panel.curves]:
        figure = Figure(figsize=(3.5, 3.0), layout="constrained")
        _plot(figure.subplots(), panel)
        file = io.BytesIO()
        with rc_context(style):
            figure.savefig(file, format="svg", metadata={"Date": None})
        encoded = base64.b64encode(file.getvalue()).decode()
        drawn.append(Chart(panel.title, f"data:image/svg+xml;base64,{encoded}", panel.about))
    return drawn


def metrics_plot(log: Path, path: Path, title: str = "") -> None:
    """Plot the curves that show how a run went, of those that it logged: a panel for each kind.

    A run that trains some steps of the schedule at each update draws them anew every time, and the
    distance to a teacher grows with the step. Such distances are drawn by step; or each is divided
    by the median of all updates that drew the same steps, so that only equal steps are compared.
    """
    from matplotlib.figure import Figure

    curves = read_metrics(log)
    panels = [panel for panel in _panels(curves) if panel.curves]
    columns = 2 if len(panels) in (2, 4) else min(ACROSS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.5 * columns, 3.3 * rows + 0.3), dpi=130, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes:
        axis.axis("off")
    for axis, panel in zip(axes, panels, strict=False):
        _plot(axis, panel)
    figure.suptitle(_plain(title), fontsize=11)
    _save(figure, path)


ACROSS = 3  # panels in a row
WINDOW = 9  # updates of a moving average
POINTS = 800  # of a curve that are drawn, at most
# Of the first, second, ... curve of a panel: equal curves are all seen. (marker, its size, dashes)
STYLES = (("o", 4.0, "-"), ("x", 6.0, "--"), ("s", 2.0, ":"), ("+", 8.0, "-."))


@dataclass(frozen=True)
class _Panel:
    """Curves {label: points} with one axis. about: what is good. noisy: a long curve is drawn as
    points, and a line that is their moving average over WINDOW points."""

    title: str
    axis: str
    curves: Mapping[str, Curve]
    about: str
    log: bool = False
    noisy: bool = False


def _plot(axis: Axes, panel: _Panel) -> None:
    axis.axis("on")
    about = "rollouts"
    styles = itertools.cycle(STYLES if len(panel.curves) <= len(STYLES) else STYLES[:1])
    for (label, points), (marker, size, dashes) in zip(panel.curves.items(), styles, strict=False):
        x, y = zip(*_thinned(points), strict=True)
        line = y
        if panel.noisy and len(x) > WINDOW:
            line, about = _smooth(y), f"rollouts (line: mean of {WINDOW} points)"
        (drawn,) = axis.plot(
            x,
            line,
            linestyle=dashes,
            linewidth=1.2,
            marker=marker if len(x) < 20 else "",  # a short run would be a bare line, or invisible
            markersize=size,
            label=_plain(label if any(y) else f"{label}: 0 throughout"),
        )
        if line is not y:
            axis.plot(x, y, ".", markersize=2.5, alpha=0.35, color=drawn.get_color())
    axis.set_title(_plain(panel.title), fontsize=10)
    axis.set_xlabel(about, fontsize=8)
    axis.set_ylabel(panel.axis, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    if panel.log:
        axis.set_yscale("log")
    if len(panel.curves) > 1:  # below the axes, so that it covers no point
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        axis.legend(**place, ncols=2 if len(panel.curves) < 5 else 4, fontsize=7, frameon=False)


def _thinned(points: Curve) -> Curve:
    """At most about POINTS of them, with the first and the last one: of each stretch the lowest and
    the highest, so that no peak is lost."""
    if len(points) <= POINTS:
        return points
    size = math.ceil(2 * len(points) / POINTS)
    stretches = (points[i : i + size] for i in range(1, len(points) - 1, size))
    ends = (f(part, key=lambda point: point[1]) for part in stretches for f in (min, max))
    return sorted({points[0], *ends, points[-1]})


def _smooth(values: Sequence[float]) -> list[float]:
    """The moving average over WINDOW values, fewer at the ends."""
    reach = WINDOW // 2
    parts = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _relative(curve: Curve, drawn: Mapping[int, frozenset[str]]) -> Curve:
    """Each value divided by the median of those whose updates drew the same steps."""
    alike: dict[frozenset[str], list[float]] = {}
    for update, value in curve:
        alike.setdefault(drawn.get(update, frozenset()), []).append(value)
    usual = {steps: median(values) for steps, values in alike.items() if len(values) > 1}
    pairs = [(update, value, usual.get(drawn.get(update, frozenset()))) for update, value in curve]
    return [(update, value / middle) for update, value, middle in pairs if middle]


def _panels(curves: Mapping[str, Curve]) -> list[_Panel]:
    """One for each kind of number; without curves if none was logged."""

    def below(prefix: str, steps: bool = False) -> list[str]:
        step = f"{prefix}{metrics.STEP}"
        names = [name for name in curves if name.startswith(prefix)]
        return sorted(name for name in names if name.startswith(step) == steps)

    def panel(title: str, axis: str, names: Sequence[str], **style: bool) -> _Panel:
        logged = [name for name in names if name in curves]
        about = " ".join(dict.fromkeys(map(metrics.meaning, logged)))
        labelled = {name.rsplit("/", 1)[-1]: curves[name] for name in logged}
        return _Panel(title, axis, labelled, about, **style)

    steps: dict[int, set[str]] = {}  # drawn at an update
    for name in below(metrics.WEIGHT, steps=True):
        for update, _ in curves[name]:
            steps.setdefault(update, set()).add(name)
    drawn = {update: frozenset(names) for update, names in steps.items()}
    varying = len(set(drawn.values())) > 1

    def distance(title: str, axis: str, names: Sequence[str]) -> _Panel:
        plain = panel(title, axis, names)
        if not varying:
            return plain
        scaled = {label: _relative(curve, drawn) for label, curve in plain.curves.items()}
        known = {label: curve for label, curve in scaled.items() if curve}
        axis = "÷ median of updates with the same step"
        return replace(plain, axis=axis, curves=known, noisy=True)

    shares = [metrics.KEPT_SHARE, metrics.CLIP_FRACTION, metrics.INVALID_SHARE]
    panels = [
        panel("training reward", "mean of the rollout", [metrics.REWARD], noisy=True),
        panel("held-out score", "mean of the tasks", [metrics.HEADLINE]),
        distance("distance to teacher and anchor", "loss", [metrics.DISTILL, metrics.ANCHOR]),
        panel("KL to the base (drift)", "KL per dimension", [metrics.KL], noisy=True),
        panel("velocity drift from the base", "mean square", [metrics.VELOCITY_DRIFT], noisy=True),
        distance("KL to the teacher, by task", "KL per dimension", below(metrics.TEACHER_KL)),
        panel("KL to the teacher, by step", "KL per dimension", below(metrics.TEACHER_KL, True),
              log=True),
        distance("velocity error, by task", "mean square", below(metrics.TEACHER_ERROR)),
        panel("velocity error, by step", "mean square", below(metrics.TEACHER_ERROR, True),
              log=True),
        panel("gradients of two tasks", "cosine", below(metrics.GRADIENT_COSINE)),
        panel("shares of the images", "share", shares),
    ]  # fmt: skip
    if any(shown.curves for shown in panels):
        return panels
    return [panel("loss", "loss", [metrics.LOSS])]  # sft, where nothing is evaluated
