"""Pictures for people: PNG files, labelled grids of images, and the plot of a run's metrics."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowalign import metrics
from flowalign.files import read_lines, replacing
from flowalign.images import to_float, to_uint8

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = 128  # pixels: narrower images are drawn with sharp pixels
CAPTION = 24  # characters in a line of a caption
COLUMNS = 8  # images in a row
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


def side_by_side(
    path: Path,
    models: Sequence[Sequence[Tensor]],
    captions: Sequence[Sequence[str]],
    *,
    title: str = "",
) -> None:
    """A row per model, all on the same prompts and noise; models[m][n] is image n of model m."""
    images, labels = [], []
    for start in range(0, len(models[0]), COLUMNS):  # all rows wrap at the same prompt
        part = slice(start, start + COLUMNS)
        for row, texts in zip(models, captions, strict=True):
            images += list(row[part])
            labels += list(texts[part])
    grid(path, images, labels, title=title)


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
        if isinstance(value, str):
            return value
        return f"{float(value):.2f}" if math.isfinite(value) else "failed"

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
        pixels = _pixels(image)
        small = pixels.shape[1] < SMALL
        axis.imshow(pixels, interpolation="nearest" if small else "antialiased")
        axis.set_title(_wrapped(caption), fontsize=7, y=-0.04, va="top", pad=0)
    for axis, head in zip(axes[0], heads, strict=False):
        axis.text(0.5, 1.04, head, fontsize=9, ha="center", va="bottom", transform=axis.transAxes)
    for axis, label in zip(axes[:, 0], sides, strict=False):
        text = textwrap.fill(label, 19)
        axis.text(-0.06, 0.5, text, fontsize=8, ha="right", va="center", transform=axis.transAxes)
    figure.suptitle(title, fontsize=11, y=1 - 0.1 / height, va="top")
    figure.subplots_adjust(
        left=0.01 + margin / width, right=0.99, bottom=(gap - 0.12) / height,
        top=1 - (top + 0.05) / height if top else 0.99, hspace=gap / side, wspace=0.06,
    )  # fmt: skip
    return figure


def _wrapped(caption: str) -> str:  # textwrap would drop its own line breaks
    return "\n".join(textwrap.fill(line, CAPTION) for line in caption.split("\n"))


def _pixels(image: Tensor | Image.Image) -> np.ndarray:
    """[H,W,3] for imshow."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    return image.detach().float().cpu().permute(1, 2, 0).clamp(0, 1).numpy()


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix.removeprefix(".") or None)


# The metrics of a run ----------------------------------------------------------------------------


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.jsonl, which may be growing -> {name: [(update, value), ...]}."""
    return curves_of(read_lines(path))


def curves_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The rows of a metrics.jsonl -> {name: [(update, value), ...]}."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != metrics.UPDATE and isinstance(value, int | float):
                curves.setdefault(name, []).append((row[metrics.UPDATE], value))
    return curves


def charts(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, str]:
    """The panels of `metrics_plot`, each as a data URI of an SVG file: {title: source}."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sources = {}
    for title, names in _panels(curves).items():
        figure = Figure(figsize=(3.5, 2.8), layout="constrained")
        axis = figure.subplots()
        for name in names:
            x, y = zip(*curves[name], strict=True)
            axis.plot(x, y, marker="o" if len(x) < 20 else "", markersize=3, linewidth=1)
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend([name.rsplit("/", 1)[-1] for name in names], fontsize=7)
        file = io.BytesIO()
        with rc_context({"svg.fonttype": "none"}):  # text stays text, in the reader's font
            figure.savefig(file, format="svg")
        encoded = base64.b64encode(file.getvalue()).decode()
        sources[title] = f"data:image/svg+xml;base64,{encoded}"
    return sources


def metrics_plot(log: Path, path: Path, title: str = "") -> None:
    """Plot the curves that show how a run went, of those that it logged."""
    from matplotlib.figure import Figure

    curves = read_metrics(log)
    panels = _panels(curves) or {"loss": [metrics.LOSS]}  # sft, where nothing is evaluated
    figure = Figure(figsize=(2.75 * len(panels), 2.8), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False).flat
    for axis, (label, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            x, y = zip(*curves[name], strict=True)
            marker = "o" if len(x) < 20 else ""  # a short run would be a bare line, or invisible
            axis.plot(x, y, marker=marker, markersize=4, linewidth=1, label=name)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("rollouts", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if len(names) > 1:  # one curve has its name as the title
            axis.legend([name.rsplit("/", 1)[-1] for name in names], fontsize=7)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _panels(curves: Mapping[str, object]) -> dict[str, list[str]]:
    """{panel: its curves}, of those that were logged."""

    def by_step(prefix: str, steps: bool) -> list[str]:
        names = [name for name in curves if name.startswith(prefix)]
        return sorted(name for name in names if name.startswith(f"{prefix}step_") == steps)

    panels = {
        "training reward": [metrics.REWARD],
        "distillation": [metrics.DISTILL, metrics.ANCHOR],
        "held-out score": [metrics.HEADLINE],
        "KL to the base (drift)": [metrics.KL],
        "KL to the teacher, by task": by_step(metrics.TEACHER_KL, False),
        "by step": by_step(metrics.TEACHER_KL, True),
        "gradient cosine": by_step(metrics.GRADIENT_COSINE, False),
        "share": [metrics.KEPT_SHARE, metrics.CLIP_FRACTION, metrics.INVALID_SHARE],
    }
    logged = {label: [n for n in names if n in curves] for label, names in panels.items()}
    return {label: names for label, names in logged.items() if names}
