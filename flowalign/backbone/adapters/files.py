"""LoRA adapters as files: where they lie, which formats are read, how ours is written.

Whoever names an adapter (teachers, lora.init, merges, evaluations, `flowalign.load`) comes here.
diffusers' files are read, with or without metadata, and peft's folders (adapter_config.json). All
come out in one form: weights by layer, `<layer>.lora_A.weight` [r,in] and `<layer>.lora_B.weight`
[out,r], and the entries of peft's LoraConfig that the update alpha / r * B A depends on
(alpha / sqrt(r) under rsLoRA). Anything but a plain LoRA is refused, and so is every pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open

from flowalign.backbone.adapters import hub
from flowalign.backbone.adapters.description import (
    LONGEST,
    AdapterError,
    inner_name,
    parse_description,
    scaling,
)
from flowalign.backbone.tiny import TEACHERS
from flowalign.config import ADAPTER
from flowalign.system import manifest, tensors
from flowalign.system.escape import shown
from flowalign.system.files import replacing
from flowalign.system.manifest import Damaged, Foreign

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("flowalign")
T = TypeVar("T")

PEFT_ADAPTER, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
METADATA = "lora_adapter_metadata"  # the entry of a head with peft's description
# In the head of a file, beside peft's description and not in it: peft refuses unknown entries.
TEXT_LENGTH = "flowalign_max_sequence_length"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
OLD = re.compile(r".+lora\.(down|up)\.weight")  # diffusers' before it used peft
# Types of weights; alpha beside them may be a whole number, too.
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
INTEGERS = {"U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"}
LONGEST_NAME = 300  # characters of a weight's name
MOST_TOKENS = 512  # of the T5 encoder in diffusers' pipelines


# Where it lies -----------------------------------------------------------------------------------


def adapter_folder(source: str | Path, *, newest: bool = False) -> Path:
    """The folder (or .safetensors file) of an adapter, which need not exist.

    `tiny/NAME` ships with the package. The folder of a run stands for its adapter. A Hub id is
    downloaded if the cache does not have it, or `newest` is asked for. Raises HubError.
    """
    if str(source).startswith("tiny/"):
        return TEACHERS / str(source).removeprefix("tiny/")
    if hub.is_id(str(source)):
        return hub.download(str(source), newest=newest)
    folder = Path(source).expanduser()
    of_run = folder / "adapter"
    return of_run if (of_run / ADAPTER).is_file() and not (folder / ADAPTER).exists() else folder


def shipped() -> list[str]:
    """The names of the adapters that come with the package."""
    return sorted(f"tiny/{file.parent.name}" for file in TEACHERS.glob(f"*/{ADAPTER}"))


def adapter_file(folder: Path) -> Path:
    """The weights in a folder (or the file itself): diffusers' file, else peft's, else the only
    .safetensors file. AdapterError if there is none."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        there = f"; there are {', '.join(shipped())}" if folder.parent == TEACHERS else ""
        raise AdapterError(
            f"no such folder{there}. Training writes its adapter to <output>/adapter"
        )
    names = sorted(path.name for path in folder.iterdir())
    if "model_index.json" in names:
        raise AdapterError(
            f"{folder} holds a whole pipeline (model_index.json), and an adapter is wanted. Name "
            "the folder of a LoRA; null is the base itself."
        )
    tensors = [name for name in names if name.endswith(".safetensors")]
    usual = [name for name in (ADAPTER, PEFT_ADAPTER) if name in tensors]
    if usual or len(tensors) == 1:
        return folder / (usual or tensors)[0]
    if tensors:
        raise AdapterError(
            f"{folder} holds {len(tensors)} files of weights ({', '.join(tensors[:4])}), and which "
            f"is the adapter is not said. Name one of the files, or call it {ADAPTER}."
        )
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        better = PEFT_ADAPTER if pickles[0].startswith("adapter_model") else ADAPTER
        raise AdapterError(
            f"{folder} holds {pickles[0]}, and a pickle is not read: it could run code. Convert "
            'it: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{pickles[0]}', weights_only=True), '{better}')\""
        )
    raise AdapterError(f"{folder} holds no {ADAPTER}, nor another LoRA (a .safetensors file)")


# Reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lora:
    """An adapter: `read_lora` reads the head of its file, the first access to `weights` the rest.

    metadata: the entries of peft's LoraConfig (r, lora_alpha, rank_pattern, alpha_pattern,
    use_rslora, target_modules, base_model_name_or_path).
    """

    file: Path
    metadata: dict[str, Any]
    ranks: dict[str, int]  # by layer
    alphas: dict[str, float]  # by layer
    base: str | None  # trained on this; None = not named, or a folder of another machine
    text_length: int | None  # tokens of the T5 encoder in its training; None = not said (ours do)
    describes_alpha: bool  # False = alpha = r is an assumption

    @property
    def scales(self) -> dict[str, float]:
        """{layer: alpha / r}, or alpha / sqrt(r) under rsLoRA."""
        root = 0.5 if self.metadata["use_rslora"] else 1
        return {layer: self.alphas[layer] / rank**root for layer, rank in self.ranks.items()}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """{`<layer>.lora_A.weight`: [r,in], `<layer>.lora_B.weight`: [out,r]} on the CPU, in the
        file's dtype. A warning says where alpha is an assumption. Raises AdapterError for NaN and
        infinity."""
        from safetensors.torch import load_file

        if not self.describes_alpha:
            log.warning(
                "%s names no alpha; it is taken to be the rank (scale 1), as diffusers does. If it "
                "was trained with another, put peft's %s beside it.", self.file, PEFT_CONFIG
            )  # fmt: skip
        renamed = _renamed(load_file(self.file))
        weights = {name: value for name, value in renamed.items() if not name.endswith(".alpha")}
        if broken := not_finite(weights):
            raise AdapterError(
                f"{self.file}: {broken}. The adapter diverged in its training, or its file is "
                "damaged. Use an earlier one, or train it again with a lower learning rate."
            )
        return weights

    def check_values(self) -> None:
        """Read the weights now. Raises AdapterError for NaN and infinity."""
        _ = self.weights

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights and of `metadata`, whatever the format of the file."""
        return tensors.digest_tensors(self.weights, json.dumps(self.metadata, sort_keys=True))


def read_lora(source: str | Path | Lora, *, newest: bool = False) -> Lora:
    """The adapter of a source (see `adapter_folder`); one that was read already is given back.

    Alpha and the rank pattern come from the file's metadata, or from adapter_config.json beside it.
    Without both, alpha lies in the file as `<layer>.alpha`, or alpha = r, as diffusers takes it.
    Raises AdapterError for what is no plain LoRA of a transformer, and HubError.
    """
    if isinstance(source, Lora):
        return source
    try:
        file = adapter_file(adapter_folder(source, newest=newest))
        _check_manifest(file)
        return _read(file)
    except AdapterError as error:
        raise AdapterError(f"{str(source)!r}: {error}") from error


def _check_manifest(file: Path) -> None:
    """Refuse an adapter that is not what the manifest in its folder says. Without one, or where the
    manifest.json is another program's, nothing is known."""
    try:
        manifest.check_manifest(file.parent, [file.name, PEFT_CONFIG])
    except Foreign:
        return
    except Damaged as error:
        raise AdapterError(
            f"{file.parent} is damaged: {error}. Copy or download it again; of a run, --resume "
            "restores it. If the change is yours, remove its manifest.json."
        ) from None


