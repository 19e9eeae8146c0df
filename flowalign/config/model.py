"""The base model and its adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from flowalign.config.section import MARKS, Many, Pixels, Place, Positive, Section, Size

Side = Annotated[
    Annotated[Pixels, Tag(MARKS[2])]
    | Annotated[list[Pixels], Field(min_length=1, max_length=64), Tag(MARKS[3])],
    Discriminator(lambda value: MARKS[2 + isinstance(value, list)]),
]


def sizes_of(height: int | Sequence[int], width: int | Sequence[int]) -> list[Size]:
    """(height, width) of each bucket, of numbers or lists of them; one number stands for all."""
    count = max((len(side) for side in (height, width) if not isinstance(side, int)), default=1)
    heights, widths = ([s] * count if isinstance(s, int) else s for s in (height, width))
    return list(zip(heights, widths, strict=False))  # of unequal lengths: refused elsewhere


class ModelConfig(Section):
    """The base model."""

    id: Place = Field(examples=["tiny", "stabilityai/stable-diffusion-3.5-medium"])
    """`tiny` (ships with the package), a folder, or a Hub id."""
    revision: str | None = Field(default=None, examples=["main"])
    """Branch, tag or commit on the Hub."""
    family: str | None = Field(default=None, examples=["my_family"])
    """The model family, where model_index.json names a pipeline class of your own; null = the
    family of that class."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the transformer and its adapters, stored and computed. The adapter that is trained
    keeps its weights in float32. float16 scales the loss."""
    vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the VAE (0.3 GB in float32). 16 bits cause visible artifacts."""
    quantization: Literal["nf4", "fp8"] | None = None
    """The frozen transformer is stored in fewer bits and computes in dtype. nf4: 4 bits; needs
    bitsandbytes and a GPU. fp8: 8 bits; use gradient_checkpointing with it."""
    height: Side = Field(default=512, examples=[512, [512, 768]])
    """Pixels, a multiple of 16. A list: several sizes, the buckets. All images of a rollout have
    one of them, and they take turns."""
    width: Side = Field(default=512, examples=[512, [768, 512]])
    """Pixels, a multiple of 16, or a list as long as that of height. One number stands for all."""
    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = 128
    """Tokens of a prompt, at most (of the T5 encoder where there are several)."""
    text_cache: Place | None = Field(default=None, examples=["outputs/text_cache"])
    """Folder that keeps encoded prompts for later runs with the same encoders; null = keep none.
    Stable Diffusion 3.5 needs 1.7 MB a prompt in 16 bits."""
    offload_text_encoders: bool = False
    """Keep the text encoders on the CPU, and move them to the GPU only to encode. Saves 11 GB with
    Stable Diffusion 3.5 in 16 bits."""
    decode_batch: Many | None = Field(default=None, examples=[4])
    """Images per forward pass of the VAE; null = all that were sampled at once."""
    attention: str | None = Field(default=None, examples=["native", "xformers", "flash"])
    """A diffusers attention backend; null = its default (SDPA)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    compile: bool = False
    """torch.compile the blocks of the transformer."""

    @property
    def sizes(self) -> list[Size]:
        """(height, width) of each bucket."""
        return sizes_of(self.height, self.width)

    @property
    def listed_sizes(self) -> str:
        """As text, such as 512x512, 512x768: height first."""
        return ", ".join(f"{height}x{width}" for height, width in self.sizes)

    def bucket(self, size: Size | None) -> int:
        """The number of one of its sizes; None = the first."""
        return self.sizes.index(size) if size else 0

    def size_problems(self, wanted: Mapping[str, Size | None]) -> Iterator[str]:
        """Sizes that the model does not have. wanted: {place in the config: size}."""
        for place, size in wanted.items():
            if size and size not in self.sizes:
                listed = ", ".join(f"[{height}, {width}]" for height, width in self.sizes)
                yield (
                    f"{place}.size: [{size[0]}, {size[1]}] is none of the model's sizes, "
                    f"{listed}. Use one of them, or add it to model.height and model.width."
                )

    def problems(self) -> Iterator[str]:
        """Sizes that are no pairs, or come twice."""
        lists = [side for side in (self.height, self.width) if not isinstance(side, int)]
        if len({len(side) for side in lists}) > 1:
            yield (
                f"height: {len(lists[0])} sizes, but width has {len(lists[1])}. Give lists of the "
                "same length, or one number for all."
            )
        elif len(set(self.sizes)) < len(self.sizes):
            yield f"height: with width {self.width} two sizes are the same. List each once."


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
    init: Place | None = Field(default=None, examples=["runs/teacher_ocr/adapter"])
    """Adapter folder to start from; null = a fresh adapter (B = 0). It brings its own rank, scale
    and layers: rank, alpha and targets are ignored, with a warning if they were set."""
