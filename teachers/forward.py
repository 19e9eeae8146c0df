"""What NFT and AWM share: rollouts by any sampler, scores, and clean images with noise added.

Both learn at noise levels of their own choice, not at the states of the rollout. So a rollout needs
no noise, no log-probabilities and no stored trajectory (DiffusionNFT, 2509.16117; AWM, 2509.25050).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import ForwardStage, PolicyConfig
from flowalign.teachers.scored import Credit, Scored
from flowalign.training import metrics
from flowalign.training.algorithm import STUDENT, Pairs
from flowalign.training.averages import rising_decay
from flowalign.training.losses import velocity_error
from flowalign.training.noising import noised, of_sampler, stratified
from flowalign.training.rollout import Schedule
from flowalign.types import Reward, Rollout, Source

FORWARD, LEVELS = 4, 5  # beside (seed, update) in a seed: these draws are not the rollout's


@dataclass(frozen=True, kw_only=True)
class Matched(Credit):
    """A rollout whose states are noised images, with the advantages of the images."""

    velocity: Tensor  # [B,S,C,h,w] eps - x0 at the states


class Policy:
    """A frozen adapter that follows the trained one: an average over the rollouts.

    The official code moves it once a rollout, by the number of optimizer steps of the run.
    """

    def __init__(self, backbone: Backbone, name: str, settings: PolicyConfig) -> None:
        self.backbone, self.name, self.settings = backbone, name, settings
        backbone.copy_adapter(STUDENT, name)
        self.parameters = backbone.adapter_parameters(name)
        self.student = backbone.adapter_parameters(STUDENT)

    @property
    def is_student(self) -> bool:
        """Whether its weights are those of the student now."""
        pairs = zip(self.parameters, self.student, strict=True)
        return not torch.stack([(own != new).any() for own, new in pairs]).any()

    @torch.no_grad()
    def follow(self, steps: int) -> None:
        """After the optimizer steps of a rollout; steps: those of the run so far."""
        kept = rising_decay(steps, **self.settings.model_dump())
        for own, new in zip(self.parameters, self.student, strict=True):
            own.copy_(kept * own + (1 - kept) * new)

    @torch.no_grad()
    def velocity(self, pairs: Pairs, guidance: float) -> Tensor:
        """Its velocity [b,C,h,w] at the pairs."""
        with self.backbone.adapter(self.name):
            return self.backbone.velocity(
                pairs.x, pairs.sigma, pairs.conditioning, guidance=guidance, rows=pairs.size
            )


class Forward:
    """The algorithm without its loss. rewards: by task name. The policies of the config are frozen
    adapters; the one named "old" samples. Without it, the student does."""

    needs_images = needs_latents = True

    def __init__(
        self,
        config: ForwardStage,
        backbone: Backbone,
        accelerator: Accelerator,
        rewards: Mapping[str, Reward],
    ) -> None:
        self.config, self.backbone, self.guidance = config, backbone, config.guidance
        self.scored = Scored(config, config.forward, accelerator, rewards)
        self.on_images = self.scored.on_images
        self.policies = {name: Policy(backbone, name, s) for name, s in config.policies.items()}
        self.old = self.policies.get("old")

    # What the loop asks ------------------------------------------------------------------------

    def plan(self, update: int, bucket: int = 0) -> Schedule:
        """To the end, without noise; no state on the way is kept."""
        rollout = self.config.rollout
        return Schedule.clean(self.backbone, rollout.steps, bucket, rollout.solver)

    def sources(self, tasks: list[str]) -> list[Source] | None:
        """The old policy samples, if it is not the student."""
        if self.old is None or self.old.is_student:
            return None
        return [Source(self.old.name, self.config.rollout.guidance)] * len(tasks)

    def prepare(self, rollout: Rollout, update: int) -> Matched:
        """Score the images, and noise their latents."""
        credit = self.scored.credit(rollout, update)
        key, bucket = (self.config.seed, update), rollout.batch.bucket
        if self.config.forward.own_levels:
            places = zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True)
            sigmas = torch.stack([self._levels((*key, LEVELS, *p), bucket) for p in places])
        else:
            sigmas = self._levels((*key, LEVELS), bucket)
        states = noised(rollout, sigmas, (*key, FORWARD))
        return Matched(
            rollout=states.rollout,
            keep=credit.keep,
            metrics=credit.metrics,
            notes=credit.notes,
            advantage=credit.advantage,
            velocity=states.velocity,
        )

    def _levels(self, key: tuple[int, ...], bucket: int) -> Tensor:
        """Noise levels [S] that a key draws for images of a bucket."""
        settings, steps = self.config.forward, self.config.rollout.steps
        if settings.levels == "sampler":
            sigmas = self.backbone.sigmas(steps, bucket)
            return of_sampler(sigmas, settings.states, key, settings.within)
        shift = self.backbone.shift(steps, bucket)
        return stratified(shift, settings.states, key, settings.within)

    def learnt(self, steps: int) -> None:
        """The policies follow the student."""
        for policy in self.policies.values():
            policy.follow(steps)

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """The weights of the policies, and what the advantages remember."""
        own = {f"policy_{name}": policy.parameters for name, policy in self.policies.items()}
        return {**own, **self.scored.tensors()}

    # What a loss asks --------------------------------------------------------------------------

    def old_velocity(self, pairs: Pairs, velocity: Tensor) -> Tensor:
        """That of the policy that sampled [b,C,h,w], from the student's; a forward pass only where
        they differ."""
        if self.old is None or self.old.is_student:
            return velocity.detach()
        return self.old.velocity(pairs, self.guidance)

    def near_base(
        self, policy: Tensor, pairs: Pairs, velocity: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """The policy loss plus kl_weight times the drift from the base, and the drift for the
        log."""
        drift = self.drift(pairs, velocity)
        if drift is None:
            return policy, {}
        weight, measured = self.config.forward.kl_weight, float(drift.detach().mean())
        total = policy + weight * drift.mean() if weight > 0 else policy
        return total, {metrics.VELOCITY_DRIFT: measured}

    def drift(self, pairs: Pairs, velocity: Tensor) -> Tensor | None:
        """|v - v_base|^2 [b]. Without a weight only of an update's first micro-batch, for the log:
        else None, at no cost."""
        if not (self.config.forward.kl_weight > 0 or pairs.first):
            return None
        x, sigma, cond = pairs.x, pairs.sigma, pairs.conditioning
        with torch.no_grad(), self.backbone.base():
            base = self.backbone.velocity(x, sigma, cond, guidance=self.guidance, rows=pairs.size)
        return velocity_error(velocity, base)


def keeping(prepared: Matched, everything: bool, advantage: Tensor) -> Matched:
    """The rollout with these advantages [B]: kept are the images whose is not 0, or all."""
    keep = (advantage.cpu() != 0) | everything
    return replace(prepared, advantage=advantage, keep=keep)
