"""GenEval's folder of images, in and out, and its results file.

    python -m flowalign.eval.geneval_folder FOLDER --detector mask2former [--out results.jsonl]

scores a folder of images that this library or the official script wrote, and prints the accuracy
of each task and the overall. The layout is that of djghosh13/geneval@af4902f, so that the official
`evaluate_images.py` scores what `write` wrote, and `summary_scores.py` what `evaluate` found:

    FOLDER/00000/metadata.jsonl          one line: tag, include, exclude, prompt
    FOLDER/00000/samples/00000.png ...    the images of that prompt, the same number for all

Numbers start at 0 and leave none out; how many digits they have is free. Other files are ignored.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageOps
from torch import Tensor

from flowalign.images import to_uint8
from flowalign.rewards import check
from flowalign.rewards.geneval import DETECTORS, GenEval, build_detector
from flowalign.rewards.geneval_judge import judge, select, summarize
from flowalign.types import Detections, Detector

LAYOUT = (
    "A GenEval folder holds 00000/metadata.jsonl, 00000/samples/00000.png, 00001.png, ..., 00001/"
)


class FolderError(ValueError):
    """The folder is not in GenEval's layout, or is not complete."""


@dataclass(frozen=True)
class Sample:
    """One image of a folder: its file, and the metadata of its prompt."""

    path: Path
    metadata: dict[str, Any]


def write(
    folder: str | Path,
    metadata: Sequence[Mapping[str, Any]],
    images: Sequence[Tensor] | Tensor,
    *,
    first: int = 0,
) -> None:
    """Write P prompts' metadata and images, P x [K,3,H,W] in [0,1], as prompts first, first + 1...

    Raises ValueError for metadata that cannot be judged, unequal lengths and pixels that are NaN,
    and FolderError where a prompt has images already, which is no place to mix in others.
    """
    if len(metadata) != len(images):
        raise ValueError(f"got {len(metadata)} prompts and images of {len(images)}; give as many.")
    for number, (meta, samples) in enumerate(zip(metadata, images, strict=True), first):
        check_metadata(meta, f"prompt {number}")
        place = Path(folder) / f"{number:05}" / "samples"
        if place.is_dir() and any(place.iterdir()):
            raise FolderError(f"{place} holds images already; remove them or use another folder.")
        pictures = [Image.fromarray(to_uint8(image)) for image in samples]
        place.mkdir(parents=True, exist_ok=True)
        (place.parent / "metadata.jsonl").write_text(json.dumps(dict(meta)))
        for index, picture in enumerate(pictures):
            picture.save(place / f"{index:05}.png")


def read(folder: str | Path) -> list[Sample]:
    """The images of a folder, by the number of the prompt and then of the image.

    Every image is read through once. Raises FolderError, naming the place, for a folder that is
    missing or empty, numbers that are left out or double, metadata that is missing or cannot be
    judged, prompts without images or with fewer than others, and images that are broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FolderError(f"there is no folder {folder}; give one of images. {LAYOUT}")
    prompts = _numbered((path for path in folder.iterdir() if path.is_dir()), r"\d+", folder)
    samples: list[list[Sample]] = []
    for place in prompts:
        meta, inside = _metadata(place / "metadata.jsonl"), place / "samples"
        files = inside.iterdir() if inside.is_dir() else ()
        paths = _numbered((path for path in files if path.is_file()), r"\d+\.png", inside)
        samples.append([Sample(path, meta) for path in paths])
        if len(paths) != len(samples[0]):
            raise FolderError(
                f"{inside} holds {len(paths)} images, but {prompts[0].name} has "
                f"{len(samples[0])}; a prompt that lacks images would count less. Complete it."
            )
    found = [sample for row in samples for sample in row]
    for sample in found:
        _check_image(sample.path)
    return found


def evaluate(
    folder: str | Path,
    detector: Detector,
    out: str | Path | None = None,
    *,
    batch_size: int = 16,
    **rules: Any,
) -> list[dict[str, Any]]:
    """Judge every image of a folder by the official rules: one row an image, as `read` has them.

    rules: thresholds of `judge`. A row is what the official script writes: filename, tag, prompt,
    correct, reason, and as JSON text the metadata and the details {class: boxes that counted}.
    `flowalign.eval.geneval.summarize` takes the rows; out: a .jsonl file to write them to, when
    all are there. Raises as `read` does, and what the detector raises: no image is left out.
    """
    check("geneval", rules)
    samples, rows = read(folder), []
    for start in range(0, len(samples), batch_size):
        some = samples[start : start + batch_size]
        for mine, found in zip(some, _detect(detector, some), strict=True):
            rows.append(_row(mine, found, rules))
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Score a GenEval folder; exit status 2 with the reason where that is impossible."""
    parser = argparse.ArgumentParser("python -m flowalign.eval.geneval_folder")
    parser.add_argument("folder", help="images in GenEval's layout")
    parser.add_argument("--detector", default="mask2former", help=f"{', '.join(DETECTORS)} or path")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="of the detector, such as device=cuda; may be repeated")  # fmt: skip
    parser.add_argument("--out", help="write one line an image, as the official script does")
    args = parser.parse_args(argv)
    try:
        detector = build_detector(args.detector, dict(map(_option, args.option)))
        rows = evaluate(args.folder, detector, args.out)
    except (ValueError, OSError, ImportError) as error:
        print(f"geneval_folder: {error}", file=sys.stderr)
        return 2
    print(f"detector: {getattr(detector, 'name', args.detector)}")
    print(table(summarize(rows), rows))
    return 0


