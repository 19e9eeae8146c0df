"""GenEval's folder of images, in and out, and its results file.

    python -m flowalign.eval.geneval_folder FOLDER --detector mask2former [--out results.jsonl]

scores a folder of images that this library or the official script wrote, and prints the accuracy
of each task and the overall. The layout is from djghosh13/geneval@af4902f, so that the official
`evaluate_images.py` scores what `write` wrote, and `summary_scores.py` reads what `evaluate` wrote:

    FOLDER/00000/metadata.jsonl          one line: tag, include, exclude, prompt
    FOLDER/00000/samples/00000.png ...    the images of that prompt, equally many for all prompts

Numbers start at 0 without gaps and may have any number of digits. Other files are ignored.
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
from PIL import Image
from torch import Tensor

from flowalign.config import assignments
from flowalign.rewards import check
from flowalign.rewards.geneval import DETECTORS, GenEval, build_detector
from flowalign.rewards.geneval_judge import judge, select, summarize
from flowalign.system.escape import harmless, shown
from flowalign.system.files import replacing
from flowalign.system.images import to_uint8
from flowalign.training.report.pictures import pixels_of
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

    Raises ValueError for metadata that cannot be judged and pixels that are NaN, and FolderError if
    a prompt already has images.
    """
    for number, (meta, samples) in enumerate(zip(metadata, images, strict=True), first):
        check_metadata(meta, f"prompt {number}")
        target = Path(folder) / f"{number:05}" / "samples"
        if target.is_dir() and any(target.iterdir()):
            raise FolderError(f"{target} holds images already; remove them or use another folder.")
        # all pixels are checked before the first file of the prompt is written
        pictures = [Image.fromarray(to_uint8(image)) for image in samples]
        target.mkdir(parents=True, exist_ok=True)
        (target.parent / "metadata.jsonl").write_text(json.dumps(dict(meta)))
        for index, picture in enumerate(pictures):
            picture.save(target / f"{index:05}.png")


def read(folder: str | Path) -> list[Sample]:
    """The images of a folder, sorted by the number of the prompt and then of the image.

    Every file is verified. Raises FolderError, naming the file, for a folder that is missing or
    empty, numbers that are missing, metadata that is missing or cannot be judged, prompts
    without images or with fewer than others, and broken images.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FolderError(f"there is no folder {folder}; give one of images. {LAYOUT}")
    prompts = _numbered((path for path in folder.iterdir() if path.is_dir()), r"\d+", folder)
    samples: list[list[Sample]] = []
    for prompt in prompts:
        metadata, inside = _read_metadata(prompt / "metadata.jsonl"), prompt / "samples"
        files = inside.iterdir() if inside.is_dir() else ()
        paths = _numbered((path for path in files if path.is_file()), r"\d+\.png", inside)
        samples.append([Sample(path, metadata) for path in paths])
        if len(paths) != len(samples[0]):
            raise FolderError(
                f"{inside} holds {len(paths)} images, but {prompts[0].name} has "
                f"{len(samples[0])}; a prompt with fewer images would count less. Add them."
            )
    flat = [sample for row in samples for sample in row]
    for sample in flat:
        try:
            with Image.open(sample.path) as image:
                image.verify()
        except Exception as error:  # PIL raises whatever its decoder does
            raise FolderError(
                f"{sample.path} is no image that can be read ({type(error).__name__}: {error}). "
                "Write it again."
            ) from error
    return flat


def evaluate(
    folder: str | Path,
    detector: Detector,
    out: str | Path | None = None,
    *,
    batch_size: int = 16,
    **rules: Any,
) -> list[dict[str, Any]]:
    """Judge every image of a folder by the official rules: one row per image, in `read`'s order.

    rules: thresholds of `judge`. A row is what the official script writes: filename, tag, prompt,
    correct, reason, and as JSON text the metadata and the details {class: boxes that counted}.
    `flowalign.eval.geneval.summarize` takes the rows. out: a .jsonl file for them, written at the
    end. Raises as `read` does, and whatever the detector raises: no image is left out.
    """
    check("geneval", rules)  # before the folder is read, which may take minutes
    samples, rows = read(folder), []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        images, detections = [pixels_of(sample.path.read_bytes()) for sample in batch], []
        for _, same in groupby(images, key=lambda image: image.shape):  # images of one size
            detections += detector(torch.stack(list(same)))
        rows += [_row(*pair, rules) for pair in zip(batch, detections, strict=True)]
    if out is not None:
        with replacing(out) as part:
            part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Score a GenEval folder; exit status 2, with the reason, if that is impossible."""
    parser = argparse.ArgumentParser("python -m flowalign.eval.geneval_folder")
    parser.add_argument("folder", help="images in GenEval's layout")
    parser.add_argument("--detector", default="mask2former", help=f"{', '.join(DETECTORS)} or path")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="of the detector, such as device=cuda; may be repeated")  # fmt: skip
    parser.add_argument("--out", help="write one line an image, as the official script does")
    args = parser.parse_args(argv)
    try:
        detector = build_detector(args.detector, assignments(args.option))
        rows = evaluate(args.folder, detector, args.out)
    except (ValueError, OSError, ImportError) as error:
        print(harmless(f"geneval_folder: {error}"), file=sys.stderr)
        return 2
    print(f"detector: {getattr(detector, 'name', args.detector)}")
    print(table(summarize(rows), rows))
    return 0


