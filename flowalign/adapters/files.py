"""LoRA adapters as files: where they lie, which formats are read, how ours is written.

Whoever names an adapter (teachers, lora.init, merges, evaluations, `flowalign.load`) comes here.
Read are diffusers' files, with or without metadata, and peft's folders (adapter_config.json). All
come out in one form: weights by layer, `<layer>.lora_A.weight` [r,in] and `<layer>.lora_B.weight`
[out,r], and a description for peft's LoraConfig that holds what the update alpha / r * B A depends
on (alpha / sqrt(r) under rsLoRA), layer by layer where layers differ. What is no plain LoRA is
refused, as is every pickle. Until weights are asked for, nothing but heads of files is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from flowalign.adapters import hub
from flowalign.config.schema import ADAPTER
from flowalign.tiny import TEACHERS

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("flowalign")

PEFT_ADAPTER, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
TEXT_LENGTH = "flowalign_max_sequence_length"  # in the head of a file, where others pass it over
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
PREFIXES = ("base_model.model.", "transformer.")  # peft's, then diffusers'
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
OLD = re.compile(r".+lora\.(down|up)\.weight")  # diffusers' before it used peft
DEFAULT = 8  # of r and lora_alpha in peft's LoraConfig

# Entries of peft's LoraConfig that a trained update does not depend on: where the layers were found
# (the weights name them), how it was trained, sizes that need a switch which is looked at instead.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
SCALING = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
# Other starts (pissa, olora, corda, loftq ...) change the base's weights, too.
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class AdapterError(ValueError):
    """A folder that holds no adapter that can be read: what was seen, what is possible."""


# Where -------------------------------------------------------------------------------------------


def adapter_folder(source: str | Path, *, newest: bool = False) -> Path:
    """Where an adapter lies: a folder (or one .safetensors file), or tiny/NAME for one that ships
    with the package. A Hub id (`flowalign.adapters.hub.is_id`) becomes the folder of its download:
    the one in the cache, or, if there is none or `newest` is asked for, what the Hub has now.

    Raises HubError for a Hub id that cannot be had; of a folder nobody asks whether it is there.
    """
    if str(source).startswith("tiny/"):
        return TEACHERS / str(source).removeprefix("tiny/")
    if hub.is_id(str(source)):
        return hub.download(str(source), newest=newest)
    return Path(source).expanduser()


def adapter_file(folder: Path) -> Path:
    """The weights in a folder: diffusers' file, else peft's, else the only .safetensors that is
    there (or `folder` itself, if it is such a file). AdapterError if there is none."""
    if folder.is_file():
        return folder.parent / _chosen([folder.name], str(folder))
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return folder / _chosen(names, str(folder))


def _chosen(names: Collection[str], where: str) -> str:
    if "model_index.json" in names:
        raise AdapterError(
            f"{where} holds a whole pipeline (model_index.json), and an adapter is wanted. Name "
            "the folder of a LoRA; null is the base itself."
        )
    tensors = sorted(name for name in names if name.endswith(".safetensors"))
    for usual in (ADAPTER, PEFT_ADAPTER):
        if usual in tensors:
            return usual
    if len(tensors) == 1:
        return tensors[0]
    if tensors:
        raise AdapterError(
            f"{where} holds {len(tensors)} files of weights ({', '.join(tensors[:4])}), and which "
            f"is the adapter is not said. Name one of the files, or call it {ADAPTER}."
        )
    for name in sorted(names):
        if name.endswith(PICKLES):
            better = PEFT_ADAPTER if name.startswith("adapter_model") else ADAPTER
            raise AdapterError(
                f"{where} holds {name}, and a pickle is not read: it could run code. Convert it: "
                'python -c "import torch, safetensors.torch as s; '
                f"s.save_file(torch.load('{name}', weights_only=True), '{better}')\""
            )
    raise AdapterError(f"{where} holds no {ADAPTER}, nor another LoRA (a .safetensors file)")


# What it says of itself --------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """What can be known of an adapter without its weights.

    config: peft's description, None where the file has none. base: the model it says it was trained
    on; None where it names none, or a folder of somebody else's machine. text_length: tokens of the
    T5 encoder in its training, which files of ours tell.
    """

    file: Path
    config: dict[str, Any] | None
    base: str | None
    text_length: int | None = None


def read_head(folder: Path) -> Head:
    """The head of an adapter; AdapterError for what is no plain LoRA of a transformer."""
    file = adapter_file(folder)
    try:
        with safe_open(file, framework="numpy") as opened:
            keys, metadata = list(opened.keys()), opened.metadata() or {}
    except SafetensorError as error:
        raise AdapterError(f"{file} is not a safetensors file ({error})") from error
    _check_keys(file, keys)
    beside = file.parent / PEFT_CONFIG
    length = int(metadata[TEXT_LENGTH]) if metadata.get(TEXT_LENGTH, "").isdecimal() else None
    if text := metadata.get("lora_adapter_metadata"):
        config = {_bare(key): value for key, value in _parsed(text, file).items()}
        base = config.get("base_model_name_or_path")
    elif beside.is_file():
        config = _parsed(beside.read_text(encoding="utf-8"), beside)
        name = config.get("base_model_name_or_path")
        base = name if isinstance(name, str) and hub.is_id(name) else None
    else:
        return Head(file, None, None, length)
    _check_config(file, config)
    return Head(file, config, base, length)


def _parsed(text: str, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise AdapterError(f"the description of {file} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise AdapterError(f"the description of {file} is {type(found).__name__}, not a mapping")
    return found


def _bare(key: str) -> str:
    """The name of a weight inside the transformer."""
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    return key


def _check_keys(file: Path, keys: Iterable[str]) -> None:
    unread = [k for k in keys if not (FACTOR.fullmatch(k) or OLD.fullmatch(k) or _is_alpha(k))]
    unread += [key for key in keys if key.startswith("text_encoder")]
    if unread:
        raise AdapterError(
            f"{file} is no plain LoRA of a transformer: it holds {unread[0]} ({_kind(unread[0])}) "
            f"and {len(unread) - 1} more of that sort. Train or convert one that holds A and B "
            "matrices of the transformer's layers only."
        )


def _is_alpha(key: str) -> bool:
    return key.endswith(".alpha") and not key.startswith(("lora_", "text_encoder"))


def _kind(key: str) -> str:
    kinds = {
        "magnitude_vector": "DoRA",
        "dora_scale": "DoRA",
        "lora_embedding": "an embedding",
        "text_encoder": "a text encoder",
        "lora_unet_": "kohya's names",
        "lora_transformer_": "kohya's names",
        "lora_te": "a text encoder",
        ".bias": "a bias",
    }
    whole = "a whole weight, as of modules_to_save" if "lora" not in key else "another method"
    return next((kind for mark, kind in kinds.items() if mark in key), whole)


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse what would change the update, and is not read here."""
    found = [
        f"{name} = {value!r}"
        for name, value in config.items()
        if name not in WITHOUT_EFFECT | SCALING | {"bias", "init_lora_weights"} and value
    ]
    if str(config.get("peft_type") or "LORA").rsplit(".")[-1].upper() != "LORA":
        found.append(f"peft_type = {config['peft_type']!r}")
    if config.get("bias", "none") != "none":
        found.append(f"bias = {config['bias']!r}")
    if config.get("init_lora_weights") not in STARTS:
        found.append(f"init_lora_weights = {config['init_lora_weights']!r}")
    if found:
        raise AdapterError(
            f"{file} is no plain LoRA: its description has {', '.join(found)}. What that does is "
            "not read here; train without it, or let peft convert the adapter to a plain LoRA."
        )


