"""Official prompt sets, from where they are published to this machine.

Nothing is shipped with the package. A file is written only when all of it came, when its checksum
holds and when it reads as a prompt set, and by one rename; beside it lies FILE.source.json, which
says where it came from. Where no checksum could be had, that record holds the one that was seen, so
that a later fetch is compared to the first.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from flowalign.data import PromptError, load_prompts
from flowalign.prompts.geneval import same_picture
from flowalign.prompts.held_out import GENEVAL, OCR, digest
from flowalign.prompts.sources import File, Source
from flowalign.types import PromptBatch

MAX_BYTES = 64 * 2**20  # the largest, dpg_bench.csv, has 7.4 MB
VALIDATION = 256  # prompts of a training set that are set aside
TIMEOUT = (10.0, 60.0)  # seconds: to connect, and for each next piece


class FetchError(OSError):
    """A set that could not be fetched, or that is not what it should be; nothing was changed."""


def fetch(
    source: Source,
    out: str | Path,
    *,
    force: bool = False,
    unverified: bool = False,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Fetch the files of a set into the folder `out`; returns where they lie, in order, each
    training set before the validation set that was set aside of it.

    A file that is there with the right checksum is left alone, without asking the network.
    force: replace a file that differs. unverified: keep what came though its checksum is another.
    Raises FetchError where an address does not answer, breaks off, leads away from https, sends no
    prompts or the wrong ones, and where a file would have to be overwritten.
    """
    say(f"{source.prompts}\nsource:  {source.page}\nlicence: {source.licence}")
    if source.note:
        say(f"NOTE:    {source.note}")
    found: list[Path] = []
    for file in source.files:
        others = list(found) if file.validation else []
        found += _fetch(file, source, Path(out), others, force, unverified, say)
    return found


