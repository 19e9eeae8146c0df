"""Damage every file of an evaluation and of the text cache, go on, and compare with the whole run.

    python benchmarks/damage_files.py [--out FOLDER]

A small evaluation of the tiny model is run once. Then, for each of its files and each harm, the
same command is given again in a copy of its folder. Each row tells whether the damage was seen, the
exit status, and whether results.json, table.md and all images equal those of the whole run. Seen
means: the manifest tells it, or a warning does. A file that is missing and a line that is cut off
are what a kill leaves, and scores_*/settings.json is for people and written at every run: neither
needs a warning. Exit status 1 if a row fails.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from flowalign.commands.evaluate import main as evaluate
from flowalign.system import manifest

Harm = Callable[[bytes], bytes | None]  # None: the file is deleted


def flip(share: float) -> Harm:
    """One bit, at a place from 0 = the first byte to 1 = the last."""

    def harm(data: bytes) -> bytes:
        place = round(share * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return harm


HARMS: dict[str, Harm] = {
    "cut": lambda data: data[: len(data) * 2 // 3],
    "emptied": lambda data: b"",
    "deleted": lambda data: None,
    "bit in the head": flip(0.01),
    "bit in the middle": flip(0.5),
    "bit in the tail": flip(0.99),
}
# files that every run writes anew from the rows and images
WRITTEN = ("results.json", "table.md", "report.html", "grid.png", "manifest.json")
RESUMED = ("cut", "emptied", "deleted")  # rows that are missing are what a kill leaves: no warning


@dataclass(frozen=True)
class Outcome:
    """Of a damaged file: whether it was seen, the exit status, whether the end is the same."""

    file: str
    harm: str
    seen: bool
    status: int
    equal: bool

    @property
    def good(self) -> bool:
        """Seen, and continued to the same end; a damaged record of the images is refused."""
        if self.file.endswith("preference/settings.json"):
            return self.status == 2 and self.equal
        return self.seen and self.status == 0 and self.equal

    def __str__(self) -> str:
        words = "seen" if self.seen else "NOT SEEN", "equal" if self.equal else "ANOTHER END"
        return f"{self.file[-48:]:48}  {self.harm:18} {words[0]:9} status {self.status}  {words[1]}"


class Heard(logging.Handler):
    """Counts warnings."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno >= logging.WARNING


def write_config(folder: Path) -> Path:
    """An evaluation of two models on four prompts, which keeps its images and its texts."""
    config = {
        "stage": "eval",
        "output": str(folder / "out"),
        "model": {
            "id": "tiny", "height": 64, "width": 64, "max_sequence_length": 16,
            "text_cache": str(folder / "texts"),
        },
        "models": {"base": None, "ocr": "tiny/ocr"},
        "benchmarks": [
            {
                "name": "preference",
                "prompts": "tiny/preference_test",
                "limit": 4,
                "reward": {"name": "pickscore", "options": {"model": "tiny", "device": "cpu"}},
            }
        ],
        "sampling": {"steps": 2, "guidance": 1.0, "batch_size": 2},
        "report": {"images": 2},
        "keep_images": True,
    }  # fmt: skip
    path = folder / "eval.yaml"
    path.write_text(yaml.dump(config))
    return path


def ends(folder: Path) -> dict[str, bytes]:
    """What a reader takes from an evaluation."""
    out = folder / "out"
    names = [out / "results.json", out / "table.md", *sorted(out.rglob("*.png"))]
    return {str(path.relative_to(out)): path.read_bytes() for path in names}


def damaged(folder: Path) -> bool:
    """Whether the manifest of an evaluation tells that."""
    try:
        manifest.check_manifest(folder)
    except manifest.Damaged:
        return True
    return False


def chosen(folder: Path) -> list[Path]:
    """One file of each kind: they are what others like them are."""
    store = folder / "out" / "images" / "ocr" / "preference"
    rows, record = next(store.glob("*/rows.0.jsonl")), next(store.glob("*/settings.json"))
    texts = sorted((folder / "texts").rglob("*.safetensors"))
    written = [folder / "out" / name for name in WRITTEN]
    return [store / "00001_0.png", store / "settings.json", rows, record, texts[0], *written]


def rows(whole: Path, work: Path, heard: Heard) -> Iterator[Outcome]:
    """One outcome per file and harm."""
    expected = ends(whole)

    def again(file: str, harm: str, change: Callable[[Path], None], silent: bool) -> Outcome:
        folder = whole  # the same place: it is part of results.json
        shutil.rmtree(folder)
        shutil.copytree(work, folder)
        change(folder)
        if "texts" in file:  # else nobody would read the cache
            shutil.rmtree(folder / "out")
        before = heard.count
        if Path(file).name in WRITTEN:
            silent = damaged(folder / "out")
        status = evaluate(["--config", str(folder / "eval.yaml")])
        same = ends(folder) == expected
        return Outcome(file, harm, silent or heard.count > before, status, same)

    for path in chosen(work):
        name = path.relative_to(work)
        for harm, change in HARMS.items():
            if path.suffix == ".safetensors" and harm.startswith("bit"):
                continue  # the cache of texts has no checksums

            def apply(folder: Path, name: Path = name, change: Harm = change) -> None:
                content = change((folder / name).read_bytes())
                (folder / name).unlink()
                if content is not None:
                    (folder / name).write_bytes(content)

            always = path.name in WRITTEN or path.parent.name.startswith("scores_")
            silent = always and path.suffix != ".jsonl" or harm == "deleted"
            silent |= path.suffix == ".jsonl" and harm in RESUMED
            yield again(str(name), harm, apply, silent)


def main() -> int:
    """Print the table; 1 if a row is not as promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    heard = Heard()
    logging.getLogger("flowalign").addHandler(heard)
    with tempfile.TemporaryDirectory() as scratch:
        whole, work = Path(scratch) / "run", Path(scratch) / "kept"
        whole.mkdir()
        if status := evaluate(["--config", str(write_config(whole))]):
            return status
        shutil.copytree(whole, work)
        outcomes = list(rows(whole, work, heard))
    good = sum(outcome.good for outcome in outcomes)
    text = "\n".join([*map(str, outcomes), f"{good} of {len(outcomes)} rows as promised"])
    print(text)
    if args.out:
        args.out.write_text(f"{text}\n")
    return 0 if good == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
