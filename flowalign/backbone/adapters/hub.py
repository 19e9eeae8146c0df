"""Addresses on the Hugging Face Hub, the download of an adapter, and errors that say what to do.

An adapter is `owner/name`, `owner/name@revision` or `owner/name@revision/folder`, which is how
huggingface_hub spells paths. A folder inside a repository needs the revision before it, so that a
mistyped local path is not looked for on the Hub. Tokens are left to huggingface_hub (`hf auth
login`): none is read, written or shown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from flowalign.system.hub_address import HubAddress

LOGIN = "`hf auth login` with a token of yours"


class HubError(OSError):
    """What the Hub did not do: what was seen, what is possible, what to do."""


def is_id(source: str) -> bool:
    """Whether a source names a repository, and no local folder has the name of its first part."""
    return HubAddress.parse(source) is not None and not Path(source.split("/")[0]).exists()


def download(source: str, *, newest: bool = False) -> Path:
    """The folder, in huggingface_hub's cache, with the adapter of an id.

    It holds the .safetensors and .json files and the card, nothing of the folders below. newest:
    ask the Hub even if the cache has the adapter. Raises HubError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    address = HubAddress.parse(source)
    if address is None:
        raise HubError(
            f"{source!r} is no Hub id. Give owner/name, owner/name@revision, or "
            "owner/name@revision/folder."
        )
    prefix = f"{address.path}/" if address.path else ""

    def get(*names: str, local: bool) -> Path:
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
        # The small files come first: with model_index.json it is a pipeline, which the caller
        # refuses, and its gigabytes stay where they are.
        folder = get(*small, local=False)
        if not (folder / "model_index.json").is_file():
            folder = get(*everything, local=False)
    return folder


def _http_error() -> type[Exception]:
    """The base of the errors of huggingface_hub's HTTP: 0.x is built on requests, 1.x on httpx."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("type[Exception]", HfHubHTTPError.__bases__[0])


@contextmanager
def explained(what: str, repository: str) -> Iterator[None]:
    """HubError for whatever huggingface_hub raises inside. what: begins the message."""
    from huggingface_hub import errors

    try:
        yield
    except HubError:
        raise
    except (_http_error(), OSError, errors.HFValidationError) as error:
        page = f"https://huggingface.co/{repository}"
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        status = getattr(getattr(error, "response", None), "status_code", None)
        match error:
            case errors.GatedRepoError():
                reason = f"it is gated. Accept its terms on {page}, then {LOGIN}."
            case errors.RevisionNotFoundError():
                reason = f"{repository} has no such revision. {page} lists them."
            case errors.RepositoryNotFoundError():
                reason = (
                    f"the Hub knows no {repository}, or it is private. Correct the name (a local "
                    f"folder that is missing looks the same), or {LOGIN}."
                )
            case errors.HFValidationError():
                reason = first
            case errors.LocalEntryNotFoundError():
                reason = (
                    "the Hub cannot be reached, and the cache does not have it. Go online "
                    "(HF_HUB_OFFLINE unset), or give a folder."
                )
            case errors.LocalTokenNotFoundError():
                reason = f"no token. First {LOGIN}."
            case errors.HfHubHTTPError() if status in (401, 403):
                reason = (
                    f"no token, or one that may not do that to {repository} ({status}). {LOGIN} "
                    "that may, or name a repository of your own."
                )
            case errors.HfHubHTTPError():
                reason = f"the Hub answers {first}"
            case _:
                reason = f"the Hub cannot be reached ({first}). Go online, HF_HUB_OFFLINE unset."
        raise HubError(f"{what}: {reason}") from error