def table(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary in the order of the official summary_scores.py, one line each."""
    lines = [
        f"{shown(tag):16} {accuracy:7.2%}  ({round(accuracy * summary['counts'][tag])} of "
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


def check_metadata(metadata: Any, where: str) -> None:
    """ValueError for metadata without a tag, a prompt, or what GenEval judges by."""
    keys = metadata if isinstance(metadata, Mapping) else {}
    for key in ("tag", "prompt"):
        if not isinstance(keys.get(key), str):
            raise ValueError(f"{where}: metadata {str(metadata)[:80]!r} has no text `{key}`")
    try:
        GenEval.check_prompts([keys["prompt"]], [keys])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        check_metadata(metadata, str(path))
    except (OSError, ValueError) as error:
        raise FolderError(
            f"{path}: {error}. It must be the prompt's line of GenEval's "
            f"evaluation_metadata.jsonl. {LAYOUT}"
        ) from None
    return metadata


def _row(sample: Sample, detections: Detections, rules: Mapping[str, Any]) -> dict[str, Any]:
    metadata = sample.metadata
    verdict = judge(metadata, detections.boxes, detections.colors, **rules)
    # `select` applies every rule but the one of positions, which is about pairs of boxes
    limits = {name: value for name, value in rules.items() if name != "position_threshold"}
    counted = {
        # float32, as the official detector's boxes
        name: np.asarray(detections.boxes[name], np.float32)[rows].tolist()
        for name, rows in select(metadata, detections.boxes, **limits).items()
    }
    return {
        "filename": str(sample.path),
        "tag": metadata["tag"],
        "prompt": metadata["prompt"],
        "correct": verdict.correct,
        "reason": verdict.reason,
        "metadata": json.dumps(metadata),
        "details": json.dumps(counted),
    }


def _numbered(paths: Iterable[Path], pattern: str, where: Path) -> list[Path]:
    """The paths whose name matches a number, sorted; FolderError unless they are 0, 1, 2, ..."""
    matching = [path for path in paths if re.fullmatch(pattern, path.name, re.ASCII)]
    matching.sort(key=lambda path: (int(path.stem), path.name))
    if not matching:
        raise FolderError(f"{where} holds nothing that is numbered. {LAYOUT}")
    numbers = [int(path.stem) for path in matching]
    if missing := sorted(set(range(numbers[-1] + 1)) - set(numbers)):
        raise FolderError(
            f"{where} goes to {matching[-1].name}, but number {missing[0]} is missing "
            f"({len(missing)} in all). Missing ones would change the score: add them, or renumber."
        )
    return matching


if __name__ == "__main__":
    sys.exit(main())
