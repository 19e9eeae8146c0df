"""Files of a repository on the Hub that are read here: what the cache lacks, and its download."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import filter_repo_objects

from flowalign.system.escape import shown

TEXTS = ("*.json", "*.txt", "*.model", "*.jinja")  # configs and tokenizers
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")  # as transformers names them
HTTP_ERROR: Any = errors.HfHubHTTPError.__bases__[0]  # of requests or httpx
FAILED = (HTTP_ERROR, OSError, errors.HFValidationError)


class HubError(OSError):
    """A request that the Hub refused or could not answer, in its own words."""


class Unreachable(HubError):
    """The Hub was not reached, so that nothing is known."""


@dataclass(frozen=True)
class HubFiles:
    """The files that match a pattern, and none of `ignored`. revision: None = main."""

    repository: str
    patterns: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        return {"allow_patterns": [*self.patterns], "ignore_patterns": [*self.ignored]}

    @property
    def cached(self) -> bool:
        """Whether the cache has all of them, as far as it knows. The Hub is not asked."""
        try:
            self.download(local_files_only=True)
        except FAILED:
            return False
        return True

    def missing(self) -> dict[str, int]:
        """{file: bytes} that the cache lacks of what the Hub has now. Raises HubError if the Hub
        does not say, and the cache does not know that it has all of them."""
        at: dict[str, Any] = {"repo_id": self.repository, "revision": self.revision}
        try:
            about = HfApi().model_info(**at, files_metadata=True)
        except FAILED as error:
            if self.cached:
                return {}
            answered = isinstance(error, errors.HfHubHTTPError | errors.HFValidationError)
            kind = HubError if answered else Unreachable
            raise kind(f"{self.repository}: {shown(str(error), 600)}") from error
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
        if absent := self.absent(sizes):
            raise HubError(f"{self.repository} has no file {absent}")
        names = filter_repo_objects(sizes, **self.chosen)
        at["revision"] = about.sha
        lost = (n for n in names if not isinstance(try_to_load_from_cache(filename=n, **at), str))
        return {name: sizes[name] for name in lost}

    def absent(self, names: Iterable[str]) -> str | None:
        """The patterns that no name matches: those of weights, or all if none is for weights. None
        if a name matches one."""
        weights = [pattern for pattern in self.patterns if pattern.endswith(".safetensors")]
        needed = weights or [*self.patterns]
        options = {**self.chosen, "allow_patterns": needed}
        return None if any(filter_repo_objects(names, **options)) else " or ".join(needed)

    def download(self, **hub: Any) -> Path:
        """Download the files; returns their folder in the cache. Parts from before are not sent
        again. hub: options of `snapshot_download`, whose errors it raises. Raises HubError if the
        files are not in the folder."""
        options = {"revision": self.revision, **self.chosen, **hub}
        folder = Path(snapshot_download(self.repository, **options))
        # without the Hub, snapshot_download gives a folder that holds other files
        files = (f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
        if absent := self.absent(files):
            text = f"the cache has no {absent} of {self.repository}"
            raise HubError(f"{text}, and the Hub was not reached, or has none")
        return folder
