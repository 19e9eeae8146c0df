"""The base model and its adapter."""

from __future__ import annotations

from os.path import isdir
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from flowalign.config.section import Location, Many, Pixels, Positive, Section, Size


def check_pipeline(model: str) -> str:
    """ValueError for the name of one file, such as a checkpoint or a LoRA."""
    if model.endswith((".safetensors", ".ckpt", ".gguf", ".bin", ".pt")) and not isdir(model):
        raise ValueError(
            f"{model!r} is a file, and a pipeline is a folder. diffusers makes one of a "
            "checkpoint: `from_single_file`, then `save_pretrained`. Of a LoRA, give the base here "
            "and the file as an adapter (--lora, lora.init, teachers.NAME.adapter)."
        )
    return model


# a folder of a pipeline, or a Hub id
Pipeline = Annotated[Location, AfterValidator(check_pipeline)]


class ModelConfig(Section):
    """The base model."""

    id: Pipeline = Field(examples=["tiny", "stabilityai/stable-diffusion-3.5-medium"])
    """`tiny` (ships with the package), a folder, or a Hub id."""
    revision: str | None = Field(default=None, examples=["main"])
    """Branch, tag or commit on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the transformer and its adapters, stored and computed. The adapter that is trained
    keeps its weights in float32. float16 scales the loss."""
    quantization: Literal["nf4", "fp8"] | None = None
    """The frozen transformer is stored in fewer bits and computes in dtype. nf4: 4 bits; needs
    bitsandbytes and a GPU. fp8: 8 bits; use gradient_checkpointing with it."""
    height: Pixels = 512
    """Pixels, a multiple of 16. All images of a run have one size."""
    width: Pixels = 512
    """Pixels, a multiple of 16."""
    max_sequence_length: Many | None = Field(default=None, examples=[512])
    """Tokens of a prompt, at most (of the T5 encoder where there are several), with those of a
    chat template around it; null = as many as models of the family are used with."""
    text_cache: Location | None = Field(default=None, examples=["outputs/text_cache"])
    """Folder that keeps encoded prompts for later runs with the same encoders; null = keep none.
    Stable Diffusion 3.5 needs 1.7 MB a prompt in 16 bits."""
    offload_text_encoders: bool = False
    """Keep the text encoders on the CPU, and move them to the GPU only to encode. Saves 11 GB with
    Stable Diffusion 3.5 in 16 bits."""
    decode_batch: Many = 4
    """Images per forward pass of the VAE."""
    attention: str | None = Field(default=None, examples=["native", "xformers", "flash"])
    """A diffusers attention backend, for models whose layers have a choice; null = its default
    (SDPA). In 16 bits on a GPU a family may take another (`Family.gpu_attention`)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile the blocks of the transformer. auto: on a GPU, for 500 images or more, and not
    with quantized weights. A block that does not compile runs eagerly, with a warning."""

    @property
    def size(self) -> Size:
        """(height, width) of its images."""
        return self.height, self.width


class LoraConfig(Section):
    """The adapter that is trained."""

    rank: Annotated[int, Field(ge=1, le=8192)] = 32
    """Rank r of the update (alpha / r) B A."""
    alpha: Positive = 64.0
    """Scale of the update, divided by the rank."""
    targets: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = Field(
        default=None, examples=[["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]]
    )
    """Layers that are adapted, by the end of their names; null = the attention layers of the
    model's family."""
    init: Location | None = Field(default=None, examples=["runs/teacher_ocr/adapter"])
    """Adapter folder to start from; null = a fresh adapter (B = 0). It brings its own rank, scale
    and layers: rank, alpha and targets are ignored. The learning rate acts on its factors, not on
    its update: from singular vectors (merge.method svd) a run may learn several times as slowly."""
