"""What NFT and AWM share: rollouts by any sampler, scores, and clean images with noise added.

Both learn at noise levels that they draw, not at the states of the rollout. So a rollout needs
no noise, no log-probabilities and no stored trajectory (DiffusionNFT, 2509.16117; AWM, 2509.25050).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import ForwardStage, PolicyConfig, PolicyStage
from flowalign.teachers.scored import Credit, Scored
from flowalign.training import metrics
from flowalign.training.algorithm import STUDENT, Algorithm, Compared, Keeps, P, Pairs, Parts
from flowalign.training.losses import velocity_error
from flowalign.training.noising import noised, of_sampler, stratified
from flowalign.training.rollout import Stream
from flowalign.types import Rollout, Source


@dataclass(frozen=True, kw_only=True)
class Matched(Credit):
    """A rollout whose states are noised images, with the advantages of the images."""

    velocity: Tensor  # [B,S,C,h,w] eps - x0 at the states


class Policy:
    """A frozen adapter that follows the trained one: an average over the rollouts.

    The official code moves it once a rollout, by the number of optimizer steps of the run.
    """

    def __init__(self, backbone: Backbone, name: str, settings: PolicyConfig) -> None:
        self.settings = settings
        backbone.copy_adapter(STUDENT, name)
        self.parameters = backbone.adapter_parameters(name)
        self.student = backbone.adapter_parameters(STUDENT)

    @property
    def is_student(self) -> bool:
        """Whether it has the student's weights now."""
        pairs = zip(self.parameters, self.student, strict=True)
        return not torch.stack([(policy != student).any() for policy, student in pairs]).any()

    @torch.no_grad()
    def follow(self, steps: int) -> None:
        """Move towards the student after a rollout. steps: optimizer steps of the run so far."""
        decay = rising_decay(steps, **self.settings.model_dump())
        for policy, student in zip(self.parameters, self.student, strict=True):
            policy.copy_(decay * policy + (1 - decay) * student)


def rising_decay(steps: int, *, decay: float, rise: float, after: int) -> float:
    """The share of a policy's old weights that is kept after `steps` optimizer steps of a run:
    0 up to step `after`, then `rise` more with each step, up to `decay`."""
    return min(decay, max(0.0, rise * (steps - after)))


class WithPolicies(Algorithm[P]):
    """An algorithm that learns from images without noise. The policies of the config are frozen
    adapters; the one named "old" samples. Without it, the student does."""

    needs_groups = False

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        config = self.config
        self.settings = config.forward
        policies = config.policies.items()
        self.policies = {name: Policy(self.backbone, name, s) for name, s in policies}
        self.old = self.policies.get("old")

    @classmethod
    def keeps(cls, config: PolicyStage, updates: Sequence[int] | None = None) -> Keeps:
        """Images and their latents; states with a target each; the base where its distance is in
        the loss, and the policies."""
        updates = range(config.train.updates) if updates is None else updates
        compared = []
        if config.forward.kl_weight > 0:
            compared.append(Compared(None, 1.0))
        for name, policy in config.policies.items():
            share = differing_share(config, policy, updates) if name == "old" else 1.0
            compared.append(Compared(STUDENT, share))
        return Keeps(
            images=True,
            latents=True,
            targets=["float32"],
            policies=list(config.policies),
            compared=compared,
        )

    @property
    def lags(self) -> bool:
        """Whether the policy that samples differs from the student now."""
        return self.old is not None and not self.old.is_student

    # What the loop asks ------------------------------------------------------------------------

    def sources(self, tasks: list[str]) -> list[Source] | None:
        """The old policy samples, if it is not the student."""
        if not self.lags:
            return None
        return [Source("old", self.config.rollout.guidance)] * len(tasks)

    def learnt(self, steps: int) -> None:
        for policy in self.policies.values():
            policy.follow(steps)

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """The weights of the policies."""
        return {f"policy_{name}": policy.parameters for name, policy in self.policies.items()}

    # What a loss asks --------------------------------------------------------------------------

    def old_velocity(self, pairs: Pairs, velocity: Tensor) -> Tensor:
        """The velocity [b,C,h,w] of the policy that sampled; velocity: the student's, which it is
        without another forward pass where the two have the same weights."""
        return self.velocity_of("old", pairs) if self.lags else velocity.detach()

    def near_base(
        self, policy: Tensor, pairs: Pairs, velocity: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """The policy loss plus kl_weight times the drift |v - v_base|^2, and the drift for the
        log; without a weight `drift` measures it."""
        weight = self.settings.kl_weight
        if not weight:
            return policy, {}
        drift = self._from_base(pairs, velocity)
        return policy + weight * drift, {metrics.VELOCITY_DRIFT: float(drift.detach())}

    def drift(self, pairs: Pairs, prepared: P) -> dict[str, float]:
        """|v - v_base|^2; with a weight the loss has it at all pairs."""
        if self.settings.kl_weight > 0:
            return {}
        return {metrics.VELOCITY_DRIFT: float(self._from_base(pairs, self.velocity(pairs)))}

    def _from_base(self, pairs: Pairs, velocity: Tensor) -> Tensor:
        """The mean of |v - v_base|^2 over b pairs."""
        return velocity_error(velocity, self.velocity_of(None, pairs)).mean()


class Forward(WithPolicies[Matched]):
    """Learning at noise levels that are drawn, without the loss."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.scored = Scored(parts, self.settings)
        self.on_images = self.scored.on_images

    @classmethod
    def keeps(cls, config: ForwardStage, updates: Sequence[int] | None = None) -> Keeps:
        """Images and their latents; noised states with the velocity to match; the base where its
        distance is in the loss, and the policies."""
        kept = super().keeps(config, updates)
        return replace(kept, noise_levels=config.forward.noise_levels)

    def prepare(self, rollout: Rollout, update: int) -> Matched:
        credit = self.scored.credit(rollout, update)
        key = (self.config.seed, update)
        images = zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True)
        sigmas = torch.stack([self._levels((*key, Stream.LEVELS, *i)) for i in images])
        states, target = noised(rollout, sigmas, (*key, Stream.NOISE))
        return Matched(**vars(replace(credit, rollout=states)), velocity=target)

    def _levels(self, key: tuple[int, ...]) -> Tensor:
        """Noise levels [S] that a key draws."""
        settings = self.settings
        steps = self.config.rollout.steps
        if settings.levels != "stratified":
            sigmas = self.backbone.sigmas(steps)
            parts = settings.levels == "sampler"
            return of_sampler(sigmas, settings.noise_levels, key, settings.within, stratified=parts)
        return stratified(self.backbone.shift(steps), settings.noise_levels, key, settings.within)


def differing_share(config: PolicyStage, old: PolicyConfig, updates: Sequence[int]) -> float:
    """The share of the micro-batches at which the policy that sampled is not the student."""
    steps = config.optimizer.updates_per_rollout
    begins = old.after // steps + 1 if old.decay else math.inf  # update in which it lags behind
    lagging = sum(update >= begins for update in updates) / max(1, len(updates))
    return lagging + (1 - lagging) * (steps - 1) / steps  # it is the student in the first step
