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
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from flowalign.data import PromptError, load_prompts
from flowalign.prompts.sources import File, Source

MAX_BYTES = 64 * 2**20  # the largest, dpg_bench.csv, has 7.4 MB
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
    """Fetch the files of a set into the folder `out`; returns where they lie, in order.

    A file that is there with the right checksum is left alone, without asking the network.
    force: replace a file that differs. unverified: keep what came though its checksum is another.
    Raises FetchError where an address does not answer, breaks off, leads away from https, sends no
    prompts or the wrong ones, and where a file would have to be overwritten.
    """
    say(f"{source.prompts}\nsource:  {source.page}\nlicence: {source.licence}")
    if source.note:
        say(f"NOTE:    {source.note}")
    return [_fetch(file, source, Path(out), force, unverified, say) for file in source.files]


def _fetch(
    file: File,
    source: Source,
    out: Path,
    force: bool,
    unverified: bool,
    say: Callable[[str], None],
) -> Path:
    target = out / file.name
    expected, known = _expected(file, target)
    say(f"{file.name}: {file.url}\n  checksum {expected or '-'} ({known})")
    there = target.read_bytes() if target.is_file() else None
    if there is not None and expected and _digest(there, expected) == expected:
        say(f"  {target} is there already, and its checksum holds")
        return target
    content = _sorted_once(_download(file.url)) if file.unique else _download(file.url)
    found = _digest(content, expected or "sha256:")
    if expected and found != expected and not unverified:
        raise FetchError(
            f"{file.url} sent {len(content)} bytes with the checksum {found}, but it should be "
            f"{expected} ({known}). Nothing was written. Try again; if you trust what comes, "
            "--unverified keeps it."
        )
    if there is not None and there != content and not force:
        raise FetchError(
            f"{target} is there and differs from what {file.url} sends. Nothing was written. "
            "Move it away, choose another --out, or replace it with --force."
        )
    count = _write(target, content)
    record = {
        "file": file.name,
        "url": file.url,
        "source": source.page,
        "commit": source.commit,
        "licence": source.licence,
        "note": source.note,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "prompts": count,
        "lines": "unique and sorted" if file.unique else "as published",
        "verified": bool(expected) and found == expected and known != FIRST,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    _replace(_record(target), (json.dumps(record, indent=1) + "\n").encode())
    verdict = "its checksum holds" if found == expected else f"NOT VERIFIED: recorded {found}"
    say(f"  {count} prompts in {target} ({verdict})")
    return target


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
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        part = Path(folder) / target.name
        part.write_bytes(content)
        try:
            count = len(load_prompts(part, "fetched"))
        except PromptError as error:
            said = str(error).replace(str(part), target.name)
            raise FetchError(f"what came is no prompt set: {said} Nothing was written.") from None
        os.replace(part, target)
    return count


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
