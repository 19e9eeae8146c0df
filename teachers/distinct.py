"""Before a distillation begins: is each teacher's velocity another than the base's?

A teacher that lost its weights labels with the base's velocity, and the loss falls as it should.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import TrainingStage
from flowalign.teachers.bank import Bank
from flowalign.training.algorithm import pairs_of
from flowalign.training.losses import velocity_error
from flowalign.training.rollout import Noise, Stream, clean_schedule, sample
from flowalign.types import Problem, PromptBatch, Rollout, Source

PROMPTS = 2  # of each task
HARDLY = 1e-3  # |v - v_base|^2 over |v_base|^2 below which a teacher changes next to nothing


def base_states(
    config: TrainingStage, backbone: Backbone, prompts: Mapping[str, PromptBatch]
) -> Rollout:
    """States of the base for the first prompts of each task: the noise, and half-way to the
    image. All processes compute the same."""
    parts = [batch.select(range(min(PROMPTS, len(batch)))) for batch in prompts.values()]
    batch = PromptBatch(
        prompts=[prompt for part in parts for prompt in part.prompts],
        tasks=[task for part in parts for task in part.tasks],
        metadata=[row for part in parts for row in part.metadata],
    )
    schedule = clean_schedule(backbone, config.rollout.steps)
    steps = tuple(sorted({0, config.rollout.steps // 2}))
    guidance = config.rollout.guidance
    return sample(
        backbone,
        batch,
        replace(schedule, window=(0, config.rollout.steps), chosen=steps, actions=False),
        guidance=guidance,
        noise=Noise((config.seed, 0, Stream.FIXED)),
        places=[(row, 0) for row in range(len(batch))],
        batch_size=config.rollout.batch_size,
        decode=False,
        finish=False,
        sources=[Source(None, guidance)] * len(batch),
    )


@torch.no_grad()
def indistinct(bank: Bank, states: Rollout, size: int) -> Iterator[Problem]:
    """A "refuse" for each teacher whose velocity equals the base's or another teacher's, and a
    "note" for each that is HARDLY another than the base's, at the same states and CFG scale.

    Left out are a teacher that is the base by its config, and two that are one adapter by it.
    size: rows of a forward pass.
    """

    def velocity(source: Source) -> Tensor:
        every = torch.ones(len(states), dtype=torch.bool)
        with bank.backbone.adapter(source.adapter), bank.backbone.uncounted():
            parts = [
                pairs.velocity(bank.backbone, source.guidance)
                for pairs in pairs_of(states, every, size)
            ]
        return torch.cat(parts)

    sources = {name: bank.source(name) for name in bank.members}
    trained = {name: source for name, source in sources.items() if source.adapter is not None}
    velocities = {name: velocity(source) for name, source in trained.items()}
    bases = {s.guidance: velocity(Source(None, s.guidance)) for s in trained.values()}
    for name, source in trained.items():
        base = bases[source.guidance]
        if torch.equal(velocities[name], base):
            text = "its velocity equals the base's at all states that were tried: it does nothing"
            yield Problem(f"teachers.{name}", f"{text}. Were its weights trained and saved?")
            continue
        share = float(velocity_error(velocities[name], base).mean() / base.square().mean())
        if share < HARDLY:
            text = f"its velocity differs from the base's by {share:.1g} of its square"
            text += f", less than {HARDLY:g}: there is hardly anything to learn from it"
            yield Problem(f"teachers.{name}", text, "note")
    for one, two in combinations(trained, 2):
        same = bank.members[one].adapter is bank.members[two].adapter
        if not same and torch.equal(velocities[one], velocities[two]):
            text = f"its velocity equals that of {one!r} at all states that were tried"
            text += ". Name another adapter, or one teacher for both."
            yield Problem(f"teachers.{two}", text)
