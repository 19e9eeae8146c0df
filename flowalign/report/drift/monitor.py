"""The base beside a run: its images for the same prompts and noise, and how far they are apart.

Every `alarm.every` updates the base samples some images of the rollout once more. Every process
decides the same. With `alarm.reference: start` the base has the LoRA that the run starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from accelerate.utils import gather_object

from flowalign.backbone import Backbone
from flowalign.backbone.adapters import Lora
from flowalign.config import TrainingStage
from flowalign.report import samples
from flowalign.report.alarm import Alarm
from flowalign.report.drift.compare import Check, Pair, check_drift
from flowalign.report.pictures import png
from flowalign.training import metrics
from flowalign.training.data import spread
from flowalign.training.events import Listener, Stop, warn
from flowalign.training.rollout import Noise, sample
from flowalign.types import Rollout, Source

COPIES = 2  # images per prompt, for their distance; more prompts are better than more copies
ALARM_START = "alarm_start"  # the frozen adapter that the run starts from
SHARE = 4  # the base samples at most 1 / SHARE of a rollout's images


def checked(config: TrainingStage) -> tuple[int, int]:
    """(prompts, images per prompt) that the base samples for a check of a rollout."""
    assert config.alarm
    rollout = config.rollout
    copies = min(COPIES, rollout.group_size)
    limit = min(config.alarm.images, rollout.images // SHARE)
    return min(rollout.prompts, max(1, limit // copies)), copies


class Monitor(Listener):
    """Checks the drift of a run's rollouts; `alarm` turns checks into warnings. start: the adapter
    that the run starts from, if it is the reference."""

    def __init__(
        self, config: TrainingStage, backbone: Backbone, alarm: Alarm, start: Lora | None = None
    ) -> None:
        assert config.alarm
        self.reference = None if start is None else ALARM_START
        if start is not None:
            backbone.load_adapter(ALARM_START, start, frozen=True)
        self.settings = config.alarm
        self.config = config
        self.backbone = backbone
        self.alarm = alarm

    def rollout(self, update: int, rollout: Rollout) -> Mapping[str, float]:
        """The drift of a rollout, if a check is due. Raises Stop, on all processes, if a statistic
        is beyond alarm.stop."""
        if not self.due(rollout, update):
            return {}
        limits = self.settings
        check = self.check(rollout, update)
        warn(
            update,
            self.alarm.drift_warnings(check.drifts, limits.warn, "the rollout", limits.reference),
        )
        if self.main:
            samples.write_json(Path(self.config.output), samples.DRIFT, update, asdict(check))
        if worst := [drift for drift in check.drifts if drift.beyond(limits.stop)]:
            raise Stop(
                f"the images drift from the {limits.reference}, beyond alarm.stop = "
                f"{limits.stop:g}: {'; '.join(map(str, worst))}. "
                f"Look at {self.config.folder.page}. "
                "If this is reward hacking, fix the reward and start a new run; "
                "if it is what you train for, raise alarm.stop and run again with --resume."
            )
        beyond = sum(drift.beyond(limits.warn) for drift in check.drifts)
        figures = {metrics.IMAGE_DRIFT + drift.name: drift.sigmas for drift in check.drifts}
        return {**figures, metrics.DRIFT_ALARMS: beyond}

    def due(self, rollout: Rollout, update: int) -> bool:
        """Whether this rollout is to be checked: it has images of the student or its old policy
        (not of teachers, as in sft), and training has begun."""
        by_student = rollout.sources is None or self.config.learns_from_rewards
        on_time = update > 0 and update % self.settings.every == 0
        return rollout.images is not None and by_student and on_time

    def check(self, rollout: Rollout, update: int) -> Check:
        """Compare a rollout with the base's images for the same prompts and noise: the first COPIES
        images of some prompts, evenly spaced over the batch of all processes. Each process samples
        its share, and all return the same check. Pairs with an image that is not finite are left
        out."""
        assert rollout.images is not None
        settings = self.config.rollout
        prompts, copies = checked(self.config)
        chosen = set(spread(settings.prompts, prompts))
        places = list(zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True))
        rows = [i for i, (group, copy) in enumerate(places) if group in chosen and copy < copies]
        padded = rows or [0]  # a process without rows samples one with the others and drops it
        base = sample(
            self.backbone,
            rollout.batch.select(padded),
            rollout.schedule,
            guidance=settings.guidance,
            noise=Noise((self.config.seed, update), settings.shared_noise),
            places=[places[row] for row in padded],
            batch_size=settings.batch_size,
            sources=[Source(self.reference, settings.guidance)] * len(padded),
        ).images
        assert base is not None
        batch = rollout.batch
        family = self.backbone.family
        pairs = [
            Pair(png(before), png(after), batch.tasks[row], places[row][0], batch.prompts[row])
            # not strict: without the dropped image
            for before, after, row in zip(base, rollout.images[rows], rows, strict=False)
            if before.isfinite().all() and after.isfinite().all()
        ]
        return check_drift(gather_object(pairs), family.factor * family.patch)
