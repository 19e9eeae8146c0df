"""SANA: linear attention, an autoencoder of factor 32."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
from torch import Tensor

from flowalign.backbone.family import Family, Text, by_prompt
from flowalign.types import Problem

FLOAT16 = re.compile(r"sana_\d+m_(?!.*bf16).*")  # names of checkpoints that were made for it


class Sana(Family):
    """Prompts are padded to one length and have a mask. A prompt follows an instruction to enhance
    it, and the negative one does not, as in diffusers.

    The published models come with a DPM-Solver. Rollouts take Euler steps of the same flow, between
    the same noise levels.
    """

    name = "sana"
    pipeline = "SanaPipeline"
    targets = [
        "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
        "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
    ]  # fmt: skip
    negative = "\0"  # no prompt is this text: it stands for the empty one without instruction
    longest = 300
    patch = 1

    @property
    def flow_shift(self) -> float | None:
        """The shift of the pipeline's DPM-Solver; None = it has another scheduler."""
        config = self.pipe.scheduler.config
        return config.get("flow_shift") if config.get("use_flow_sigmas") else None

    @property
    def even_grid(self) -> bool:
        """Whether the pipeline has a DPM-Solver, whose grid is even. The Euler scheduler's own grid
        applies the shift twice to the smallest sigma: 20 steps with shift 3 would end at .009
        instead of .136, and the last step would do next to nothing."""
        return self.flow_shift is not None

    @property
    def scheduler(self) -> Any:
        """The pipeline's, or one for Euler steps with the shift of its DPM-Solver."""
        if self.flow_shift is None:
            return self.pipe.scheduler
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=self.flow_shift)

    def dtype_problems(self, model: str, dtype: str) -> Iterator[Problem]:
        """A problem with float16, in which Gemma overflows, and with the first checkpoints in
        bfloat16: their authors' cards say "FP16 model cannot run with BF16 precision"."""
        if dtype == "float16":
            yield Problem(
                "model.dtype", "float16, in which the text encoder overflows. Use bfloat16."
            )
        elif dtype == "bfloat16" and FLOAT16.fullmatch(Path(model).name.lower()):
            yield Problem(
                "model.dtype",
                f"bfloat16, and {model} was made for float16. Use the checkpoint "
                "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers, or float32.",
            )

    @property
    def instruction(self) -> list[str]:
        """Lines that stand before a prompt."""
        call = inspect.signature(diffusers.SanaPipeline.__call__).parameters
        return call["complex_human_instruction"].default

    def encoder_tokens(self, length: int) -> list[int]:
        """Tokens of a prompt and the instruction. A word or a mark of the instruction counts as a
        token: memory is predicted without the tokenizer."""
        return [length + len(re.findall(r"\w+|[^\w\s]", "\n".join(self.instruction)))]

    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        return {"embeds": (length, self.core.config.caption_channels), "mask": (length,)}

    def encode(self, prompts: list[str], length: int, device: Any) -> list[Text]:
        """embeds [L,D] and mask [L] of each prompt."""
        empty = prompts == [self.negative]  # which is encoded alone
        embeds, mask, _, _ = self.pipe.encode_prompt(
            [""] if empty else prompts,
            do_classifier_free_guidance=False,
            device=device,
            max_sequence_length=length,
            complex_human_instruction=None if empty else self.instruction,
        )
        return by_prompt(embeds=embeds, mask=mask.bool())

    def inputs(self, x: Tensor, sigma: Tensor, text: Text, guidance: float) -> dict[str, Any]:
        return {
            "hidden_states": x,
            "encoder_hidden_states": text["embeds"].to(x.dtype),
            "encoder_attention_mask": text["mask"].to(x.dtype),
            "timestep": sigma * 1000 * self.core.config.timestep_scale,
        }

    def velocity(self, output: Tensor, x: Tensor) -> Tensor:
        """v [B,C,h,w], without a learned variance that some checkpoints predict beside it."""
        return output[:, : x.shape[1]].float()

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        return vae.decode((latents / vae.config.scaling_factor).to(vae.dtype)).sample

    def encode_image(self, images: Tensor) -> Tensor:
        vae = self.pipe.vae
        return vae.encode(images.to(vae.dtype)).latent.float() * vae.config.scaling_factor
