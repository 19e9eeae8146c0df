"""Files of weights: located on disk or the Hub, read without executing anything, and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import AfterValidator
from safetensors.torch import load_file
from torch import Tensor, nn

from flowalign.system.hub_address import HubAddress


def weights_file(example: str) -> AfterValidator:
    """For `Annotated[str, ...]`: the path of a file, or owner/repository/file[@revision]."""

    def check(address: str) -> str:
        if Path(address).expanduser().is_dir():
            seen = "it is a folder, not a file"
        elif not Path(address).expanduser().is_file() and HubAddress.parse_file(address) is None:
            seen = "there is no such file, and it is no address owner/repository/file on the Hub"
        else:
            return address
        raise ValueError(
            f"{seen}. Give the path of a file, or such an address; the published file is {example}."
        )

    return AfterValidator(check)


def locate_weights(address: str) -> Path:
    """The file at a path, or at owner/repository/file[@revision] on the Hub, downloaded once.

    Raises OSError, saying how to go on, for a file that cannot be had.
    """
    path = Path(address).expanduser()
    if path.is_file():
        return path
    on_hub = HubAddress.parse_file(address)
    if on_hub is None:
        raise FileNotFoundError(f"there is no file {address}; correct the path.")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(on_hub.repository, on_hub.path, revision=on_hub.revision))
    except Exception as error:  # of several libraries, by the way it failed
        raise OSError(
            f"{on_hub.path} of {on_hub.repository} cannot be had from the Hub "
            f"({type(error).__name__}: {error}). Download it where there is a network, and give "
            "its path instead."
        ) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch file that holds tensors only, on the CPU.

    A torch file may wrap them in {"state_dict": ...}. Nothing in it is executed: raises ValueError
    for a file with other objects than torch's own weights loader takes, and for no such file.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever bytes can cause
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"{path} cannot be read as weights, and nothing in it was executed "
            f"({type(error).__name__}: {reason[-1] if reason else ''}). Is the download complete, "
            "and is it a file of tensors?"
        ) from error
    if isinstance(weights, Mapping) and isinstance(weights.get("state_dict"), Mapping):
        weights = weights["state_dict"]
    if not isinstance(weights, Mapping) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path} holds a {type(weights).__name__}, not a mapping of tensors.")
    return dict(weights)


def from_safetensors(kind: Any, name: str, **options: Any) -> Any:
    """`kind.from_pretrained(name, **options)` of a transformers class, of safetensors files only.

    Raises OSError, saying how to go on, where there are none or they cannot be had.
    """
    try:
        return kind.from_pretrained(name, use_safetensors=True, **options)
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        raise OSError(
            f"{name} has no weights as model.safetensors ({str(error).splitlines()[0][:200]}), and "
            "a pickle (pytorch_model.bin) is not read: it could run code. If you trust it, convert "
            f'it once: python -c "import transformers as t; m = t.{kind.__name__}.from_pretrained('
            f"{name!r}); m.save_pretrained('NEW')\", and copy its other files to NEW."
        ) from error


def fit_weights(model: nn.Module, weights: Mapping[str, Tensor], source: object) -> None:
    """Copy weights into a model that has exactly these names and shapes, else raise ValueError."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        faults = " ".join(str(error).split())
        raise ValueError(
            f"{source} does not fit {type(model).__name__}: "
            f"{faults if len(faults) <= 400 else faults[:400] + '...'} "
            "Is it the file of this model, and of this version?"
        ) from error
