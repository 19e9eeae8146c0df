"""The alarm of an evaluation: drift of the models' images from the base's, of those that are kept
for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowalign.backbone import Backbone
from flowalign.config import EvalStage
from flowalign.eval.suite import ImageSet, Judged
from flowalign.training.report.alarm import Alarm, drifted
from flowalign.training.report.drift.compare import Drift
from flowalign.training.report.drift.monitor import Lens, compare, shown, worst
from flowalign.training.report.drift.panel import Panel, panel
from flowalign.training.report.pictures import pixels_of


class Checked:
    """The drift of every model but the base on every image set, as far as pictures were kept.

    panels: for the report. warnings: a sentence for each statistic beyond alarm.warn. too_far: what
    lies beyond alarm.stop, "" = nothing. All empty without `alarm`, or without the base model among
    the models.
    """

    def __init__(
        self,
        config: EvalStage,
        backbone: Backbone,
        sets: Sequence[ImageSet],
        judged: Mapping[str, Mapping[str, Judged]],
    ) -> None:
        self.panels: list[Panel] = []
        self.warnings: list[str] = []
        too_far: list[str] = []
        base = next((name for name, adapter in config.models.items() if adapter is None), None)
        settings = config.alarm
        if settings is not None and base is not None:
            for images in sets:
                if not images.judges or not judged[base][images.judges[0].name].pictures:
                    continue
                lens = _lens(backbone, images)
                for model in (name for name in config.models if name != base):
                    drifts, rows = _check(lens, images, judged[base], judged[model])
                    title = f"{model} on {images.name}"
                    self.panels.append(panel(title, drifts, rows, settings.warn))
                    self.warnings += Alarm().drift(drifts, settings.warn, title)
                    far = [drift for drift in drifts if drift.beyond(settings.stop)]
                    too_far += [f"{title}: {drifted(drift)}" for drift in far]
        self.too_far = "; ".join(too_far)


def _lens(backbone: Backbone, images: ImageSet) -> Lens:
    """What to measure, by all that score these images."""
    whole = Lens.of(backbone, {judge.name: judge.reward for judge in images.judges})
    clips = list((whole.features or {}).values())
    text = frozenset([images.name] if whole.text else ())
    return Lens(whole.period, text, {images.name: clips[0]} if clips else {})


def _check(
    lens: Lens, images: ImageSet, base: Mapping[str, Judged], model: Mapping[str, Judged]
) -> tuple[list[Drift], list[dict[str, Any]]]:
    name, copies = images.judges[0].name, images.copies
    kept = base[name].shown(copies)  # the same for all models
    prompts = [place for place in kept for _ in range(copies)]
    batch = images.prompts.select(prompts)
    pixels = [
        torch.stack([pixels_of(picture) for picture in judged[name].pictures])
        for judged in (base, model)
    ]
    old, new = (lens.measure(part, batch, prompts) for part in pixels)
    rows = [
        shown(batch, row, sigmas, pixels[0][row], pixels[1][row]) | {"task": images.name}
        for row, sigmas in worst(old, new, prompts)
    ]
    return compare(old, new, prompts, [images.name] * len(prompts)), rows
