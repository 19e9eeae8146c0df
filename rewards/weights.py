"""Files of weights: located on disk or the Hub, read without executing anything, and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import hf_hub_download
from pydantic import AfterValidator
from safetensors.torch import load_file
from torch import Tensor, nn

from flowalign.system.hub_address import HubAddress
from flowalign.system.hub_files import HubFiles


def _check_file(address: str) -> str:
    if not Path(address).expanduser().is_file() and HubAddress.parse_file(address) is None:
        raise ValueError("no such file, and no address owner/repository/file[@revision] on the Hub")
    return address


WeightsFile = Annotated[str, AfterValidator(_check_file)]


def hub_file(address: str) -> list[HubFiles]:
    """The file of a `WeightsFile` on the Hub; [] for one that is here."""
    on_hub = None if Path(address).expanduser().is_file() else HubAddress.parse_file(address)
    return [HubFiles(on_hub.repository, (on_hub.path,), (), on_hub.revision)] if on_hub else []


def read_weights(address: str) -> dict[str, Tensor]:
    """The tensors of a file (see `WeightsFile`; from the Hub it is downloaded once), on the CPU.

    A .safetensors file, or a torch file that holds tensors only, or {"state_dict": tensors}.
    Nothing in it is executed. Raises OSError for a file that the Hub does not give, and ValueError
    for one with other objects than torch's own weights loader takes.
    """
    path = Path(address).expanduser()
    for file in hub_file(address):
        path = Path(hf_hub_download(file.repository, file.patterns[0], revision=file.revision))
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever bytes can cause
        reason = (str(error).strip().splitlines() or [""])[-1]
        raise ValueError(
            f"{path} cannot be read as weights, and nothing in it was executed "
            f"({type(error).__name__}: {reason})."
        ) from error
    if isinstance(weights, Mapping) and isinstance(weights.get("state_dict"), Mapping):
        weights = weights["state_dict"]
    if not isinstance(weights, Mapping) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path} holds a {type(weights).__name__}, not a mapping of tensors.")
    return dict(weights)


def fit_weights(model: nn.Module, weights: Mapping[str, Tensor], source: object) -> None:
    """Copy weights into a model that has exactly these names and shapes, else raise ValueError."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        faults = " ".join(str(error).split())[:400]
        text = f"{source} is no file of a {type(model).__name__} of this version: {faults}"
        raise ValueError(text) from error
