"""The alarm of an evaluation: drift of the report's images from the base's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flowalign.backbone import Backbone
from flowalign.config import EvalStage
from flowalign.eval.suite import ImageSet, Judged
from flowalign.training.report.alarm import Alarm, drifted
from flowalign.training.report.drift.monitor import ImageStatistics, compare, shown, worst
from flowalign.training.report.drift.panel import Panel, panel
from flowalign.training.report.pictures import pixels_of


@dataclass
class DriftReport:
    """The drift of every model but the base on every image set, as far as pictures were kept.

    panels: for the report. warnings: a sentence for each statistic beyond alarm.warn. too_far: what
    lies beyond alarm.stop.
    """

    panels: list[Panel] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    too_far: list[str] = field(default_factory=list)


def drift_report(
    config: EvalStage,
    backbone: Backbone,
    sets: Sequence[ImageSet],
    judged: Mapping[str, Mapping[str, Judged]],
) -> DriftReport:
    """Empty without `alarm`, and without the base model among the models."""
    report, settings = DriftReport(), config.alarm
    base = next((name for name, adapter in config.models.items() if adapter is None), None)
    if settings is None or base is None:
        return report
    for images in sets:
        if not images.judges or not judged[base][images.judges[0].name].pictures:
            continue
        measurements = _measurements(backbone, images)
        first, copies = images.judges[0].name, images.copies
        pictured = judged[base][first].shown(copies)  # the same for all models
        prompts = [prompt for prompt in pictured for _ in range(copies)]
        batch = images.prompts.select(prompts)
        pixels, values = {}, {}
        for model in config.models:
            pixels[model] = torch.stack([pixels_of(png) for png in judged[model][first].pictures])
            values[model] = measurements.measure(pixels[model], batch, prompts)
        for model in (name for name in config.models if name != base):
            drifts = compare(values[base], values[model], prompts, [images.name] * len(prompts))
            rows = [
                shown(batch, row, sigmas, pixels[base][row], pixels[model][row])
                | {"task": images.name}
                for row, sigmas in worst(values[base], values[model], prompts)
            ]
            title = f"{model} on {images.name}"
            report.panels.append(panel(title, drifts, rows, settings.warn))
            report.warnings += Alarm().drift(drifts, settings.warn, title)
            far = [drift for drift in drifts if drift.beyond(settings.stop)]
            report.too_far += [f"{title}: {drifted(drift)}" for drift in far]
    return report


def _measurements(backbone: Backbone, images: ImageSet) -> ImageStatistics:
    """Of all judges of these images together."""
    judges = ImageStatistics.of(backbone, {judge.name: judge.reward for judge in images.judges})
    clips = list(judges.features.values())
    text = frozenset([images.name] if judges.text else ())
    return ImageStatistics(judges.period, text, {images.name: clips[0]} if clips else {})
