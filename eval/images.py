"""Images that another program made: which files belong to which prompt. A source is one of

    FOLDER/00000/metadata.jsonl, 00000/samples/00000.png, 00001.png ...    GenEval's layout
    FOLDER/dog.png with its prompt in FOLDER/dog.txt; also in subfolders
    FILE.jsonl, with lines {"prompt": "a dog", "images": "dog.png"}, or a list of images
    FILE.json with {"a dog": "dog.png", "a cat": ["cat_0.png", "cat_1.png"]}

Paths in a file are relative to it. Several images of a prompt are in the order of the file, or of
their names. GenEval's numbers start at 0 without gaps and may have any number of digits.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from flowalign.config.section import Size
from flowalign.eval.store import Key
from flowalign.system.escape import shown
from flowalign.system.files import expanded
from flowalign.system.images import IMAGES, image_files, read_image
from flowalign.training.data import load_prompts
from flowalign.types import PromptBatch

FORMS = (
    "Want GenEval's folder (00000/metadata.jsonl, 00000/samples/00000.png), a folder with a prompt "
    "beside each image (dog.png, dog.txt), a .jsonl of {prompt, images}, or a .json of {prompt: "
    "path or paths}."
)


class ImagesError(ValueError):
    """Images that are missing, too many or broken: what was seen, what to do."""


def find_images(source: str) -> dict[str, list[Path]]:
    """{prompt: its images, in order} of a folder or file. No image is opened."""
    path, images = expanded(Path(source)), {}
    reader = _read_folder if path.is_dir() else READERS.get(path.suffix.lower())
    if reader is None or not path.exists():
        raise ImagesError(f"there is no such folder, .json or .jsonl: {source!r}. {FORMS}")
    try:
        for prompt, files in reader(path):
            files = [files] if isinstance(files, str) else files
            if not files or not isinstance(files, list) or not all(map(Path, files)):
                raise ValueError(f"no image of {shown(repr(prompt))}, but {shown(repr(files))}")
            images.setdefault(prompt, []).extend(path.parent / file for file in files)
    except ImagesError:
        raise
    except (OSError, ValueError, TypeError, RecursionError) as error:
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise ImagesError(f"{where}{str(error).rstrip('.')}. {FORMS}") from None
    if not images:
        raise ImagesError(f"{path} holds no images of prompts. {FORMS}")
    return images


def assign(
    images: Mapping[str, list[Path]],
    prompts: PromptBatch,
    limit: int | None,
    copies: int,
    place: str,
) -> dict[Key, Path]:
    """{image: its file}: of each of the first `limit` prompts, `copies`. A prompt that the set
    lists again takes the next images. place: the config key of the benchmark."""
    wanted, all_wanted = Counter(prompts.prompts[:limit]), Counter(prompts.prompts)
    if missing := [prompt for prompt in wanted if prompt not in images]:
        first = list(takewhile(images.__contains__, prompts.prompts[:limit]))
        fewer = f", or score the first ones: {place}.limit={len(first)}" if first else ""
        text = (
            f"{len(missing)} of {len(wanted)} prompts have no image; the first is "
            f"{shown(repr(missing[0]))}. Add theirs{fewer}, or give the file of your prompts: "
            f"{place}.prompts=FILE."
        )
        strays = [prompt for prompt in images if prompt not in all_wanted]
        if stray := get_close_matches(missing[0], strays, 1, cutoff=0) if len(strays) < 100 else []:
            at = images[stray[0]][0]
            text += f" The prompt of {at} is none of them: {shown(repr(stray[0]))}."
        paths = (path for prompt in wanted for path in images.get(prompt, ()))
        if lost := next((path for path in paths if not path.is_file()), None):
            text += f" There is no image {lost}, either."
        raise ImagesError(text)
    for prompt, times in wanted.items():
        n, files = len(images[prompt]), ", ".join(path.name for path in images[prompt][:2])
        if n not in (times * copies, all_wanted[prompt] * copies):
            fitting = f", or set {place}.images={n // times}" if n % times == 0 else ""
            raise ImagesError(
                f"{n} image{'s' * (n > 1)} of {shown(repr(prompt))} ({files}{', ...' * (n > 2)}), "
                f"but this benchmark wants {times * copies} of this prompt. Add or remove "
                f"some{fitting}."
            )
    files = {prompt: iter(images[prompt]) for prompt in wanted}
    keys = ((i, copy) for i in range(len(prompts.prompts[:limit])) for copy in range(copies))
    return {(i, copy): next(files[prompts.prompts[i]]) for i, copy in keys}


def check_images(files: Iterable[Path], size: Size | None) -> Size:
    """Decode images: their size, which is `size` if that is given."""
    places: dict[Size, str] = {size: "the model or `size`"} if size else {}
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


def _read_json(path: Path) -> list[tuple[str, Any]]:
    # pairs: a dict would keep the last of two equal prompts
    pairs: Any = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=list)
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("no object of prompts")
    return pairs


def _read_folder(path: Path) -> Iterator[tuple[str, list[Any]]]:
    if any(file.parent.name.isdecimal() for file in path.glob("*/metadata.jsonl")):
        folders = _numbered((p for p in path.iterdir() if p.is_dir()), r"\d+", path)
        for folder in folders:
            rows, inside = load_prompts(folder / "metadata.jsonl", ""), folder / "samples"
            files = [p for p in inside.iterdir() if p.is_file()] if inside.is_dir() else []
            others = {p.suffix for p in files if p.stem.isdecimal()} - {".png"}
            if seen := sorted(suffix for suffix in others if suffix.lower() in IMAGES):
                text = f"{inside} holds NUMBER{seen[0]}. GenEval's script reads NUMBER.png only"
                raise ImagesError(f"{text}, so these would not count. Write them as .png.")
            images = _numbered(files, r"\d+\.png", inside)
            yield rows.prompts[0], [image.absolute() for image in images]
        return
    for image in image_files(path):
        both = image.with_suffix(".txt"), image.with_suffix(".TXT")
        if not (beside := next(filter(Path.is_file, both), None)):
            raise ImagesError(f"{image} has no prompt beside it, in {both[0].name}. {FORMS}")
        yield beside.read_text("utf-8-sig").strip(), [image.absolute()]


READERS = {".json": _read_json, ".jsonl": _read_jsonl}


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
