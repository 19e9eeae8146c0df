"""Addresses on the Hugging Face Hub, the download of an adapter, and errors that say what to do.

An adapter is `owner/name`, `owner/name@revision` or `owner/name@revision/folder`, which is how
huggingface_hub spells paths. A folder inside a repository needs the revision before it, so that a
mistyped local path is not looked for on the Hub. Tokens are left to huggingface_hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from flowalign.system.hub_address import HubAddress


class HubError(OSError):
    """What the Hub did not do: what was seen, what is possible, what to do."""


def is_id(source: str) -> bool:
    """Whether a source names a repository, and no local folder has the name of its first part."""
    return HubAddress.parse(source) is not None and not Path(source.split("/")[0]).exists()


def download(source: str, *, newest: bool = False) -> Path:
    """The folder, in huggingface_hub's cache, with the adapter of an id (see `is_id`).

    It holds the .safetensors and .json files and the card, nothing of the folders below. newest:
    ask the Hub even if the cache has the adapter. Raises HubError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    address = HubAddress.parse(source)
    assert address is not None, source
    prefix = f"{address.path}/" if address.path else ""

    def get(*names: str, local: bool = False) -> Path:
        snapshot = snapshot_download(
            address.repository,
            revision=address.revision,
            allow_patterns=[prefix + name for name in names],
            ignore_patterns=[f"{prefix}*/*"],  # checkpoints, say: as large as the adapter
            local_files_only=local,
        )
        return Path(snapshot) / address.path

    small, everything = ("*.json", "README.md"), ("*.json", "README.md", "*.safetensors")
    with explained(f"cannot download {source!r}", address.repository):
        if not newest:
            with suppress(LocalEntryNotFoundError):  # not in the cache: ask the Hub
                return get(*everything, local=True)
        folder = get(*small)  # first: gigabytes of a whole pipeline, which is refused, stay there
        return folder if (folder / "model_index.json").is_file() else get(*everything)


@contextmanager
def explained(what: str, repository: str) -> Iterator[None]:
    """HubError for whatever huggingface_hub raises inside. what: begins the message."""
    from huggingface_hub import errors

    page, login = f"https://huggingface.co/{repository}", "`hf auth login` with a token of yours"
    reasons: dict[type[Exception], str] = {  # huggingface_hub's own texts go on about URLs
        errors.GatedRepoError: f"it is gated. Accept its terms on {page}, then {login}.",
        errors.RevisionNotFoundError: f"{repository} has no such revision; {page} lists them.",
        errors.RepositoryNotFoundError: f"the Hub knows no {repository}, or it is private: {login}",
        errors.LocalEntryNotFoundError: "the Hub cannot be reached, nor has the cache it.",
        errors.LocalTokenNotFoundError: f"no token. First {login}.",
    }
    # huggingface_hub 0.x is built on requests, 1.x on httpx
    http_error = cast("type[Exception]", errors.HfHubHTTPError.__bases__[0])
    try:
        yield
    except HubError:
        raise
    except (http_error, OSError, errors.HFValidationError) as error:
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), None)
        status = getattr(getattr(error, "response", None), "status_code", None)
        if reason is None and status in (401, 403):
            reason = f"no token that may do that to {repository} ({status}). {login}"
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise HubError(f"{what}: {reason or first}") from error
