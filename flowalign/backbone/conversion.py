"""LoRAs under the names of other programs (ai-toolkit, ComfyUI, kohya, BFL). diffusers converts
them, after names that it does not know (`Family.renamed`); this file checks what goes in, and that
all of it comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping

import diffusers
from torch import Tensor

from flowalign.backbone.family import Family
from flowalign.system.escape import shown

# diffusers counts up to the largest number of a block, so none here is above 999
PART = re.compile(
    r"(?!.*\d{4})[\w.-]{1,300}\.(lora_(A|B|down|up)(\.default)?\.weight|(?P<alpha>alpha))", re.ASCII
)


def convert(stored: Mapping[str, Tensor], family: type[Family]) -> dict[str, Tensor]:
    """{`transformer.<layer>.lora_A.weight`: [r,in], ...lora_B...: [out,r]} of a file's weights, as
    the pipeline of a family reads them. Where the file holds alphas, alpha / r is in the weights.

    Raises ValueError for a weight that is no A, B or alpha, and for names that diffusers does not
    read with this pipeline.
    """
    for name, value in stored.items():
        part = PART.fullmatch(name)
        # diffusers would not return from an alpha below 0
        if not part or part["alpha"] and not (value.numel() == 1 and 0 < float(value) < 1e30):
            raise ValueError(
                f"it is no plain LoRA of a transformer: {shown(name)} is no A or B of a layer, and "
                "no alpha above 0 (but DoRA, a bias, a text encoder). Convert or train a plain one."
            )
    if encoders := sorted(name for name in stored if re.match(r"lora_te|text_encoder", name)):
        raise ValueError(
            f"{len(encoders)} of its {len(stored)} weights are of a text encoder, such as "
            f"{shown(encoders[0])}. flowalign leaves text encoders as they are. Remove these "
            "weights from the file, and see whether its images stay as they were."
        )
    refusal = f"diffusers' {family.pipeline} does not read a LoRA with names such as {min(stored)}"
    reader = getattr(diffusers, family.pipeline).lora_state_dict
    try:
        weights, *more = reader(
            family.renamed(stored), return_alphas=True, return_lora_metadata=True
        )
    except Exception as error:  # converters raise whatever a surprise raises
        raise ValueError(f"{refusal} ({shown(str(error), 200)})") from error
    for name, alpha in (more[0] or {}).items():  # FluxPipeline hands some on
        down = f"{name.removesuffix('alpha')}lora_A.weight"
        weights[down] = weights[down] * (float(alpha) / len(weights[down]))
    # it leaves some names as they are, and drops others
    if weights.keys() == stored.keys() or _outputs(weights) != _outputs(stored):
        raise ValueError(refusal)
    return {name: value.clone() for name, value in weights.items()}  # of fused layers, one A


def _outputs(weights: Mapping[str, Tensor]) -> int:
    """Rows of all B: a fused layer is split, and none is lost."""
    return sum(len(value) for name, value in weights.items() if re.search(r"\.lora_(B|up)", name))
