"""LoRAs under the names of other programs (kohya, OneTrainer, ai-toolkit, ComfyUI, BFL, XLabs).

What names a layer of the transformer, behind whatever prefix, is read here, and so is what a family
lists itself (`Family.foreign`). diffusers converts the rest. In the end every update must be what
it was in the file (`deviations`), since converters have lost alphas and exchanged rows.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import diffusers
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from flowalign.backbone.family import Family
from flowalign.system.escape import shown

# diffusers counts up to the largest number of a block, so none here is above 999
PART = re.compile(
    r"(?!.*\d{4})(?P<layer>[\w.-]{1,300}?)\.(?:lora[._](?:linear_layer\.)?)?"
    r"(?P<half>(?<=lora_)[AB]\.weight|(?:down|up)\.weight|(?<!lora_)alpha)",
    re.ASCII,
)
HALVES = {"down.weight": "A", "up.weight": "B", "A.weight": "A", "B.weight": "B", "alpha": "alpha"}
# What torch.compile, DDP and FSDP put into a name, and peft the name of an adapter
WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
    r"|(?<=\.lora_[AB])\.\w+(?=\.weight$)"
)
PREFIX = re.compile(
    r"(base_model\.model|transformer|diffusion_model|pipe|dit|model|unet)\."
    r"|lora_unet_|lora_transformer_|lycoris_"
)
KINDS = {  # of weights that are not read, by a part of their names
    r"(^|\.)(lora_te|text_encoder|text_model)": "of a text encoder, which stays as it is",
    "dora_scale|magnitude_vector": "DoRA",
    "lokr_|hada_|oft_|boft_|vera_": "another method (LoKr, LoHa, OFT)",
    "scale_weight$|weight_scale$|scale_input$": "the scale of quantized weights",
    "bias$|diff_b$": "a bias",
    "embedding": "an embedding",
}
PROBES = 16  # inputs x that an update is compared on
TOLERANCE = 0.03  # a dropped alpha is off by 3 to 63, a permuted A by .1 to .2, bfloat16 by .006


def unwrapped(name: str) -> str:
    """A name without what torch.compile, DDP, FSDP and peft put into it."""
    return WRAPPED.sub("", name)


def check_part(name: str, value: Tensor) -> None:
    """Raise ValueError, with the reason, for a weight that is no part of a plain LoRA."""
    kind = next((kind for part, kind in KINDS.items() if re.search(part, name)), None)
    if not kind and not PART.fullmatch(name):
        kind = "no A, B or alpha of a layer"
    # diffusers would not return from an alpha below 0
    elif not kind and name.endswith(".alpha") and not (
        value.numel() == 1 and 0 < float(value) < 1e30
    ):
        kind = f"no alpha above 0 ({value.flatten()[:3].tolist()})"
    if kind:
        raise ValueError(
            f"{shown(name)} is {kind}, and only plain LoRAs of a transformer are read. Remove such "
            "weights from the file and see whether its images stay as they were, or train another."
        )


def convert(stored: Mapping[str, Tensor], family: Family | type[Family]) -> dict[str, Tensor]:
    """{`transformer.<layer>.lora_A.weight`: [r,in], ...lora_B...: [out,r]} of a file's weights, for
    the transformer of a family (of a class the layers are not known, and diffusers reads more of
    the names). Where the file holds alphas, alpha / r is in the weights.

    Raises ValueError for what is no plain LoRA, for two weights that are the same part of a layer,
    for layers that the model does not have, and for an update that diffusers' conversion changes.
    """
    for name, value in stored.items():
        check_part(unwrapped(name), value)
    known, own, final = _layers_of(family), dict[str, Tensor](), dict[str, Tensor]()
    rest, ends = dict[str, Tensor](), dict[str, Tensor]()  # for diffusers; the final layers, too
    for layer, names in _by_layer(stored).items():
        a, b = (stored[names[half]] if half in names else torch.empty(0) for half in "AB")
        if not (a.ndim == b.ndim in (2, 4) and len(a) == b.shape[1]):
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise ValueError(f"A and B of {shown(layer)} are {shapes}: no update")
        targets, group = _targets(layer, known), {unwrapped(n): stored[n] for n in names.values()}
        if targets is None:
            rest |= group
            continue
        if "alpha" in names:
            a = a * (float(stored[names["alpha"]]) / len(a))
        parts = b.chunk(len(targets))
        swapped = ("norm_out.linear", "norm1_context.linear")  # scale before shift, in diffusers
        if "adaLN" in layer and targets[0].endswith(swapped) and len(b) == 2 * a.shape[1]:
            parts = [torch.cat(b.chunk(2)[::-1])]
        if "final_layer" in layer:
            ends |= group
        for target, part in zip(targets, parts, strict=True):
            into = final if "final_layer" in layer else own
            into[f"transformer.{target}.lora_A.weight"] = a
            into[f"transformer.{target}.lora_B.weight"] = part
    theirs = _by_diffusers(rest | ends, family, known) if rest else {}
    if twice := sorted(own.keys() & theirs.keys()):
        raise ValueError(
            f"it has two updates of {shown(twice[0].rsplit('.lora_', 1)[0])}, one of them under a "
            f"name such as {shown(min(rest))}. Remove the one that repeats the other."
        )
    converted = theirs | final | own
    off = deviations(stored, converted)
    if changed := [layer for layer, value in off.items() if not value < TOLERANCE]:
        how = "loses rows" if math.isinf(off[changed[0]]) else f"off by {off[changed[0]]:.2g} of it"
        raise ValueError(
            f"diffusers' {family.pipeline} does not keep the update of {len(changed)} layers, such "
            f"as {shown(changed[0])} ({how}). Another version of diffusers may; or remove these "
            "weights from the file."
        )
    return {name: value.clone() for name, value in converted.items()}  # of fused layers, one A


def deviations(stored: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> dict[str, float]:
    """{layer in the file: |y' - y| / |y|}, y the sorted entries of alpha / r * B A x for fixed x,
    and y' those of the layers that it was converted to. Infinite where rows were lost or added, and
    for a converted layer that comes from none.

    A conversion splits B and may scale A, so its layers are found by the directions of A x. Rows
    that changed places are not seen.
    """
    before, after = list(_updates(stored)), list(_updates(converted))
    rows = torch.cat([nn.functional.normalize(ax) for _, ax, _ in before])
    owners = [layer for layer, ax, _ in before for _ in ax]
    groups = defaultdict[str, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
    for side, updates in enumerate((before, after)):
        for layer, ax, y in updates:
            if y.any():  # layers with one A, such as q, k and v that were split, are a group
                row = nn.functional.normalize(ax[ax.norm(dim=1).argmax()], dim=0)
                same = ((rows @ row).abs() > 0.999).nonzero()
                groups[owners[int(same[0])] if len(same) else layer][side].append(y)
    found = {}
    for layer, (old, new) in groups.items():
        y, z = (torch.cat(part).sort(0).values if part else torch.empty(0) for part in (old, new))
        found[layer] = float((z - y).norm() / y.norm()) if y.shape == z.shape else math.inf
    return found


def _updates(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(layer, A x [r,P], alpha / r * B A x [out,P]) of all layers."""
    for layer, names in _by_layer(weights).items():
        a, b = (weights[names[half]].float().flatten(1) for half in "AB")
        generator = torch.Generator().manual_seed(a.shape[1])
        ax = a @ torch.randn(a.shape[1], PROBES, generator=generator)
        scale = float(weights[names["alpha"]]) / len(a) if "alpha" in names else 1.0
        yield layer, ax, scale * b @ ax


def _by_layer(weights: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """{layer: {"A", "B" and "alpha": the name of the weight}}, of names that are PARTs. ValueError
    where two are the same part."""
    found = defaultdict[str, dict[str, str]](dict)
    for name in weights:
        part = PART.fullmatch(unwrapped(name))
        assert part, name
        twin = found[part["layer"]].setdefault(HALVES[part["half"]], name)
        if twin != name:
            raise ValueError(
                f"it has two weights of one layer, under two names: {shown(twin)}, {shown(name)}. "
                "Keep those of one adapter."
            )
    return found


def _layers_of(family: Family | type[Family]) -> dict[str, list[str]]:
    """{name, with _ for dots: the layers side by side that it stands for}: those that take a LoRA,
    and the family's `foreign` ones."""
    inner = {"base_layer", "lora_A", "lora_B"}  # of a layer that has an adapter
    core = family.core if isinstance(family, Family) else nn.Module()
    layers = {
        name: [name]
        for name, module in core.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | LoraLayer) and not inner & {*name.split(".")}
    }
    for name, parts in family.foreign.items():
        for block in range(1000 if "{}" in name else 1):
            targets = [part.format(block) for part in parts]
            if layers.keys() >= {*targets} or isinstance(family, type):
                layers[name.format(block)] = targets
    return {name.replace(".", "_"): targets for name, targets in layers.items()}


def _targets(layer: str, known: Mapping[str, list[str]]) -> list[str] | None:
    """The layers that a name stands for, behind any prefixes; None = not known."""
    if processor := re.fullmatch(r"(.+)\.processor\.(to_\w+)_lora", layer):  # diffusers' of 2023
        layer = ".".join(processor.groups()) + ".0" * (processor[2] == "to_out")
    while (targets := known.get(layer.replace(".", "_"))) is None:
        prefix = PREFIX.match(layer)
        if not prefix:
            return None
        layer = layer[prefix.end() :]
    return targets


def _by_diffusers(
    weights: dict[str, Tensor], family: Family | type[Family], known: Mapping[str, list[str]]
) -> dict[str, Tensor]:
    """As the family's pipeline reads them. ValueError for names that it does not read."""
    refusal = f"neither flowalign nor diffusers' {family.pipeline} reads"
    reader = getattr(diffusers, family.pipeline).lora_state_dict
    try:
        found, *more = reader(dict(weights), return_alphas=True, return_lora_metadata=True)
    except Exception as error:  # converters raise whatever a surprise raises
        raise ValueError(
            f"{refusal} {len(weights)} of its weights, such as {shown(min(weights))} "
            f"({shown(str(error), 200)})"
        ) from error
    for name, alpha in (more[0] or {}).items():  # FluxPipeline hands some on
        down = f"{name.removesuffix('alpha')}lora_A.weight"
        found[down] = found[down] * (float(alpha) / len(found[down]))
    converted = {}
    for name, value in found.items():
        layer, _, half = name.rpartition(".lora_")
        targets = _targets(layer, known)
        if isinstance(family, type):
            targets = [layer.removeprefix("transformer.")]
        if targets is None or len(targets) > 1 or half not in ("A.weight", "B.weight"):
            raise ValueError(f"{refusal} {shown(name)}, and the model has no such layer")
        converted[f"transformer.{targets[0]}.lora_{half}"] = value
    return converted
