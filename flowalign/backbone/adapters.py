"""LoRA adapters as files: finding them here or on the Hub, reading them, and writing ours.

Teachers, lora.init, merges, evaluations and `flowalign.load` all read adapters here.
diffusers' files are read, with or without metadata, and peft's folders (adapter_config.json). Both
come out in one form, `Lora`. Anything but a plain LoRA is refused, and so is every pickle.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import re
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import regex
import torch
from huggingface_hub import HfApi, errors
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flowalign.backbone.conversion import convert, layers_of, unwrapped
from flowalign.backbone.family import Family, ModelError
from flowalign.backbone.tiny import TEACHERS
from flowalign.config import ADAPTER
from flowalign.config.section import did_you_mean
from flowalign.system.escape import shown
from flowalign.system.files import replacing
from flowalign.system.folder import RunFolder
from flowalign.system.hub_address import HubAddress
from flowalign.system.hub_files import FAILED, HTTP_ERROR, HubError, HubFiles
from flowalign.system.manifest import Damaged, Foreign, check_manifest, write_manifest

log = logging.getLogger("flowalign")

PEFT_ADAPTER, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
METADATA = "lora_adapter_metadata"  # the entry of a head with peft's description
# In the head of a file, beside peft's description and not in it: peft refuses unknown entries.
TEXT_LENGTH = "flowalign_max_sequence_length"
LAYER_NAME = re.compile(  # of a layer in diffusers, as far as a name tells
    r"(?!text_encoder|lora_|lycoris_|(diffusion_model|model|unet|pipe|dit|double_blocks|"
    r"single_blocks|joint_blocks|final_layer)\.|.*\.attention\.(qkv|out)$|.*\.processor\.).*"
)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MATCHING_S = 20.0  # for all patterns of a description: a stranger's may take for ever


class AdapterError(ValueError):
    """A folder that holds no adapter that can be read: what was seen, what is possible."""


# Where it lies -----------------------------------------------------------------------------------


def is_hub_id(source: str) -> bool:
    """Whether a source names a place on the Hub: it is none that ships with the package, and no
    local folder has the name of its first part."""
    owner = source.split("/")[0]
    return HubAddress.parse(source) is not None and owner != "tiny" and not Path(owner).exists()


def adapter_folder(source: str | Path, *, newest: bool = False) -> Path:
    """The folder (or .safetensors file) of an adapter, which need not exist.

    `tiny/NAME` ships with the package. The folder of a run stands for its adapter. A place on the
    Hub (see `HubAddress.parse`) is downloaded if the cache does not have it, or `newest` is asked
    for. Raises HubError, and AdapterError for a folder there with several adapters.
    """
    if str(source).startswith("tiny/"):
        return TEACHERS / str(source).removeprefix("tiny/")
    if is_hub_id(str(source)):
        return _download(str(source), newest)
    folder = Path(source).expanduser()
    of_run = RunFolder(folder).adapter
    return of_run if (of_run / ADAPTER).is_file() and not (folder / ADAPTER).exists() else folder


def adapter_files(source: str) -> HubFiles:
    """The files of an adapter on the Hub, but no folders beside them; or the one file that the
    source names."""
    address = HubAddress.parse(source)
    assert address is not None, source
    path = address.path
    file = address.path.endswith(".safetensors")
    folder = path.rpartition("/")[0] if file else path
    prefix = glob.escape(f"{folder}/") if folder else ""
    weights = glob.escape(path) if file else f"{prefix}*.safetensors"
    patterns = (f"{prefix}*.json", f"{prefix}README.md", weights)
    ignored = (f"{prefix}*/*",)  # checkpoints, say: as large as the adapter
    return HubFiles(address.repository, patterns, ignored, address.revision)


def _download(source: str, newest: bool) -> Path:
    """The folder, or file, of an adapter in huggingface_hub's cache."""
    address = HubAddress.parse(source)
    files = adapter_files(source)
    assert address is not None, source
    folder = address.path
    try:
        if not newest:
            with suppress(errors.LocalEntryNotFoundError, HubError):  # not cached: ask the Hub
                return files.download(local_files_only=True) / folder
        # gigabytes of what is refused, such as a pipeline, stay there
        if not folder.endswith(".safetensors"):
            with suppress(OSError, HTTP_ERROR):  # no network: the cache has it, or not
                about = HfApi().model_info(address.repository, revision=address.revision)
                paths = [PurePosixPath(file.rfilename) for file in about.siblings or ()]
                names = [path.name for path in paths if path.parent == PurePosixPath(folder)]
                revision = address.revision or "main"
                _choose(names, f"{address.repository}@{revision}/{folder}".rstrip("/"))
        return files.download() / folder
    except FAILED as error:
        what = f"there is no folder {source!r}, and it cannot be downloaded"
        raise HubError(f"{what}: {shown(str(error), 600)}") from error


