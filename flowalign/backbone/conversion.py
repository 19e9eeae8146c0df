"""LoRAs under the names of other programs (kohya, OneTrainer, ai-toolkit, ComfyUI, BFL, XLabs).

A name stands for layers of the transformer: for the one of this name, behind whatever prefix, or
for those that the family lists (`Family.foreign`). Any other is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from flowalign.backbone.family import Family
from flowalign.system.escape import shown

PART = re.compile(
    r"(?P<layer>[\w.-]{1,300}?)\.(?:lora[._](?:linear_layer\.)?)?"
    r"(?P<half>(?<=lora_)[AB]\.weight|(?:down|up)\.weight|(?<!lora_)alpha)",
    re.ASCII,
)
HALVES = {"down.weight": "A", "up.weight": "B", "A.weight": "A", "B.weight": "B", "alpha": "alpha"}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What torch.compile, DDP and FSDP put into a name, and peft the name of an adapter
WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
    r"|(?<=\.lora_[AB])\.\w+(?=\.weight$)"
)
PREFIX = re.compile(
    r"(base_model\.model|transformer|diffusion_model|pipe|dit|model|unet)\."
    r"|lora_unet_|lora_transformer_|lycoris_"
)
UNREAD_WEIGHTS = {  # of weights that are not read, by a part of their names
    r"(^|\.)(lora_te|text_encoder|text_model)": "of a text encoder, which stays as it is",
    "dora_scale|magnitude_vector": "DoRA",
    "lokr_|hada_|oft_|boft_|vera_": "another method (LoKr, LoHa, OFT)",
    "scale_weight$|weight_scale$|scale_input$": "the scale of quantized weights",
    "reshape_weight$": "another shape for a layer of the model",
    "bias$|diff_b$": "a bias",
    "embedding": "an embedding",
}
FAMILY_LAYERS = {  # families by what only the names of their layers hold
    "single_(transformer_)?blocks": "FLUX",
    "(down|up|input|output)_blocks|mid_block": "Stable Diffusion XL or 1.5",
}


def looks_like(layers: Iterable[str]) -> str:
    """A remark on the family whose LoRAs have such layers; "" if it is unknown."""
    seen = " ".join(layers)
    titles = (title for part, title in FAMILY_LAYERS.items() if re.search(part, seen))
    return next((f"; LoRAs of {title} have such layers" for title in titles), "")


def unwrapped(name: str) -> str:
    """A name without what torch.compile, DDP, FSDP and peft put into it."""
    return WRAPPED.sub("", name)


Update = tuple[Tensor, Tensor, float | None]  # A [r,in], B [out,r], alpha where the file holds it


def layers_of(stored: Mapping[str, Tensor]) -> dict[str, Update]:
    """{layer: its update} of a file, under the names that it has. Raises ValueError for what is no
    plain LoRA, and for two weights that are one part of a layer."""
    names = defaultdict[str, dict[str, str]](dict)
    updates = dict[str, Update]()
    for name, value in stored.items():
        part = PART.fullmatch(unwrapped(name))
        unread = (kind for known, kind in UNREAD_WEIGHTS.items() if re.search(known, name))
        kind = next(unread, None)
        if not part:
            kind = kind or "no A, B or alpha of a layer"
        elif part["half"] == "alpha" and not (value.numel() == 1 and 0 < value < 1e30):
            kind = f"no alpha above 0 ({value.flatten()[:3].tolist()})"
        elif value.dtype not in FLOATS:
            raise ValueError(f"{shown(name)} is stored as {value.dtype}: convert it to bfloat16")
        if kind or not part:
            raise ValueError(
                f"{shown(name)} is {kind}, and only plain LoRAs of a transformer are read. Remove "
                "such weights from the file (docs/hub.md has the lines) and see whether its images "
                "stay as they were, or train another."
            )
        twin = names[part["layer"]].setdefault(HALVES[part["half"]], name)
        if twin != name:
            raise ValueError(
                f"it has two weights of one layer, under two names: {shown(twin)}, {shown(name)}. "
                "Keep those of one adapter."
            )
    for layer, halves in names.items():
        a, b = (stored[halves[half]] if half in halves else torch.empty(0) for half in "AB")
        # of a linear layer [r,in] and [out,r]; of a convolution two axes more
        if not (a.ndim == b.ndim in (2, 4) and len(a) == b.shape[1] and a.numel() and b.numel()):
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise ValueError(f"A and B of {shown(layer)} are {shapes}: no update")
        updates[layer] = a, b, float(stored[halves["alpha"]]) if "alpha" in halves else None
    return updates


def convert(updates: Mapping[str, Update], family: Family) -> dict[str, Update]:
    """The updates under the names of the transformer's layers. Raises ValueError for layers that
    the model does not have, or has in other sizes, and for two updates of one."""
    layers = taking_lora(family.core)
    known = _names(layers, family)
    converted = dict[str, Update]()
    for layer, (a, b, alpha) in updates.items():
        if (targets := _targets(layer, known)) is None:
            text = f"{shown(layer)} is no layer of a {family.pipeline} that is read here"
            raise ValueError(text + looks_like(updates))
        rows = [layers[t].out_features for t in targets] if len(targets) > 1 else [len(b)]
        if sum(rows) != len(b):
            raise ValueError(f"{shown(layer)} has {len(b)} rows, and the model {sum(rows)}")
        # scale before shift, in diffusers
        swapped = targets[0].endswith(("norm_out.linear", "norm1_context.linear"))
        if "adaLN" in layer and swapped and len(b) == 2 * a.shape[1]:
            b = torch.cat(b.chunk(2)[::-1])
        for target, part in zip(targets, b.split(rows), strict=True):
            if target in converted:
                raise ValueError(
                    f"it has two updates of {target}, one of them under the name {shown(layer)}. "
                    "Remove the one that repeats the other."
                )
            converted[target] = a.clone(), part.clone(), alpha  # fused layers have one A
    return converted


def taking_lora(core: nn.Module) -> dict[str, Any]:
    """The layers of a transformer that take a LoRA, by name."""
    inner = {"base_layer", "lora_A", "lora_B"}  # of a layer that has an adapter
    return {
        name: module
        for name, module in core.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | LoraLayer) and not inner & {*name.split(".")}
    }


def _names(layers: Mapping[str, Any], family: Family) -> dict[str, list[str]]:
    """{name, with _ for dots: the layers side by side that it stands for}: their own names, and the
    family's `foreign` ones."""
    names = {name: [name] for name in layers}
    blocks = {int(number) for name in layers for number in re.findall(r"\d+", name)}
    for name, parts in family.foreign.items():
        numbers = blocks if "{}" in name else [0]
        for block in numbers:
            targets = [part.format(block) for part in parts]
            if layers.keys() >= {*targets}:
                names[name.format(block)] = targets
    return {name.replace(".", "_"): targets for name, targets in names.items()}


def _targets(layer: str, known: Mapping[str, list[str]]) -> list[str] | None:
    """The layers that a name stands for, behind any prefixes; None = not known."""
    if processor := re.fullmatch(r"(.+)\.processor\.(to_\w+)_lora", layer):  # diffusers' of 2023
        layer = ".".join(processor.groups())
        if processor[2] == "to_out":
            layer += ".0"
    while (targets := known.get(layer.replace(".", "_"))) is None:
        prefix = PREFIX.match(layer)
        if not prefix:
            return None
        layer = layer[prefix.end() :]
    return targets
