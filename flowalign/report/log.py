"""The log of a run: metrics.jsonl, the trackers, and what its evaluations warn of."""

from __future__ import annotations

import json
from collections.abc import Mapping

from accelerate import Accelerator

from flowalign.config import TrainingStage
from flowalign.report import trackers
from flowalign.report.progress import Progress
from flowalign.system import files
from flowalign.system.files import to_json
from flowalign.training import metrics
from flowalign.training.evaluations import Evaluation
from flowalign.training.events import Learned, Listener, warn


class RunLog(Listener):
    """Writes and shows each row of metrics, on the main process."""

    def __init__(self, config: TrainingStage, accelerator: Accelerator, progress: Progress) -> None:
        self.config = config
        self.accelerator = accelerator
        self.progress = progress

    def began(self, update: int) -> None:
        trackers.begin(self.accelerator, self.config)

    def learned(self, update: int, learned: Learned) -> None:
        self._write(update, learned.values)

    def evaluated(self, update: int, evaluation: Evaluation) -> None:
        lost = evaluation.report.lost.values()
        warn(update, [f"the evaluation lost {text}" for text in lost])
        self._write(update, evaluation.values)
        warn(update, evaluation.alarms)
        warn(update, filter(None, [evaluation.stalled]))

    def _write(self, update: int, values: Mapping[str, float]) -> None:
        if self.main:
            row = to_json({metrics.UPDATE: update, **values})
            files.append(self.config.folder.log, json.dumps(row, allow_nan=False) + "\n")
            self.progress.update(update, values)
        self.accelerator.log(dict(values), step=update)