def adapter_file(folder: Path) -> Path:
    """The weights in a folder (or the file itself): diffusers' or peft's file (peft's first where
    the folder describes it), else the only .safetensors file."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        shipped = sorted(f"tiny/{file.parent.name}" for file in TEACHERS.glob(f"*/{ADAPTER}"))
        hint = did_you_mean(f"tiny/{folder.name}", shipped) if folder.parent == TEACHERS else ""
        known = f"Shipped adapters are {', '.join(shipped)}; on the Hub: owner/name@main/folder"
        what = "file" if folder.suffix == ".safetensors" else "folder"
        raise AdapterError(f"no such {what}.{hint} {known}")
    return folder / _choose(sorted(path.name for path in folder.iterdir()), str(folder))


def _choose(names: Sequence[str], folder: str) -> str:
    """The file of an adapter among those of a folder. Raises AdapterError."""
    if "model_index.json" in names:
        raise AdapterError("it is a whole pipeline; name a LoRA (null is the base)")
    candidates = [name for name in names if name.endswith(".safetensors")]
    both = (PEFT_ADAPTER, ADAPTER) if PEFT_CONFIG in names else (ADAPTER, PEFT_ADAPTER)
    usual = [name for name in both if name in candidates]
    if usual or len(candidates) == 1:
        return (usual or candidates)[0]
    if candidates:
        raise AdapterError(
            f"it holds {len(candidates)} adapters: {shown(', '.join(candidates), 600)}. Name one, "
            f"as in {folder}/{candidates[0]}"
        )
    raise AdapterError(
        f"{folder} has no {ADAPTER} or other .safetensors file (but {names[:8]}). A pickle (.bin, "
        ".pt, .ckpt) could run code and is not read: convert it with safetensors."
    )


def file_digest(source: str | Path) -> str | None:
    """SHA-256 of the files of an adapter as they are; None where there are none to be had."""
    try:
        file = adapter_file(adapter_folder(source))
    except (AdapterError, HubError):
        return None
    files = [file, file.parent / PEFT_CONFIG]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.is_file())).hexdigest()


# Reading -----------------------------------------------------------------------------------------

# Entries of peft's LoraConfig that do not change a trained update: which layers were adapted (the
# weights name them), how it was trained, sizes that only matter with a switch that is checked.
WITHOUT_EFFECT = {
    "auto_mapping", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
Rank = Annotated[int, Field(ge=1, le=1 << 20)]
Alpha = Annotated[int | float, Field(gt=0, le=1e100)]  # NaN is neither
Printable = Annotated[str, Field(max_length=500, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]


class Description(BaseModel):
    """peft's LoraConfig in JSON, which may come from a stranger: types are checked, and an entry
    that would change the update and is not read here is refused."""

    model_config = ConfigDict(strict=True)
    r: Rank = 8  # the defaults are peft's
    lora_alpha: Alpha = 8
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    use_rslora: bool | None = None
    base_model_name_or_path: Printable | None = None
    peft_type: Literal["LORA"] | None = None
    bias: Literal["none"] = "none"
    # others (pissa, olora, corda, loftq ...) change the base's weights, too
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries  # refused by pydantic
        entries = {_inner_name(key): value for key, value in entries.items()}
        # of other parts, such as text encoders: their weights are refused where there are any
        entries = {key: value for key, value in entries.items() if "." not in key}
        for key in entries.keys() - WITHOUT_EFFECT - cls.model_fields.keys():
            if entries[key]:
                raise ValueError(f"{shown(key, 80)} = {reprlib.repr(entries[key])} is not read")
        return entries

    @classmethod
    def parse(cls, text: str | bytes) -> Description:
        """The description in a JSON text. Raises AdapterError that names the entry."""
        try:
            return cls.model_validate_json(text)
        except (ValidationError, OverflowError) as error:  # OverflowError: integers over 1e308
            first: Any = error.errors()[0] if isinstance(error, ValidationError) else {}
            key = ".".join(map(str, first.get("loc", ())))
            seen = reprlib.repr(first.get("input"))
            problem = shown(f"{key} = {seen}: {first.get('msg', error)}", 600)
            raise AdapterError(f"its description is of no plain LoRA: {problem}") from None


def resolve_pattern(
    layers: Iterable[str], default: Any, patterns: Mapping[str, Any] | None
) -> dict[str, Any]:
    """{layer: rank or alpha} as peft resolves its patterns: the first that matches the name of a
    layer or its end. Raises ValueError for what is no pattern, or takes too long."""
    values = dict.fromkeys(layers, default)
    left = list(values)
    end = time.monotonic() + MATCHING_S
    for pattern, value in (patterns or {}).items():
        try:
            compiled = regex.compile(rf"(.*\.)?({pattern})$")
            hits = []
            for layer in left:
                if (seconds := end - time.monotonic()) <= 0:  # which regex takes for no limit
                    raise TimeoutError(f"all patterns took over {MATCHING_S:g} s")
                hits += [layer] if compiled.match(layer, timeout=seconds) else []
        except (regex.error, TimeoutError, RecursionError) as error:
            why = f"{type(error).__name__}: {shown(str(error), 200)}"
            raise ValueError(f"pattern {shown(pattern)} cannot be matched ({why})") from None
        values |= dict.fromkeys(hits, value)
        left = [layer for layer in left if layer not in hits]
    return values


def _inner_name(key: str) -> str:
    """The name of a weight, or of an entry, inside the transformer: without what peft, diffusers
    and torch put around it."""
    return re.sub(r"^((base_model\.model|transformer)\.)+", "", unwrapped(key))


@dataclass(frozen=True)
class Lora:
    """An adapter that was read, whatever the format of its file.

    weights: {`<layer>.lora_A.weight`: [r,in], `<layer>.lora_B.weight`: [out,r]} on the CPU, in the
    file's dtype. metadata: the entries of peft's LoraConfig that the update alpha / r * B A depends
    on (alpha / sqrt(r) under rsLoRA), and target_modules, base_model_name_or_path.
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
        total = hashlib.sha256(json.dumps(self.metadata, sort_keys=True).encode())
        for name, weight in sorted(self.weights.items()):
            total.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            total.update(weight.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


def span(values: Mapping[str, float]) -> str:
    """The ranks or scales of an adapter's layers, for people."""
    low = min(values.values())
    high = max(values.values())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def read_lora(
    source: str | Path | Lora,
    *,
    newest: bool = False,
    family: Callable[[], Family] | None = None,
) -> Lora:
    """The adapter of a source (see `adapter_folder`); one that was read already is given back.

    Alpha and the rank pattern come from the file's metadata, or the folder's adapter_config.json.
    family: of the base model; asked for if the names in the file are another program's, and have
    to be converted (None = they are refused).
    Raises AdapterError for what is no plain LoRA of a transformer, or is not what the manifest in
    its folder says, or holds NaN or infinity; and HubError.
    """
    if isinstance(source, Lora):
        return source
    try:
        file = adapter_file(adapter_folder(source, newest=newest))
        with suppress(Foreign):  # there is no manifest, or another program's
            check_manifest(file.parent, [file.name, PEFT_CONFIG])
        return _read_file(file, family)
    except Damaged as error:
        raise AdapterError(
            f"{str(source)!r} is damaged: {error}. Copy or download it again; of a run, --resume "
            "restores it. If the change is yours, remove its manifest.json."
        ) from None
    except (ValueError, ModelError) as error:
        raise AdapterError(f"{str(source)!r}: {error}") from error


def _tensors(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The head of a file, and its weights in the order in which safetensors' load_file gives them.
    AdapterError for what cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            head = opened.metadata() or {}
            weights = {key: opened.get_tensor(key) for key in opened.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"it is not a safetensors file ({shown(str(error))})") from error
    for name, value in weights.items():
        if value.dtype in FLOAT8 or name.endswith(".alpha"):
            weights[name] = value.float()
    return head, weights


def _read_file(file: Path, family: Callable[[], Family] | None) -> Lora:
    head, in_file = _tensors(file)
    updates = layers_of(in_file)
    if name := not_finite(in_file):
        reason = f"{shown(name)} holds NaN or infinity"
        raise AdapterError(f"{reason}. Use an earlier one, or train it again.")
    layers = {_inner_name(layer): update for layer, update in updates.items()}
    if not layers:
        raise AdapterError("it holds no weights")
    foreign = next((layer for layer in layers if not LAYER_NAME.fullmatch(layer)), None)
    if foreign and not family:
        raise AdapterError(
            f"{shown(foreign)} may be a layer under the name of another program (kohya, "
            "ai-toolkit). It is read where the base model is known: --model."
        )
    if foreign and family:
        layers = convert(updates, family())
        count = len(updates)
        _say_once(logging.INFO, f"{file}: converted {count} layers, such as {shown(foreign)}")
    elif len(layers) < len(updates):
        raise AdapterError("it has two updates of one layer, under two prefixes")
    ranks = {layer: len(a) for layer, (a, _, _) in layers.items()}
    described = file.parent / PEFT_CONFIG
    text = head.get(METADATA) or (described.read_bytes() if described.is_file() else None)
    scales = {layer: alpha for layer, (_, _, alpha) in layers.items() if alpha is not None}
    config = Description() if text is None or scales else Description.parse(text)
    alphas = dict[str, Any](ranks | scales)
    if config.model_fields_set:
        expected = resolve_pattern(ranks, config.r, config.rank_pattern)
        if wrong := next((layer for layer in ranks if ranks[layer] != expected[layer]), None):
            raise AdapterError(
                f"{wrong} has rank {ranks[wrong]}, and is described as {expected[wrong]}"
            )
        if config.alpha_pattern and foreign:
            raise AdapterError("its alpha_pattern has the names before their conversion")
        alphas = resolve_pattern(ranks, config.lora_alpha, config.alpha_pattern)
    elif not scales:
        _say_once(
            logging.WARNING,
            f"{file} names no alpha; it is taken to be the rank (scale 1), as diffusers does. If "
            f"it was trained with another, put peft's {PEFT_CONFIG} beside it.",
        )
    length = head.get(TEXT_LENGTH)
    if length and not re.fullmatch("[1-9][0-9]{0,8}", length):  # the family knows the limit
        raise AdapterError(f"{TEXT_LENGTH} = {shown(repr(length))} is no number of tokens")
    name = config.base_model_name_or_path
    base = name if METADATA in head or name and is_hub_id(name) else None
    metadata = describe_adapter(ranks, alphas, bool(config.use_rslora), name)
    weights = {
        f"{layer}.lora_{half}.weight": weight
        for layer, (a, b, _) in layers.items()
        for half, weight in (("A", a), ("B", b))
    }
    return Lora(file, weights, metadata, ranks, alphas, base, int(length) if length else None)


@cache  # a command reads an adapter several times
def _say_once(level: int, text: str) -> None:
    log.log(level, "%s", text)


def not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the first weight that holds NaN or infinity."""
    return next((name for name, w in weights.items() if not w.detach().isfinite().all()), None)


def weightless_lora(shapes: Mapping[str, tuple[int, int, int]]) -> Lora:
    """An adapter on the meta device, with shapes and no data. shapes: {layer: (out, rank, in)}."""
    weights = {}
    ranks = {}
    for layer, (out, rank, columns) in shapes.items():
        weights[f"{layer}.lora_A.weight"] = torch.empty(rank, columns, device="meta")
        weights[f"{layer}.lora_B.weight"] = torch.empty(out, rank, device="meta")
        ranks[layer] = rank
    return Lora(
        Path(), weights, describe_adapter(ranks, ranks, False, None), ranks, {**ranks}, None, None
    )


# Writing -----------------------------------------------------------------------------------------


def describe_adapter(
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
    if name := not_finite(layers):
        raise AdapterError(f"an adapter for {folder} is not written: {name} holds NaN or infinity.")
    # as every pipeline's own `save_lora_weights` does, whose head has no room for TEXT_LENGTH
    weights = {f"transformer.{name}": value.cpu().contiguous() for name, value in layers.items()}
    entries = {f"transformer.{name}": value for name, value in metadata.items()}
    head = {"format": "pt", METADATA: json.dumps(entries, indent=2, sort_keys=True)}
    if text_length is not None:
        head[TEXT_LENGTH] = str(text_length)
    data = save(weights, metadata=head)
    # safetensors writes the entries of a head in an order that differs from call to call
    start = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(
        json.loads(data[8:start]) | {"__metadata__": dict(sorted(head.items()))},
        separators=(",", ":"),
    )
    text += " " * (-len(text) % 8)  # as safetensors aligns its tensors
    with replacing(Path(folder) / ADAPTER) as part:
        part.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[start:])
    write_manifest(folder, {}, [ADAPTER])
