"""Pictures a person looks at: image files, labelled grids and the plot of a run's metrics."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

SMALL = 128  # images are drawn at least this wide
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and those below it, sorted; empty where there is no such folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)


def png(image: Tensor) -> bytes:
    """A PNG file of an image [3,H,W] in [0,1]."""
    pixels = (image.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    return _encoded(Image.fromarray(pixels.cpu().numpy()))


def pixels_of(file: bytes) -> Tensor:
    """The image [3,H,W] in [0,1] of a PNG file."""
    pixels = np.array(Image.open(io.BytesIO(file)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


def thumbnail(file: bytes, longest: int) -> bytes:
    """The PNG file itself, or a smaller one where the image has a side above `longest` pixels."""
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
    path: Path,
    images: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    *,
    columns: int = 8,
    title: str = "",
) -> None:
    """Write images [N,3,H,W] in [0,1] with a caption under each, as a PNG."""
    from matplotlib.figure import Figure

    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.7 * columns, 2.25 * rows + (0.4 if title else 0)), dpi=110)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, caption in zip(axes.flat, images, captions, strict=False):
        pixels = image.detach().float().cpu().permute(1, 2, 0).clamp(0, 1).numpy()
        small = pixels.shape[1] < SMALL
        axis.imshow(pixels, interpolation="nearest" if small else "antialiased")
        text = "\n".join(textwrap.fill(line, 24) for line in caption.split("\n"))
        axis.set_title(text, fontsize=7, y=-0.04, va="top", pad=0)
    figure.suptitle(title, fontsize=11, y=1 - 0.1 / figure.get_figheight(), va="top")
    figure.subplots_adjust(
        left=0.01, right=0.99, top=1 - 0.45 / figure.get_figheight() if title else 0.99,
        bottom=0.5 / figure.get_figheight(), hspace=0.38, wspace=0.06,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def side_by_side(
    path: Path,
    models: Sequence[Sequence[Tensor]],
    captions: Sequence[Sequence[str]],
    *,
    columns: int = 8,
    title: str = "",
) -> None:
    """Several models on the same prompts and noise: models[m][n] is image n of model m. One row a
    model, wrapped together after `columns` prompts."""
    images, labels = [], []
    for start in range(0, len(models[0]), columns):
        part = slice(start, start + columns)
        for row, texts in zip(models, captions, strict=True):
            images += list(row[part])
            labels += list(texts[part])
    grid(path, images, labels, columns=columns, title=title)


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.jsonl -> {name: [(update, value), ...]}."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        update = row.pop("update")
        for name, value in row.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append((update, value))
    return found


def metrics_plot(log: Path, path: Path, title: str = "") -> None:
    """The curves that tell how a run went; which ones depends on what it logged."""
    from matplotlib.figure import Figure

    curves = read_metrics(log)
    panels = {name: found for name, found in _panels(curves).items() if found}
    figure = Figure(figsize=(2.75 * len(panels), 2.8), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False).flat
    for axis, (label, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            x, y = zip(*curves[name], strict=True)
            axis.plot(
                x, y, marker="o" if len(x) < 20 else "", markersize=4, linewidth=1, label=name
            )
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("rollouts", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend([name.rsplit("/", 1)[-1] for name in names], fontsize=7)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panels(curves: Mapping[str, object]) -> dict[str, list[str]]:
    """Panel -> the curves in it, of those there are: reward, held-out score, drift and stability of
    a policy; distance by task and by step, and how the tasks agree, of a distillation."""

    def all_of(prefix: str, steps: bool = False) -> list[str]:
        found = [name for name in curves if name.startswith(prefix)]
        return sorted(name for name in found if name.startswith(f"{prefix}step_") == steps)

    wanted = {
        "training reward": ["reward"],
        "distillation": ["distill", "anchor"],
        "held-out score": ["eval/headline"],
        "KL to the base (drift)": ["kl"],
        "KL to the teacher, by task": all_of("kl/"),
        "by step": all_of("kl/", steps=True),
        "gradient cosine": all_of("gradient_cosine/"),
        "share": ["kept_share", "clip_fraction", "invalid_share"],
    }
    return {label: [n for n in names if n in curves] for label, names in wanted.items()}
