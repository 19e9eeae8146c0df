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
import reprlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from flowalign.backbone.adapters import hub
from flowalign.backbone.tiny import TEACHERS
from flowalign.config import ADAPTER
from flowalign.system import manifest, tensors
from flowalign.system.escape import shown
from flowalign.system.files import replacing
from flowalign.system.manifest import Damaged, Foreign

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("flowalign")

PEFT_ADAPTER, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
METADATA = "lora_adapter_metadata"  # the entry of a head with peft's description
# In the head of a file, beside peft's description and not in it: peft refuses unknown entries.
TEXT_LENGTH = "flowalign_max_sequence_length"
PREFIXES = ("base_model.model.", "transformer.")  # of names: peft's, then diffusers'
OLD = re.compile(r".+lora\.(down|up)\.weight")  # diffusers' before it used peft
NAME = re.compile(rf"(?!text_encoder|lora_)(.+\.lora_[AB]\.weight|{OLD.pattern}|.+\.alpha)")
LONGEST_NAME = 300  # characters of a weight's name
FLOATS = {f"torch.{kind}" for kind in (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")}  # fmt: skip


class AdapterError(ValueError):
    """A folder that holds no adapter that can be read: what was seen, what is possible."""


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


def adapter_file(folder: Path) -> Path:
    """The weights in a folder (or the file itself): diffusers' file, else peft's, else the only
    .safetensors file. AdapterError if there is none."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        shipped = sorted(f"tiny/{file.parent.name}" for file in TEACHERS.glob(f"*/{ADAPTER}"))
        there = f"; there are {', '.join(shipped)}" if folder.parent == TEACHERS else ""
        raise AdapterError(
            f"no such folder{there}. Training writes its adapter to <output>/adapter"
        )
    names = sorted(path.name for path in folder.iterdir())
    if "model_index.json" in names:
        raise AdapterError(f"{folder} holds a whole pipeline; name a LoRA (null is the base)")
    candidates = [name for name in names if name.endswith(".safetensors")]
    usual = [name for name in (ADAPTER, PEFT_ADAPTER) if name in candidates]
    if usual or len(candidates) == 1:
        return folder / (usual or candidates)[0]
    raise AdapterError(
        f"{folder} holds no {ADAPTER}, nor one other .safetensors file (but {names[:8]}). A pickle "
        "(.bin, .pt, .ckpt) is not read, as it could run code: convert it with safetensors."
    )


# Reading -----------------------------------------------------------------------------------------

# Entries of peft's LoraConfig that do not change a trained update: which layers were adapted (the
# weights name them), how it was trained, sizes that only matter with a switch that is checked.
WITHOUT_EFFECT = {
    "auto_mapping", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip


def _simple(pattern: str) -> str:
    """Refuse a regular expression that Python could need years to match: the time grows with each
    repeat as a power, and a repeated group may make it exponential."""
    repeats = len(re.findall(r"[*+?{]", pattern.replace("(?:", "(")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what `re` will read differently one day
            re.compile(rf"(.*\.)?({pattern})$")  # as peft does
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"no regular expression ({error})") from None
    if re.search(r"\)[*+?{]", pattern) or repeats > 3 or pattern.count("(") > 3:
        raise ValueError("too many repeats or groups; name the layers instead")
    return pattern


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("is not printable")
    return name


Rank = Annotated[int, Field(ge=1, le=1 << 20)]
Alpha = Annotated[int | float, Field(gt=0, le=1e100)]  # NaN is neither
Pattern = Annotated[str, Field(max_length=500), AfterValidator(_simple)]
Table = Field(None, max_length=4096)  # a few patterns for each of some hundred layers


class Description(BaseModel):
    """peft's LoraConfig in JSON, which may come from a stranger: types are checked, and an entry
    that would change the update and is not read here is refused."""

    model_config = ConfigDict(strict=True)

    r: Rank = 8  # the defaults are peft's
    lora_alpha: Alpha = 8
    rank_pattern: dict[Pattern, Rank] | None = Table
    alpha_pattern: dict[Pattern, Alpha] | None = Table
    use_rslora: bool | None = None
    base_model_name_or_path: (
        Annotated[str, Field(max_length=500), AfterValidator(_printable)] | None
    ) = None
    peft_type: Literal["LORA"] | None = None
    bias: Literal["none"] = "none"
    # others (pissa, olora, corda, loftq ...) change the base's weights, too
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries  # refused by pydantic
        entries = {inner_name(key): value for key, value in entries.items()}
        for key in entries.keys() - WITHOUT_EFFECT - cls.model_fields.keys():
            if entries[key]:
                raise ValueError(f"{shown(key, 80)} = {reprlib.repr(entries[key])} is not read")
        return entries

    def scaling(self, layers: Iterable[str]) -> tuple[dict[str, int], dict[str, float]]:
        """({layer: rank}, {layer: alpha}), as peft resolves its patterns: the first that matches
        the name of a layer or its end."""

        def resolve(usual: Any, patterns: Mapping[str, Any] | None) -> dict[str, Any]:
            table = [(re.compile(rf"(.*\.)?({p})$"), v) for p, v in (patterns or {}).items()]
            return {n: next((v for p, v in table if p.match(n)), usual) for n in layers}

        ranks = resolve(self.r, self.rank_pattern)
        return ranks, resolve(self.lora_alpha, self.alpha_pattern)


def inner_name(key: str) -> str:
    """The name of a weight, or of an entry, inside the transformer."""
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    return key


@dataclass(frozen=True)
class Lora:
    """An adapter that was read, whatever the format of its file.

    weights: {`<layer>.lora_A.weight`: [r,in], `<layer>.lora_B.weight`: [out,r]} on the CPU, in the
    file's dtype. metadata: the entries of peft's LoraConfig (r, lora_alpha, rank_pattern,
    alpha_pattern, use_rslora, target_modules, base_model_name_or_path).
    """

    file: Path
    weights: dict[str, Tensor]
    metadata: dict[str, Any]
    ranks: dict[str, int]  # by layer
    alphas: dict[str, float]  # by layer
    base: str | None  # trained on this; None = not named, or a folder of another machine
    text_length: int | None  # tokens of a prompt in its training; None = not said (ours do)

    @property
    def scales(self) -> dict[str, float]:
        """{layer: alpha / r}, or alpha / sqrt(r) under rsLoRA."""
        root = 0.5 if self.metadata["use_rslora"] else 1
        return {layer: self.alphas[layer] / rank**root for layer, rank in self.ranks.items()}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights and of `metadata`."""
        return tensors.digest_tensors(self.weights, json.dumps(self.metadata, sort_keys=True))


def read_lora(source: str | Path | Lora, *, newest: bool = False) -> Lora:
    """The adapter of a source (see `adapter_folder`); one that was read already is given back.

    Alpha and the rank pattern come from the file's metadata, or from adapter_config.json beside it.
    Raises AdapterError for what is no plain LoRA of a transformer, or is not what the manifest in
    its folder says, or holds NaN or infinity; and HubError.
    """
    if isinstance(source, Lora):
        return source
    try:
        file = adapter_file(adapter_folder(source, newest=newest))
        with suppress(Foreign):  # there is no manifest, or another program's
            manifest.check_manifest(file.parent, [file.name, PEFT_CONFIG])
        return _read_file(file)
    except Damaged as error:
        raise AdapterError(
            f"{str(source)!r} is damaged: {error}. Copy or download it again; of a run, --resume "
            "restores it. If the change is yours, remove its manifest.json."
        ) from None
    except AdapterError as error:
        raise AdapterError(f"{str(source)!r}: {error}") from error


def _read_file(file: Path) -> Lora:
    head, weights, alphas = _read_tensors(file)
    ranks = _ranks(file, weights)
    description, base = None, None
    if text := head.get(METADATA):
        description = _parse_description(text, file)
        base = description.base_model_name_or_path
    elif (beside := file.parent / PEFT_CONFIG).is_file():
        description = _parse_description(beside.read_bytes(), beside)
        name = description.base_model_name_or_path
        base = name if name and hub.is_id(name) else None
    if description:
        described, alphas = description.scaling(ranks)
        if described != ranks:
            layer = next(layer for layer in ranks if described[layer] != ranks[layer])
            raise AdapterError(
                f"{file}: {layer} has rank {ranks[layer]}, and its description says "
                f"{described[layer]}"
            )
    elif not alphas:
        log.warning(
            "%s names no alpha; it is taken to be the rank (scale 1), as diffusers does. If it "
            "was trained with another, put peft's %s beside it.", file, PEFT_CONFIG
        )  # fmt: skip
    alphas = {layer: alphas.get(layer, rank) for layer, rank in ranks.items()}
    rslora = bool(description and description.use_rslora)
    named = description.base_model_name_or_path if description else None
    length = head.get(TEXT_LENGTH)
    if length and not re.fullmatch("[1-9][0-9]{0,3}", length):
        raise AdapterError(f"{file} says {TEXT_LENGTH} = {shown(repr(length))}; want a number")
    metadata = describe(ranks, alphas, rslora, named)
    return Lora(file, weights, metadata, ranks, alphas, base, int(length) if length else None)


def _parse_description(text: str | bytes, where: Path) -> Description:
    try:
        return Description.model_validate_json(text)
    except (ValidationError, OverflowError) as error:  # OverflowError: of integers over 1e308
        first: Any = error.errors()[0] if isinstance(error, ValidationError) else {}
        key, seen = ".".join(map(str, first.get("loc", ()))), reprlib.repr(first.get("input"))
        problem = shown(f"{key} = {seen}: {first.get('msg', error)}", 600)
        raise AdapterError(f"the description of {where} is of no plain LoRA: {problem}") from None


def _read_tensors(file: Path) -> tuple[dict[str, str], dict[str, Tensor], dict[str, float]]:
    """(entries of the head, weights under today's names inside the transformer, {layer: alpha} of
    those that lie beside the weights)."""
    try:
        with safe_open(file, framework="pt") as opened:
            head = opened.metadata() or {}
            # in the order in which safetensors' load_file gives them
            stored = {key: opened.get_tensor(key) for key in opened.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is not a safetensors file ({shown(str(error))})") from error
    others = [
        key
        for key, value in stored.items()
        if not (NAME.fullmatch(key) and key.isprintable() and len(key) <= LONGEST_NAME)
        or not (str(value.dtype) in FLOATS or key.endswith(".alpha") and "int" in str(value.dtype))
    ]
    if others:
        raise AdapterError(
            f"{file} is no plain LoRA of a transformer: it holds {shown(others[0])} and "
            f"{len(others) - 1} more weights that are no A, B or alpha of the transformer's layers "
            "(DoRA, a bias, a text encoder, kohya's names). Convert or train a plain one."
        )
    weights = stored
    if any(OLD.fullmatch(key) for key in stored):
        from diffusers.utils import convert_unet_state_dict_to_peft

        weights = convert_unet_state_dict_to_peft(stored)
    weights = {inner_name(key): value for key, value in weights.items()}
    if len(weights) < len(stored):
        raise AdapterError(f"{file} holds two weights of one layer, under two prefixes")
    alphas = {}
    for name in [name for name in weights if name.endswith(".alpha")]:
        value = weights.pop(name)
        alpha = alphas[name.removesuffix(".alpha")] = float(value) if value.numel() == 1 else 0.0
        if not 0 < alpha < math.inf:
            raise AdapterError(f"{file}: {name} is no number above 0")
    if broken := not_finite(weights):
        raise AdapterError(f"{file}: {broken}. Use an earlier adapter, or train it again.")
    return head, weights, alphas


def _ranks(file: Path, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """{layer: rank}; AdapterError where A and B do not make up an update."""
    shapes, ranks = {name: list(value.shape) for name, value in weights.items()}, {}
    for layer in dict.fromkeys(key.rsplit(".lora_", 1)[0] for key in shapes):
        down, up = (shapes.get(f"{layer}.lora_{half}.weight", []) for half in "AB")
        # of a linear layer [r,in] and [out,r]; of a convolution two axes more
        if not (len(down) == len(up) in (2, 4) and down[0] == up[1] and all(down + up)):
            raise AdapterError(f"{file}: A and B of {layer} are {down}, {up}: no update")
        ranks[layer] = down[0]
    if not ranks:
        raise AdapterError(f"{file} holds no weights")
    return ranks


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