def table(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary as the official summary_scores.py orders it, a line each."""
    lines = [
        f"{tag:16} {accuracy:7.2%}  ({round(accuracy * summary['counts'][tag])} of "
        f"{summary['counts'][tag]} images)"
        for tag, accuracy in summary["tasks"].items()
    ]
    prompts = len({(row["tag"], row["prompt"]) for row in rows})
    lines += [
        f"{'images':16} {summary['images']:7.2%}  (of {len(rows)})",
        f"{'prompts':16} {summary['prompts']:7.2%}  (of {prompts}, with a correct image)",
        f"{'overall':16} {summary['overall']:.5f}  (mean of the {len(summary['tasks'])} tasks)",
    ]
    return "\n".join(lines)


def _detect(detector: Detector, samples: Sequence[Sample]) -> list[Detections]:
    """One Detections a sample; images of one size go together."""
    images, found = [_image(sample.path) for sample in samples], []
    for _, same in groupby(images, key=lambda image: image.shape):
        found += detector(torch.stack(list(same)))
    return found


def _row(sample: Sample, found: Detections, rules: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the results file."""
    meta = sample.metadata
    verdict = judge(meta, found.boxes, found.colors, **rules)
    limits = {name: value for name, value in rules.items() if name != "position_threshold"}
    counted = {
        name: np.asarray(found.boxes[name], np.float32)[rows].tolist()
        for name, rows in select(meta, found.boxes, **limits).items()
    }
    return {
        "filename": str(sample.path),
        "tag": meta["tag"],
        "prompt": meta["prompt"],
        "correct": verdict.correct,
        "reason": verdict.reason,
        "metadata": json.dumps(meta),
        "details": json.dumps(counted),
    }


def _numbered(paths: Iterable[Path], pattern: str, where: Path) -> list[Path]:
    """The paths whose name is a number of that form, in order; refused unless 0, 1, 2, ..."""
    found = [(int(p.stem), p.name, p) for p in paths if re.fullmatch(pattern, p.name, re.ASCII)]
    found.sort()
    numbers = [number for number, _, _ in found]
    if not found:
        raise FolderError(f"{where} holds nothing that is numbered. {LAYOUT}")
    if missing := sorted(set(range(numbers[-1] + 1)) - set(numbers)):
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise FolderError(
            f"{where} goes to {found[-1][1]}, but number {shown} is missing ({len(missing)} in "
            "all). What is left out would change the score: complete it, or number it anew."
        )
    if len(set(numbers)) < len(numbers):
        double = next(b for (a, _, _), (b, _, _) in zip(found, found[1:], strict=False) if a == b)
        raise FolderError(f"{where} holds number {double} twice; remove one.")
    return [path for _, _, path in found]


def _metadata(path: Path) -> dict[str, Any]:
    """The one line of a metadata file, checked."""
    if not path.is_file():
        raise FolderError(f"there is no {path}. {LAYOUT}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(
            f"{path} is not one line of JSON ({error}). It is to hold that line of GenEval's "
            "evaluation_metadata.jsonl."
        ) from error
    try:
        check_metadata(meta, str(path))
    except ValueError as error:
        raise FolderError(str(error)) from None
    return meta


def check_metadata(meta: Any, where: str) -> None:
    """Raise ValueError for metadata without a tag, a prompt, or what GenEval judges by."""
    keys = meta if isinstance(meta, Mapping) else {}
    for key in ("tag", "prompt"):
        if not isinstance(keys.get(key), str):
            raise ValueError(
                f"{where}: metadata {str(meta)[:80]!r} has no text `{key}`. It is to hold a line "
                "of GenEval's evaluation_metadata.jsonl."
            )
    try:
        GenEval.check_prompts([keys["prompt"]], [keys])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_image(path: Path) -> None:
    try:
        with Image.open(path) as image:
            image.verify()
    except Exception as error:  # PIL raises whatever the decoder at hand does
        raise FolderError(
            f"{path} is no image that can be read ({type(error).__name__}: {error}). "
            "Write it again."
        ) from error


def _image(path: Path) -> Tensor:
    """[3,H,W] in [0,1]."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option {text!r} is not of the form NAME=VALUE.")
    return name, yaml.safe_load(value)


if __name__ == "__main__":
    sys.exit(main())