def _read(file: Path) -> Lora:
    """The head of a file."""
    head, shapes, stored = _head(file)
    beside = file.parent / PEFT_CONFIG
    config: dict[str, Any] | None = None
    base = None
    if text := head.get(METADATA):
        config = parse_description(text, file)
        base = config.get("base_model_name_or_path")
    elif beside.is_file():
        config = parse_description(_text(beside), beside)
        name = config.get("base_model_name_or_path")
        base = name if name and hub.is_id(name) else None
    ranks = _ranks(file, shapes)
    if config is None:
        alphas = {layer: stored.get(layer, rank) for layer, rank in ranks.items()}
    elif stored:
        raise AdapterError(f"{file} says its alpha twice: as weights, and in its description")
    else:
        alphas = _alphas(file, ranks, config)
    entries = config or {}
    rslora, named = bool(entries.get("use_rslora")), entries.get("base_model_name_or_path")
    return Lora(
        file,
        describe(ranks, alphas, rslora, named),
        ranks,
        alphas,
        base,
        text_length=_text_length(file, head),
        describes_alpha=config is not None or bool(stored),
    )


def _head(file: Path) -> tuple[dict[str, str], dict[str, list[int]], dict[str, float]]:
    """What a file says before its weights: (entries of its head, {name of a weight: shape}, {layer:
    alpha} of those that lie beside the weights)."""
    shapes, stored = {}, {}
    try:
        with safe_open(file, framework="pt") as opened:
            head = opened.metadata() or {}
            keys = list(opened.offset_keys())  # in the order in which load_file gives them
            _check_keys(file, keys)
            names = _renamed(dict(zip(keys, keys, strict=True)))
            if len(names) < len(keys):
                raise AdapterError(f"{file} holds two weights of one layer, under two prefixes")
            for name, key in names.items():
                part = opened.get_slice(key)
                shape, kind = part.get_shape(), part.get_dtype()
                alpha = name.endswith(".alpha")
                if kind not in (FLOATS | INTEGERS if alpha else FLOATS):
                    raise AdapterError(f"{file} holds {key} as {kind}, which is no LoRA's weight")
                if not alpha:
                    shapes[name] = shape
                    continue
                value = float(opened.get_tensor(key)) if math.prod(shape) == 1 else math.nan
                if not 0 < value < math.inf:
                    raise AdapterError(
                        f"{file}: {key} is {value:g} of shape {shown(str(shape), 80)}; alpha is "
                        "one number above 0. Download the adapter again."
                    )
                stored[name.removesuffix(".alpha")] = value
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is not a safetensors file ({shown(str(error))})") from error
    return head, shapes, stored


def _text(file: Path) -> str:
    """A description beside the weights."""
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read(LONGEST + 1)  # longer ones are
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(f"the description {file} cannot be read ({error})") from error


def _text_length(file: Path, head: Mapping[str, str]) -> int | None:
    """The T5 tokens that the head of a file names; None if it names none."""
    text = head.get(TEXT_LENGTH, "")
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= MOST_TOKENS:
        raise AdapterError(
            f"{file} says {TEXT_LENGTH} = {shown(repr(text))}; want 1 to {MOST_TOKENS} tokens"
        )
    return int(text)


def _renamed(entries: dict[str, T]) -> dict[str, T]:
    """The entries of a file under today's names of the weights, inside the transformer."""
    if any(OLD.fullmatch(key) for key in entries):
        from diffusers.utils import convert_unet_state_dict_to_peft

        entries = convert_unet_state_dict_to_peft(entries)
    return {inner_name(key): entry for key, entry in entries.items()}


def _check_keys(file: Path, keys: Iterable[str]) -> None:
    """Refuse a file that holds anything but A, B and alpha of the transformer's layers."""
    for key in keys:
        if not key.isprintable() or len(key) > LONGEST_NAME:
            raise AdapterError(
                f"{file} holds a weight of the name {shown(repr(key))}, which is no layer's"
            )

    def plain(key: str) -> bool:
        if key.endswith(".alpha"):
            return not key.startswith(("lora_", "text_encoder"))
        factor = FACTOR.fullmatch(key) or OLD.fullmatch(key)
        return factor is not None and not key.startswith("text_encoder")

    others = [key for key in keys if not plain(key)]
    if others:
        raise AdapterError(
            f"{file} is no plain LoRA of a transformer: it holds {others[0]} and {len(others) - 1} "
            "more weights of other kinds (DoRA, a bias, a text encoder, kohya's names, a weight of "
            "modules_to_save). Train or convert one that holds A and B matrices of the "
            "transformer's layers only."
        )


