"""Adapters on the Hugging Face Hub: `owner/name`, `owner/name@revision`, `owner/name@revision/dir`.

The spelling is huggingface_hub's own for paths (its HfFileSystem); a folder inside a repository
needs the revision before it, so that no mistyped local path is looked for on the Hub. Whatever goes
wrong says what to do about it. Tokens are huggingface_hub's business (`hf auth login`): none is
read, written or shown here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

NAME = r"[A-Za-z0-9_][\w.-]*"
ID = re.compile(rf"({NAME}/{NAME})(?:@(refs/(?:pr|convert)/{NAME}|{NAME})((?:/{NAME})*))?")
LOGIN = "`hf auth login` with a token of yours"


class HubError(OSError):
    """What the Hub did not do: what was seen, what is possible, what to do."""


def is_id(source: str) -> bool:
    """Whether that names a repository rather than a folder here. What is in a folder that is there
    is local, and a file that is missing in it is missing."""
    return ID.fullmatch(source) is not None and not Path(source.split("/")[0]).exists()


def split(source: str) -> tuple[str, str | None, str]:
    """(repository, revision or None, folder inside it or "") of an id."""
    match = ID.fullmatch(source)
    if match is None:
        raise HubError(
            f"{source!r} is no Hub id. Give owner/name, owner/name@revision, or "
            "owner/name@revision/folder."
        )
    return match[1], match[2], (match[3] or "").removeprefix("/")


def download(source: str, *, newest: bool = False) -> Path:
    """The folder, in huggingface_hub's cache, with the adapter of an id: its .safetensors and .json
    files and its card, and nothing of the folders below.

    newest: ask the Hub even if the cache has one, which is then taken only where the Hub cannot be
    reached. A whole pipeline is told by its model_index.json, whose weights are left where they
    are. Raises HubError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision, inner = split(source)
    prefix = f"{inner}/" if inner else ""

    def get(*names: str, local: bool) -> Path:
        found = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[prefix + name for name in names],
            ignore_patterns=[f"{prefix}*/*"],
            local_files_only=local,
        )
        return Path(found) / inner

    small, everything = ("*.json", "README.md"), ("*.json", "README.md", "*.safetensors")
    with explained(f"cannot download {source!r}", repo):
        if not newest:
            try:
                return get(*everything, local=True)
            except LocalEntryNotFoundError:
                pass
        folder = get(*small, local=False)
        if not (folder / "model_index.json").is_file():
            folder = get(*everything, local=False)
    return folder


@contextmanager
def explained(what: str, repo: str) -> Iterator[None]:
    """HubError for whatever huggingface_hub raises inside. what: begins the message."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo}"
    http = cast("type[Exception]", errors.HfHubHTTPError.__base__)  # of the library beneath it
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(f"{what}: it is gated. Accept its terms on {page}, then {LOGIN}.") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what}: {repo} has no such revision. {page} lists them.") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{what}: the Hub knows no {repo}, or it is private. Correct the name (a local folder "
            f"that is missing looks the same), or {LOGIN}."
        ) from error
    except errors.LocalTokenNotFoundError as error:
        raise HubError(f"{what}: nobody is logged in. First {LOGIN}.") from error
    except errors.HFValidationError as error:
        raise HubError(f"{what}: {_first(error)}") from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(
            f"{what}: the Hub cannot be reached, and the cache does not have it. Go online "
            "(HF_HUB_OFFLINE unset), or give a folder."
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        raise HubError(f"{what}: {_refusal(status, repo, error)}") from error
    except (http, OSError) as error:
        raise HubError(
            f"{what}: the Hub cannot be reached ({_first(error)}). Go online, HF_HUB_OFFLINE unset."
        ) from error


def _refusal(status: int | None, repo: str, error: Exception) -> str:
    if status == 401:
        return f"the Hub does not know who asks (401). First {LOGIN}."
    if status == 403:
        return (
            f"your token may not do that to {repo} (403). {LOGIN} that may write there, or name "
            "a repository of your own."
        )
    return f"the Hub answers {_first(error)}"


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
