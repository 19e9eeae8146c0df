"""`flowalign data`: official prompt sets, downloaded from their publishers.

Nothing is shipped with the package. A file is written only after it is complete, its checksum holds
and it reads as a prompt set. Of the official test sets only digests are shipped.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from tempfile import TemporaryDirectory

from flowalign.config import Stage
from flowalign.system.exit import refusing
from flowalign.system.files import expanded, replacing
from flowalign.system.http import Client
from flowalign.training.data import PromptError, load_prompts
from flowalign.training.sources import SOURCES, File, PromptSource, commands
from flowalign.types import PromptBatch

MAX_BYTES = 64 * 2**20  # the largest, dpg_bench.csv, has 7.4 MB
FILE_SECONDS = 600.0  # for a file, further attempts included
VALIDATION = 256  # prompts of a training set that are set aside
MIRRORED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def text_digest(text: str) -> str:
    """40 bits of SHA-256 of a text, in hex; case and white space do not count."""
    plain = "".join(text.lower().split())
    # 1e-9: the chance to collide with one of a thousand others, which costs one validation prompt
    return hashlib.sha256(plain.encode()).hexdigest()[:10]


def _shipped(name: str) -> frozenset[str]:
    return frozenset(Path(__file__).with_name(name).read_text().split())


GENEVAL = _shipped("held_out_geneval.txt")  # the 553 prompts of the test set
OCR_TEST_TEXTS = _shipped("held_out_ocr.txt")  # the 953 different texts of Flow-GRPO's test set


class FetchError(OSError):
    """A set that could not be fetched, or that is not what it should be; nothing was written."""


def fetch_set(source: PromptSource, out: str | Path, *, force: bool = False) -> list[Path]:
    """Download the files of a set into `out`; returns their paths, each validation set after its
    training set.

    A file that is there with the right checksum is left alone, without asking the network, unless
    a validation set is set aside of it.
    force: replace a file that differs. Raises FetchError if an address does not answer, breaks off,
    leads away from https, sends no prompts or the wrong ones, and as `write_files`.
    """
    paths: list[Path] = []
    for file in source.files:
        paths += _fetch(file, expanded(Path(out)), paths, force)
    return paths


@refusing("data")
def main(args: argparse.Namespace) -> int:
    """`flowalign data fetch | list`. Exit status: 0 = done, 2 = it could not be done."""
    for name in args.names or SOURCES:
        print(f"{name}: {describe_set(SOURCES[name])}")
        if args.names:
            fetch_set(SOURCES[name], args.out, force=args.force)
    return 0


def missing_sets(stages: Iterable[Stage]) -> dict[str, list[str]]:
    """{prompt set that is not here: the commands that write one of this name}."""
    sets = [source for s in stages for judged in s.judged for source in judged.prompts.values()]
    names = dict.fromkeys(source.partition("#")[0] for source in sets)
    return {
        name: commands(name)
        for name in names
        if not name.startswith("tiny/") and not Path(name).expanduser().exists()
    }


def describe_set(source: PromptSource) -> str:
    """A description of a set: size, licence, page and checksums."""
    lines = [source.prompts, f"source:  {source.page}", f"licence: {source.licence}"]
    lines += [f"NOTE:    {source.note}"] if source.note else []
    for file in source.files:
        known = f"{file.checksum} ({file.known})" if file.checksum else "no checksum known"
        lines += [f"{file.name}: {file.url}", f"  {known}"]
    return "\n    ".join(lines)


def _fetch(file: File, out: Path, others: Sequence[Path], force: bool) -> list[Path]:
    """others: files whose prompts must not be set aside to validate."""
    path = out / file.name
    expected = file.checksum
    if expected and not file.validation and path.is_file():
        if _checksum(path.read_bytes(), expected) == expected:
            print(f"{path}: there already, and the checksum holds")
            return [path]
    content = _download(file.url)
    if file.unique:
        lines = {line.strip() for line in content.decode("utf-8", "replace").split("\n")}
        content = "".join(f"{line}\n" for line in sorted(lines - {""})).encode()
    checksum = _checksum(content, expected or "sha256:")
    if expected and checksum != expected:
        raise FetchError(
            f"{file.url} sent {len(content)} bytes with the checksum {checksum}, but it should be "
            f"{expected} ({file.known}). Nothing was written. Try again; if you trust what comes, "
            "fetch it by hand: any command takes the path of a file."
        )
    paths = [out / name for name in (file.name, file.validation) if name]
    contents = _split(content, file.name, others) if file.validation else [content]
    parts = dict(zip(paths, contents, strict=True))
    counts = {path: len(_prompts(part, path.name)) for path, part in parts.items()}
    write_files(parts, force)
    verdict = "its checksum holds" if expected else f"NOT VERIFIED: {checksum}"
    for path, count in counts.items():
        print(f"{count} prompts in {path} ({verdict})")
    return paths


def write_files(contents: Mapping[Path, bytes], force: bool) -> None:
    """Write all files or none. The first is written last, so that its validation set exists when it
    does. Raises FileExistsError for a file that exists and differs, unless by force."""
    for path, content in contents.items():
        if path.is_file() and path.read_bytes() != content and not force:
            raise FileExistsError(
                f"{path} is there and holds something else. Nothing was written. Move it away, "
                "choose another --out, or replace it with --force."
            )
    for path, content in [*contents.items()][::-1]:
        with replacing(path) as part:
            part.write_bytes(content)


def _checksum(content: bytes, like: str) -> str:
    """ "algorithm:hex" of a content, by the algorithm of another such text."""
    name = like.split(":")[0]
    return f"{name}:{hashlib.new(name, content, usedforsecurity=False).hexdigest()}"


# Contents ----------------------------------------------------------------------------------------


def _download(url: str) -> bytes:
    """All that an address sends. Raises FetchError."""
    try:
        limits = {"timeout": 120.0, "deadline": FILE_SECONDS, "max_bytes": MAX_BYTES}
        with Client(**limits, redirects=True) as client:
            answer = client.request("GET", url)
    except (OSError, ValueError) as error:
        raise FetchError(
            f"could not fetch: {error}. Nothing was written. Is there a way to the network from "
            "here (or HTTPS_PROXY)? Try again. If the set has moved, fetch it by hand: any command "
            "takes the path of a file."
        ) from error
    if answer.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        raise FetchError(f"{url} sends a web page, not prompts. Is there a login page between?")
    return answer


def _prompts(content: bytes, name: str) -> PromptBatch:
    """The prompts in a content that would be a file of that name. Raises FetchError."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / Path(name).name
        path.write_bytes(content)
        try:
            return load_prompts(path, "fetched")
        except PromptError as error:
            text = str(error).replace(str(path), path.name)
            raise FetchError(f"what came is no prompt set: {text} Nothing was written.") from None