def _ranks(file: Path, shapes: Mapping[str, list[int]]) -> dict[str, int]:
    """{layer: rank}; AdapterError where A and B do not make up an update."""
    ranks = {}
    for layer in dict.fromkeys(key.rsplit(".lora_", 1)[0] for key in shapes):
        down, up = (shapes.get(f"{layer}.lora_{half}.weight", []) for half in "AB")
        # of a linear layer [r,in] and [out,r]; of a convolution two axes more
        if not (len(down) == len(up) in (2, 4) and down[0] == up[1] and all(down + up)):
            seen = ", ".join(shown(str(shape or None), 80) for shape in (down, up))
            raise AdapterError(f"{file}: A and B of {layer} are {seen}: no update")
        ranks[layer] = down[0]
    if not ranks:
        raise AdapterError(f"{file} holds no weights")
    return ranks


def _alphas(file: Path, ranks: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, float]:
    """{layer: alpha} of a description that has these ranks."""
    described, alphas = scaling(config, ranks)
    for layer, rank in ranks.items():
        if described[layer] != rank:
            raise AdapterError(
                f"{file}: {layer} has rank {rank}, and the description says {described[layer]}. "
                "They belong to two adapters, or one of them was edited."
            )
    return alphas


def not_finite(weights: Mapping[str, Tensor]) -> str:
    """What is wrong with weights that hold NaN or infinity: how many, and where; "" if none do."""
    import torch

    count, first = 0, ""
    for name, weight in weights.items():
        bad = int((~torch.isfinite(weight.detach().float())).sum())  # float: 8-bit types have none
        count, first = count + bad, first or (name if bad else "")
    return f"{count} of its weights are NaN or infinite, the first in {first}" if count else ""


def file_digest(source: str | Path) -> str | None:
    """SHA-256 of the files of an adapter as they are; None where there are none to be had."""
    try:
        file = adapter_file(adapter_folder(source))
    except (AdapterError, hub.HubError):
        return None
    files = [file, file.parent / PEFT_CONFIG]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.is_file())).hexdigest()


# Writing -----------------------------------------------------------------------------------------


def describe(
    ranks: Mapping[str, int], alphas: Mapping[str, float], rslora: bool, base: str | None
) -> dict[str, Any]:
    """The entries of peft's LoraConfig for these ranks and alphas: the most frequent ones, and the
    others as patterns, each the whole name of its layer."""
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


def write_lora(
    folder: str | Path,
    layers: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    *,
    text_length: int | None = None,
) -> None:
    """Write a LoRA as `pipe.load_lora_weights` takes it, and a manifest of it.

    The same LoRA has the same bytes. metadata: as in `Lora`. text_length: tokens of a prompt in
    its training, for `flowalign.load` (None = not known). Raises AdapterError for NaN and
    infinity, before anything is written.
    """
    if broken := not_finite(layers):
        raise AdapterError(f"an adapter for {folder} is not written: {broken}.")
    # as every pipeline's own `save_lora_weights` does, whose head has no room for TEXT_LENGTH
    weights = {f"transformer.{name}": value.cpu().contiguous() for name, value in layers.items()}
    entries = {f"transformer.{name}": value for name, value in metadata.items()}
    head = {"format": "pt", METADATA: json.dumps(entries, indent=2, sort_keys=True)}
    if text_length is not None:
        head[TEXT_LENGTH] = str(text_length)
    file = Path(folder) / ADAPTER
    with replacing(file) as part:
        tensors.save_tensors(weights, part, head)
    manifest.write_manifest(folder, {}, [ADAPTER])
