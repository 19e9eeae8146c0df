"""The prompt sets that `flowalign data fetch` writes (sources.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowalign.config.safe_yaml import load_yaml

RAW = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class File:
    name: str  # where it is written, below the data folder
    url: str
    checksum: str = ""  # "sha256:..." or "md5:..." of the written file, "" if unknown
    known: str = ""  # source of the checksum
    unique: bool = False  # write each line once, sorted?
    # The file for the held-out part of a training set. Earlier files must not overlap with it.
    validation: str = ""


@dataclass(frozen=True)
class PromptSource:
    prompts: str
    home: str  # "owner/repository/commit"
    licence: str
    files: tuple[File, ...]
    note: str = ""  # what to know before using the set

    @property
    def commit(self) -> str:
        return self.home.rsplit("/", 1)[1]

    @property
    def page(self) -> str:
        """The web page of the repository at that commit."""
        return f"https://github.com/{self.home.rsplit('/', 1)[0]}/tree/{self.commit}"


def _load() -> dict[str, PromptSource]:
    sources = {}
    table = load_yaml(Path(__file__).with_name("sources.yaml").read_text(encoding="utf-8"))
    for name, fields in table.items():
        home = fields["home"]
        files = tuple(File(url=f"{RAW}/{home}/{f.pop('path')}", **f) for f in fields.pop("files"))
        sources[name] = PromptSource(files=files, **fields)
    return sources


SOURCES: dict[str, PromptSource] = _load()


def commands(source: str | Path) -> list[str]:
    """The commands that write a file of this name; [] if none does."""
    writers = []
    for name, official in SOURCES.items():
        files = {file.name for file in official.files}
        files |= {file.validation for file in official.files if file.validation}
        files |= {str(folder) for file in files for folder in Path(file).parents} - {"."}
        writers += [(file, f"flowalign data fetch {name}") for file in sorted(files)]
    return [command for name, command in writers if Path(source).match(name)]