def same_picture(prompt: str) -> list[str]:
    """A prompt, and texts that other prompts for the same picture share: GenEval's two objects in
    the other order, or the text between quotes."""
    match = re.fullmatch(f"a photo of (.+) (and|{'|'.join(MIRRORED)}) (.+)", prompt)
    if match is None:
        return [prompt, *prompt.split('"')[1:2]]
    first, relation, second = match.groups()
    return [prompt, f"a photo of {second} {MIRRORED.get(relation, relation)} {first}"]


def set_aside(prompts: PromptBatch, avoided: Set[str]) -> tuple[list[int], list[int]]:
    """The rows that are trained on, and VALIDATION different ones that are set aside, in order.

    All metadata `tag`s have equal numbers, and give at most a quarter of their rows. A prompt for
    the same picture (`same_picture`, in any case) is not trained on either. avoided: digests of
    what must not be set aside. Depends on the set alone.
    """
    looks = [[text_digest(same) for same in same_picture(prompt)] for prompt in prompts.prompts]
    tags: dict[str, dict[str, int]] = {}  # tag -> {a picture: its first row}
    for row, metadata in enumerate(prompts.metadata):
        if avoided.isdisjoint(looks[row]):
            tags.setdefault(str(metadata.get("tag")), {}).setdefault(min(looks[row]), row)
    chosen: dict[int, None] = {}
    for tag, rows in tags.items():
        numbers = sorted(rows.values())
        random.Random(f"validation/{tag}").shuffle(numbers)  # a text seed: the same everywhere
        count = min(VALIDATION // len(tags), len(numbers) // 4)
        chosen |= dict.fromkeys(numbers[:count])
    taken = {look for row in chosen for look in looks[row]}
    return [row for row, same in enumerate(looks) if taken.isdisjoint(same)], sorted(chosen)


def _split(content: bytes, name: str, others: Sequence[Path]) -> list[bytes]:
    """The training and the validation lines of a content."""
    avoid = set(GENEVAL | OCR_TEST_TEXTS)
    for path in others:
        avoid |= set(map(text_digest, load_prompts(path, "other").prompts))
    lines = [line for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    return [
        "".join(f"{lines[row].strip()}\n" for row in rows).encode()
        for rows in set_aside(_prompts(content, name), avoid)
    ]
