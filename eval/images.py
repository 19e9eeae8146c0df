"""Images that another program made: which files belong to which prompt. A source is one of

    FOLDER/00000/metadata.jsonl, 00000/samples/00000.png, 00001.png ...    GenEval's layout
    FOLDER/dog.png with its prompt in FOLDER/dog.txt; also in subfolders
    FILE.jsonl, with lines {"prompt": "a dog", "images": "dog.png"}, or a list of images

Paths in a file are relative to it. Several images of a prompt are in the order of the file, or of
their names. GenEval's numbers start at 0 without gaps and may have any number of digits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from flowalign.config.section import Size
from flowalign.eval.store import ImageKey
from flowalign.system.escape import shown
from flowalign.system.files import expanded
from flowalign.system.images import image_files, read_image
from flowalign.training.data import load_prompts
from flowalign.types import PromptBatch

LAYOUTS = (
    "Want GenEval's folder (00000/metadata.jsonl, 00000/samples/00000.png), a folder with a prompt "
    "beside each image (dog.png, dog.txt), or a .jsonl of {prompt, images}."
)


class ImagesError(ValueError):
    """Images that are missing, too many or broken: what was seen, what to do."""


def find_images(source: str) -> dict[str, list[Path]]:
    """{prompt: its images, in order} of a folder or file. No image is opened."""
    path = expanded(Path(source))
    images = {}
    if not path.is_dir() and not (path.suffix.lower() == ".jsonl" and path.exists()):
        raise ImagesError(f"there is no such folder or .jsonl: {source!r}. {LAYOUTS}")
    try:
        rows = _read_folder(path) if path.is_dir() else _read_jsonl(path)
        for prompt, files in rows:
            files = [files] if isinstance(files, str) else files
            if not files or not isinstance(files, list) or not all(map(Path, files)):
                raise ValueError(f"no image of {shown(repr(prompt))}, but {shown(repr(files))}")
            images.setdefault(prompt, []).extend(path.parent / file for file in files)
        uses = Counter(image.resolve() for files in images.values() for image in files)
        if twice := [image for image, count in uses.items() if count > 1]:
            raise ImagesError(f"{path} gives {twice[0]} more than once. An image has one prompt.")
    except ImagesError:
        raise
    except (OSError, ValueError, TypeError) as error:
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise ImagesError(f"{where}{str(error).rstrip('.')}. {LAYOUTS}") from None
    if not images:
        raise ImagesError(f"{path} holds no images of prompts. {LAYOUTS}")
    return images


def assign(
    images: Mapping[str, list[Path]],
    prompts: PromptBatch,
    limit: int | None,
    copies: int,
    place: str,
) -> dict[ImageKey, Path]:
    """{image: its file} for the first `limit` prompts, `copies` each. A prompt that the set lists
    again takes the next images. place: the config key of the benchmark."""
    first = prompts.prompts[:limit]
    whole = Counter(prompts.prompts)
    wanted = Counter(first)
    if missing := [prompt for prompt in wanted if prompt not in images]:
        count = len(list(takewhile(images.__contains__, first)))
        fewer = f", or score the first ones: {place}.limit={count}" if count else ""
        text = (
            f"{len(missing)} of {len(wanted)} prompts have no image; the first is "
            f"{shown(repr(missing[0]))}. Add theirs{fewer}, or give the file of your prompts: "
            f"{place}.prompts=FILE."
        )
        strays = [prompt for prompt in images if prompt not in whole][:100]
        for stray in get_close_matches(missing[0], strays, 1, cutoff=0):
            at = images[stray][0]
            text += f" The prompt of {at} is none of them: {shown(repr(stray))}."
        raise ImagesError(text)
    for prompt, times in wanted.items():
        n = len(images[prompt])
        named = images[prompt][0].name
        if n not in (times * copies, whole[prompt] * copies):
            fitting = f", or set {place}.images={n // times}" if n % times == 0 else ""
            raise ImagesError(
                f"images of {shown(repr(prompt))} ({named} ...): {n}, but this benchmark wants "
                f"{times * copies} of this prompt. Add or remove some{fitting}."
            )
    files = {prompt: iter(images[prompt]) for prompt in wanted}
    return {
        (i, copy): next(files[prompt]) for i, prompt in enumerate(first) for copy in range(copies)
    }


def check_images(files: Iterable[Path], size: Size | None) -> Size:
    """Decode images and return their size; it must be `size` if that is given."""
    places: dict[Size, str] = {size: "the model"} if size else {}
    for path in dict.fromkeys(files):
        if not path.exists():
            raise ImagesError(f"there is no image {path}. Add it.")
        try:
            width, height = read_image(path).size
        except ValueError as error:
            raise ImagesError(str(error)) from None
        places.setdefault((height, width), str(path))
    if len(places) > 1:
        listed = ", ".join(f"{h}x{w} ({place})" for (h, w), place in places.items())
        raise ImagesError(f"several sizes: {listed}. Evaluate the images of each size apart.")
    return next(iter(places))


# Reading: (prompt, path or paths), ... -----------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    rows = load_prompts(path, "")
    for prompt, row in zip(rows.prompts, rows.metadata, strict=True):
        if "images" not in row:
            raise ValueError(f"{prompt!r} has the keys {['prompt', *row]}, and no 'images'")
        yield prompt, row["images"]


def _read_folder(path: Path) -> Iterator[tuple[str, list[Any]]]:
    if any(file.parent.name.isdecimal() for file in path.glob("*/metadata.jsonl")):
        for folder in _numbered((p for p in path.iterdir() if p.is_dir()), r"\d+", path):
            rows = load_prompts(folder / "metadata.jsonl", "")
            inside = folder / "samples"
            files = inside.iterdir() if inside.is_dir() else ()
            images = _numbered(files, r"\d+\.png", inside)  # as the official script reads them
            yield rows.prompts[0], [image.absolute() for image in images]
        return
    for image in image_files(path):
        beside = next(filter(Path.is_file, map(image.with_suffix, (".txt", ".TXT"))), None)
        if beside is None:
            raise ImagesError(f"{image} has no prompt beside it, in {image.stem}.txt. {LAYOUTS}")
        yield beside.read_text("utf-8-sig").strip(), [image.absolute()]


def _numbered(paths: Iterable[Path], pattern: str, where: Path) -> list[Path]:
    """The paths whose name matches a number, sorted; ImagesError unless they are 0, 1, 2, ..."""
    matching = [path for path in paths if re.fullmatch(pattern, path.name, re.ASCII)]
    matching.sort(key=lambda path: (int(path.stem), path.name))
    numbers = [int(path.stem) for path in matching]
    if not numbers or numbers != [*range(len(numbers))]:
        listed = ", ".join(path.name for path in matching[:3]) or "nothing"
        raise ImagesError(
            f"{where} holds {listed} ... ({len(numbers)}), not 0, 1, 2 ... without gaps. Add what "
            "is missing: it would change the score."
        )
    return matching
