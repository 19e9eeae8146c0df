"""The judges that a run does not learn from: what became of their numbers, and of the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowalign.config import TrainingStage
from flowalign.report import samples
from flowalign.report.alarm import worst
from flowalign.report.pictures import webp
from flowalign.system.images import pixels_of
from flowalign.training.evaluations import Change, Evaluation
from flowalign.training.events import Listener

SHOWN = 6  # prompts of a judge whose number fell

Pictures = Mapping[str, Mapping[str, str]]  # {image set: {prompt: WebP in base64}}


class WatchedJudges(Listener):
    """Writes samples/watched_*.json: the change of each judge since the start, and start and now of
    the prompts that fell most. The first file has the images of the start."""

    def __init__(self, config: TrainingStage) -> None:
        self.folder = Path(config.output)

    def evaluated(self, update: int, evaluation: Evaluation) -> None:
        if not (self.main and evaluation.counts and evaluation.changes):
            return
        oldest = samples.read_json(self.folder, samples.WATCHED, oldest=True)
        content: dict[str, Any] = {}
        if oldest is None or oldest[0] == update:
            start = content["start"] = small(evaluation.report.pictures)
        else:
            start = oldest[1].get("start", {})  # absent where the first file cannot be read
        content["judges"] = [*self._judges(evaluation, start)]
        samples.write_json(self.folder, samples.WATCHED, update, content)

    def _judges(self, evaluation: Evaluation, start: Pictures) -> Iterator[dict[str, Any]]:
        for judge, change in evaluation.changes.items():
            yield {
                "judge": judge,
                "start": change.start,
                "now": change.now,
                "stderr": change.stderr,
                "fell": change.fell,
                "rows": rows(evaluation, change, start) if change.fell else [],
            }


def rows(evaluation: Evaluation, change: Change, start: Pictures) -> list[dict[str, str]]:
    """The prompts that fell most: prompt, image of the start, image now."""
    now = evaluation.report.pictures[change.images]
    before = start.get(change.images, {})
    return [
        {"prompt": prompt, "start": before[prompt], "now": webp(pixels_of(now[prompt]))}
        for prompt in worst(change, SHOWN)
        if prompt in before
    ]


def small(pictures: Mapping[str, Mapping[str, bytes]]) -> Pictures:
    return {
        name: {prompt: webp(pixels_of(file)) for prompt, file in by_prompt.items()}
        for name, by_prompt in pictures.items()
    }