# Weights -----------------------------------------------------------------------------------------


def read_lora(source: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An adapter in the one form of this module: its weights, on the CPU in the file's dtype, and
    their description (r, lora_alpha, rank_pattern, alpha_pattern, use_rslora, target_modules,
    base_model_name_or_path). source: as in `adapter_folder`.

    A file with neither metadata nor adapter_config.json beside it has the alpha of each layer in
    `<layer>.alpha`, or none: then alpha = r, as diffusers takes it, and a warning says so.
    Raises AdapterError, or HubError.
    """
    from safetensors.torch import load_file

    head = read_head(adapter_folder(source))
    weights, alphas = {}, {}
    for key, value in _peft_names(load_file(head.file)).items():
        if key.endswith(".alpha"):
            alphas[_bare(key).removesuffix(".alpha")] = float(value)
        else:
            weights[_bare(key)] = value
    ranks = _ranks(head.file, weights)
    if head.config is None:
        if not alphas:
            log.warning(
                "%s names no alpha; it is taken to be the rank (scale 1), as diffusers does. If it "
                "was trained with another, put peft's %s beside it.", head.file, PEFT_CONFIG
            )  # fmt: skip
        config, found = {}, {layer: alphas.get(layer, rank) for layer, rank in ranks.items()}
    elif alphas:
        raise AdapterError(f"{head.file} says its alpha twice: as weights, and in its description")
    else:
        config, found = head.config, _alphas(head.file, ranks, head.config)
    return weights, describe(ranks, found, bool(config.get("use_rslora")),
                             config.get("base_model_name_or_path"))  # fmt: skip


def _peft_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of today, by diffusers' own table."""
    if not any(OLD.fullmatch(key) for key in weights):
        return weights
    from diffusers.utils import convert_unet_state_dict_to_peft

    return convert_unet_state_dict_to_peft(weights)


def _ranks(file: Path, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """{layer: rank}; AdapterError where A and B do not make up an update."""
    found = {}
    for layer in dict.fromkeys(key.rsplit(".lora_", 1)[0] for key in weights):
        down, up = (weights.get(f"{layer}.lora_{half}.weight") for half in "AB")
        if down is None or up is None or down.shape[:1] != up.shape[1:2]:
            shapes = [None if half is None else list(half.shape) for half in (down, up)]
            raise AdapterError(f"{file}: A and B of {layer} are {shapes}, and make up no update")
        found[layer] = down.shape[0]
    if not found:
        raise AdapterError(f"{file} holds no weights")
    return found


def _alphas(file: Path, ranks: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, float]:
    """{layer: alpha} as peft reads its own description: patterns are regular expressions that match
    the end of a layer's name."""
    from peft.utils.other import get_pattern_key

    def of(layer: str, usual: str, pattern: str) -> Any:
        special = config.get(pattern) or {}
        return special.get(get_pattern_key(list(special), layer), config.get(usual, DEFAULT))

    for layer, rank in ranks.items():
        said = of(layer, "r", "rank_pattern")
        if said != rank:
            raise AdapterError(
                f"{file}: {layer} has rank {rank}, and the description says {said}. They belong to "
                "two adapters, or one of them was edited."
            )
    return {layer: of(layer, "lora_alpha", "alpha_pattern") for layer in ranks}


def describe(
    ranks: Mapping[str, int], alphas: Mapping[str, float], rslora: bool, base: str | None
) -> dict[str, Any]:
    """peft's description of a LoRA with these ranks and alphas: the usual one, and the others by
    their layers' whole names."""
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{layer}": r for layer, r in ranks.items() if r != rank},
        "alpha_pattern": {f"^{layer}": a for layer, a in alphas.items() if a != alpha},
        "use_rslora": rslora,
        "target_modules": sorted(ranks),
        "base_model_name_or_path": base,
    }


def scales(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, float]:
    """{layer: alpha / r} (alpha / sqrt(r) under rsLoRA) of what `read_lora` gave."""
    special = config["alpha_pattern"]
    found = {}
    for key, value in weights.items():
        if match := FACTOR.fullmatch(key):
            alpha = special.get(f"^{match[1]}", config["lora_alpha"])
            rank = value.shape[0 if match[2] == "A" else 1]
            found[match[1]] = alpha / (rank**0.5 if config["use_rslora"] else rank)
    return found


def write_lora(
    folder: str | Path,
    layers: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    *,
    text_length: int | None = None,
) -> None:
    """Write the weights and peft's description of a LoRA as `pipe.load_lora_weights` takes them.

    text_length: tokens of the T5 encoder in its training (None = nothing is known), for
    `flowalign.load`. It lies beside the description, not in it: peft refuses what it does not know.
    """
    from diffusers import StableDiffusion3Pipeline

    StableDiffusion3Pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=dict(layers),
        transformer_lora_adapter_metadata=dict(metadata),
    )
    if text_length is not None:
        _add_to_head(Path(folder) / ADAPTER, {TEXT_LENGTH: str(text_length)})


def _add_to_head(file: Path, entries: Mapping[str, str]) -> None:
    """Put entries into the head of a safetensors file, whose weights stay as they are."""
    from safetensors.torch import load_file, save_file

    with safe_open(file, framework="numpy") as opened:
        known = opened.metadata() or {}
    part = file.with_suffix(".part")
    save_file(load_file(file), part, metadata={**known, **entries})
    os.replace(part, file)


# Digests -----------------------------------------------------------------------------------------


def adapter_digest(source: str | Path) -> str:
    """SHA-256 of an adapter's weights and description (alpha ...), wherever it lies and whatever
    its format."""
    import torch

    weights, metadata = read_lora(source)
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name].contiguous().reshape(-1)
        found.update(f"{name} {tensor.dtype} {list(weights[name].shape)}".encode())
        found.update(tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def file_digest(source: str | Path) -> str | None:
    """SHA-256 of the files of an adapter as they are; None where there are none."""
    try:
        file = adapter_file(adapter_folder(source))
    except AdapterError:
        return None
    files = [file, file.parent / PEFT_CONFIG]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.is_file())).hexdigest()
