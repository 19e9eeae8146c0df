"""Learning from pairs of images, of which people, or a reward, chose one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from flowalign.config.rollout import RolloutConfig
from flowalign.config.section import NotNegative, Positive, Section, Steps
from flowalign.config.stages.training import TrainingStage


class DpoConfig(Section):
    """Flow-DPO (2501.13918): Diffusion-DPO (2311.12908) for a flow."""

    beta: Positive = 2000.0
    """How near the model stays to the reference: a large beta is satisfied by a small margin. It
    multiplies means over C, h, w, as in the code of Diffusion-DPO (2000 to 5000). The papers'
    formulas have sums: their beta is this one divided by C h w. The same at all noise levels, which
    Flow-DPO found better than beta (1 - sigma)^2."""
    states: Steps = 4
    """Noise levels at which each pair is trained, its own."""
    noise: Literal["fresh", "known"] = "fresh"
    """fresh: drawn, the same for both images of a pair. known: the noise that each image was
    sampled from (PNAPO, 2605.09433), which `flowalign sample` and `vote` record."""


class PairsConfig(RolloutConfig):
    """The pairs of an update. They are read, so nothing is sampled but for evaluations."""

    kind: Literal["ode"] = "ode"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Unused."""
    guidance: NotNegative = 1.0
    """CFG scale in the loss, and of evaluations that name no other. The loss is that of the model
    without guidance, so leave it at 1."""
    copies: Literal[2] = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    """The chosen and the rejected image."""


class DpoStage(TrainingStage):
    """A teacher from pairs: no reward is asked.

    A row of a task's `prompts`, a .jsonl, has `prompt`, `chosen` and `rejected`: images of the size
    of the model, their paths relative to the file. `flowalign vote` writes it. The reference is
    what the run starts from: the base, or the LoRA of `lora.init`.
    """

    algorithm = "flowalign.teachers.dpo:Dpo"
    own_scale = False
    stage: Literal["dpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from pairs of images."""
    rollout: PairsConfig = PairsConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    dpo: DpoConfig = DpoConfig()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if (size := self.optimizer.micro_batch) % 2:
            yield f"optimizer.micro_batch: {size} would part a pair. Use an even number."
