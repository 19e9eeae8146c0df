"""Scoring in the background: images are judged while the next ones are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from flowalign.rewards.guarded import Guarded, failed, join
from flowalign.rewards.worker import Worker
from flowalign.types import PromptBatch

Score = Callable[[Tensor, PromptBatch], Guarded]


@dataclass
class _Job:
    score: Score
    images: Tensor
    batch: PromptBatch
    answer: Future[Guarded]


class Ahead:
    """Asks `score` about batches of images, in order, in one thread beside the caller's.

    The answers are those of asking at once, as far as a reward judges each image by itself. A batch
    may bring a `score` of its own: several judges take turns, as loading and running models is not
    thread safe, and no more of them than one fill the memory at a time.
    seconds: a batch that takes longer is given up and its images are masked (None = wait for
    ever); the thread that hangs is left behind, as Python cannot end it, and a new one takes over.
    """

    def __init__(self, score: Score | None = None, seconds: float | None = None) -> None:
        self.score, self.seconds = score, seconds
        self._jobs: list[_Job] = []
        self._worker: Worker | None = None

    @property
    def waiting(self) -> int:
        """How many images were submitted and not collected."""
        return sum(len(job.images) for job in self._jobs)

    def submit(self, images: Tensor, batch: PromptBatch, score: Score | None = None) -> None:
        """Start to score images [B,3,H,W] and their B rows; returns at once.

        score: who is asked; by default the one that all batches have.
        """
        score = score or self.score
        assert score, "give a score here, or to all batches"
        self._worker = self._worker or Worker()
        answer = self._worker.submit(partial(score, images, batch))
        self._jobs.append(_Job(score, images, batch, answer))

    def collect(self) -> Guarded:
        """The scores of everything submitted since the last call, in order: `answers`, joined."""
        return join(list(self.answers()))

    def answers(self) -> Iterator[Guarded]:
        """The scores of each batch submitted since the last call, in order, as they come.

        Whatever `score` raises, KeyboardInterrupt included, is raised here.
        """
        while self._jobs:
            job = self._jobs.pop(0)
            try:
                answer = job.answer.result(self.seconds)
            except FutureTimeout:
                if job.answer.done():  # in the last moment, or `score` itself timed out
                    answer = job.answer.result()
                else:
                    reason = f"TimeoutError: no answer within {self.seconds:g} s"
                    answer = failed(len(job.images), reason)
                    left, _ = self._jobs, self.forget()
                    for each in left:
                        self.submit(each.images, each.batch, each.score)
            yield answer

    def forget(self) -> None:
        """Drop what was submitted and not collected; a batch that is being scored runs to its end
        unseen."""
        for job in self._jobs:
            job.answer.cancel()
        self._jobs = []
        if self._worker is not None:
            self._worker.close()
        self._worker = None