def _fetch(
    file: File,
    source: Source,
    out: Path,
    others: Sequence[Path],
    force: bool,
    unverified: bool,
    say: Callable[[str], None],
) -> list[Path]:
    target = out / file.name
    paths = [target, out / file.validation] if file.validation else [target]
    expected, known = _expected(file, target)
    say(f"{file.name}: {file.url}\n  checksum {expected or '-'} ({known})")
    if expected and _is_there(paths, expected):
        say(f"  {' and '.join(map(str, paths))}: there already, and the checksum holds")
        return paths
    content = _sorted_once(_download(file.url)) if file.unique else _download(file.url)
    found = _digest(content, expected or "sha256:")
    if expected and found != expected and not unverified:
        raise FetchError(
            f"{file.url} sent {len(content)} bytes with the checksum {found}, but it should be "
            f"{expected} ({known}). Nothing was written. Try again; if you trust what comes, "
            "--unverified keeps it."
        )
    parts = [content]
    if file.validation:
        with _as_file(content, target) as path:
            parts = _split(path, others)
    for path, part in zip(paths, parts, strict=True):
        if path.is_file() and path.read_bytes() != part and not force:
            raise FetchError(
                f"{path} is there and differs from what {file.url} sends"
                f"{', less what is set aside to validate' if file.validation else ''}. Nothing "
                "was written. Move it away, choose another --out, or replace it with --force."
            )
    # the training set last: where it lies, its validation set does
    counts = [_write(*each) for each in reversed(list(zip(paths, parts, strict=True)))][::-1]
    record = {
        "file": file.name,
        "url": file.url,
        "source": source.page,
        "commit": source.commit,
        "licence": source.licence,
        "note": source.note,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "prompts": sum(counts),
        "lines": "unique and sorted" if file.unique else "as published",
        "verified": bool(expected) and found == expected and known != FIRST,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if file.validation:
        sums = [hashlib.sha256(part).hexdigest() for part in parts]
        record["parts"] = {path.name: each for path, each in zip(paths, sums, strict=True)}
    _replace(_record(target), (json.dumps(record, indent=1) + "\n").encode())
    verdict = "its checksum holds" if found == expected else f"NOT VERIFIED: recorded {found}"
    for path, count in zip(paths, counts, strict=True):
        say(f"  {count} prompts in {path} ({verdict})")
    return paths


def _is_there(paths: Sequence[Path], expected: str) -> bool:
    """Whether a file, or the two parts of one, lie there as they were written."""
    if not all(path.is_file() for path in paths):
        return False
    if len(paths) == 1:
        return _digest(paths[0].read_bytes(), expected) == expected
    try:
        record = json.loads(_record(paths[0]).read_text(encoding="utf-8"))
        whole, parts = record["sha256"], [record["parts"][path.name] for path in paths]
    except (OSError, ValueError, KeyError, TypeError):  # of a file that was fetched whole
        return False
    mine = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return f"sha256:{whole}" == expected and parts == mine


# Setting aside ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aside:
    """The rows of a set that are trained on, and those that are set aside, both in order."""

    training: list[int]
    validation: list[int]


def set_aside(prompts: PromptBatch, apart: Set[str]) -> Aside:
    """Set VALIDATION different prompts aside: as many of each metadata `tag`, of one with few at
    most a quarter. A function of the set. What shows the same (objects swapped, or another case)
    is not trained on either. apart: digests of prompts that must not be among them.
    """
    looks = [[digest(same) for same in same_picture(prompt)] for prompt in prompts.prompts]
    kinds: dict[str, dict[str, int]] = {}  # tag -> {the picture: its first row}
    for row, metadata in enumerate(prompts.metadata):
        if apart.isdisjoint(looks[row]):
            kinds.setdefault(str(metadata.get("tag")), {}).setdefault(min(looks[row]), row)
    chosen: dict[int, None] = {}
    for kind, rows in kinds.items():
        places = sorted(rows.values())
        random.Random(f"validation/{kind}").shuffle(places)  # a text seed: the same everywhere
        count = min(VALIDATION // len(kinds), len(places) // 4)
        chosen |= dict.fromkeys(places[:count])
    taken = {look for row in chosen for look in looks[row]}
    return Aside(
        training=[row for row, each in enumerate(looks) if taken.isdisjoint(each)],
        validation=sorted(chosen),
    )


def _split(path: Path, others: Sequence[Path]) -> list[bytes]:
    """What a file holds, without and with its validation prompts."""
    apart = set(GENEVAL | OCR)
    for other in others:
        apart |= set(map(digest, load_prompts(other, "other").prompts))
    lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    rows = set_aside(load_prompts(path, "fetched"), apart)
    return [
        "".join(f"{lines[row].strip()}\n" for row in part).encode()
        for part in (rows.training, rows.validation)
    ]


FIRST = "of the first fetch, in its .source.json"


def _expected(file: File, target: Path) -> tuple[str, str]:
    """The checksum that must come, and how it is known: ours, or that of an earlier fetch."""
    if file.checksum:
        return file.checksum, file.known
    try:
        record = json.loads(_record(target).read_text(encoding="utf-8"))
        if record["url"] == file.url:
            return f"sha256:{record['sha256']}", FIRST
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        raise FetchError(
            f"{_record(target)} cannot be read ({type(error).__name__}: {error}), so what it knows "
            "of the file is lost. Delete it to fetch without a checksum."
        ) from None
    return "", "none known: what comes is recorded, and later fetches are compared to it"


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.source.json")


def _digest(content: bytes, like: str) -> str:
    """The digest of a content, "algorithm:hex", with the algorithm of another such text."""
    name = like.split(":")[0]
    return f"{name}:{hashlib.new(name, content, usedforsecurity=False).hexdigest()}"


def _download(url: str) -> bytes:
    """All of what an address sends; FetchError where that is not to be had."""
    retry = Retry(3, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504))
    adapter = HTTPAdapter(max_retries=retry)
    try:
        with requests.Session() as session:
            session.mount("https://", adapter)
            session.mount("http://", adapter)
            with session.get(url, timeout=TIMEOUT, stream=True) as answer:
                _stay_safe(url, [step.url for step in [*answer.history, answer]])
                if answer.status_code != 200:
                    raise FetchError(
                        f"{url} answers {answer.status_code} {answer.reason}. If the set has "
                        "moved, fetch it by hand: any command takes the path of a file."
                    )
                return _body(answer, url)
    except requests.RequestException as error:  # a body that breaks off is among them
        raise FetchError(
            f"{url} could not be fetched: {type(error).__name__}: {error}. Nothing was written. Is "
            "there a way to the network from here (or HTTPS_PROXY)? Try again."
        ) from error


def _stay_safe(url: str, steps: Sequence[str]) -> None:
    """Refuse an https address that was led, at any step, to one that is not."""
    for step in steps:
        if urlsplit(url).scheme == "https" and urlsplit(step).scheme != "https":
            raise FetchError(f"{url} leads to {step}, which is not https. Nothing was written.")


def _body(answer: requests.Response, url: str) -> bytes:
    if "html" in answer.headers.get("Content-Type", ""):
        raise FetchError(f"{url} sends a web page, not prompts. Is there a login page between?")
    content = bytearray()
    for piece in answer.iter_content(2**16):
        content += piece
        if len(content) > MAX_BYTES:
            raise FetchError(f"{url} sends more than {MAX_BYTES} bytes, more than any prompt set.")
    return bytes(content)


def _sorted_once(content: bytes) -> bytes:
    lines = {line.strip() for line in content.decode("utf-8", "replace").split("\n")}
    return "".join(f"{line}\n" for line in sorted(lines - {""})).encode()


def _write(target: Path, content: bytes) -> int:
    """Write a file that reads as a prompt set, at once; returns how many prompts it has."""
    with _as_file(content, target) as part:
        count = len(load_prompts(part, "fetched"))
        os.replace(part, target)
    return count


@contextmanager
def _as_file(content: bytes, target: Path) -> Iterator[Path]:
    """A content as a file of the target's name, beside it, for the time of the `with`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        part = Path(folder) / target.name
        part.write_bytes(content)
        try:
            yield part
        except PromptError as error:
            said = str(error).replace(str(part), target.name)
            raise FetchError(f"what came is no prompt set: {said} Nothing was written.") from None


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
