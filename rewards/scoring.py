"""Every call of a reward: `score` guards one, `TaskRewards` routes a batch, `AsyncScorer`
scores in a thread.

An image that a reward failed on is invalid, never scored 0.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from flowalign.rewards.base import RewardBase, Wrapped
from flowalign.system.devices import SideStream
from flowalign.system.images import stacked, warn_once
from flowalign.system.signals import Interrupted
from flowalign.types import Metadata, PromptBatch, Reward, Scores

log = logging.getLogger(__name__)

Score = Callable[[Tensor, PromptBatch], Scores]
# while a reward is called: why the rewards failed that it calls by `score`
NESTED: ContextVar[list[str] | None] = ContextVar("nested", default=None)
SHRUNK = 0.5  # of an image's sides: a reward that sees less says so
OUTSIDE = (ConnectionError, TimeoutError, ImportError)  # no image's fault: the next would fail too


# One call ---------------------------------------------------------------------------------------


def score(
    reward: Reward,
    images: Tensor | Sequence[Tensor | Image],
    prompts: Sequence[str],
    metadata: Metadata | None = None,
) -> Scores:
    """Call a reward on images [B,3,H,W]; the images it failed on are invalid. Returns on the CPU.
    A list of PIL images or tensors [3,H,W] will do; metadata: None = the prompts have none.

    An image with pixels that are NaN or infinite is not shown to the reward: it is invalid.
    A reward whose attribute `groupwise` is true is called with the images of one prompt at a time,
    in their order; any other with all at once. A pointwise reward that raises is called again once,
    image by image, so that one bad image does not cost the batch. A failure that is not an image's
    (ConnectionError, TimeoutError, ImportError) ends the call: the reward is not called again.
    An answer that is no Scores, or has a wrong length, makes all its images invalid; NaN and
    infinity make their image invalid. Each distinct reason is logged once a call.
    A reward that calls sys.exit has failed on its images, too: it must not end the run.
    Raises ValueError if the inputs differ in length; Interrupted passes, and KeyboardInterrupt in
    the main thread, which alone is interrupted.
    """
    if not isinstance(reward, RewardBase):
        reward = Wrapped(reward)
    images = stacked(images)
    count = len(images)
    metadata = [{}] * count if metadata is None else metadata
    if not count == len(prompts) == len(metadata):
        raise ValueError(
            f"got {count} images, {len(prompts)} prompts and {len(metadata)} metadata; "
            "they must be one row an image."
        )

    finite = torch.isfinite(images).flatten(1).all(1) if count else torch.ones(0, dtype=torch.bool)
    broken = (~finite).nonzero().flatten().tolist()
    groups: dict[Any, list[int]] = {}
    for row in finite.nonzero().flatten().tolist():
        groups.setdefault(prompts[row] if reward.groupwise else None, []).append(row)

    pieces = [(broken, failed(len(broken), "the image has pixels that are NaN or infinite"))]
    left = list(groups.values())
    while left:
        rows = left.pop(0)
        some = images if len(rows) == count else images[rows]  # indexing copies
        inputs = [prompts[row] for row in rows], [metadata[row] for row in rows]
        try:
            pieces.append((rows, _checked(reward, some, *inputs)))
        except OUTSIDE as error:
            pieces += [(rows, failed(len(rows), error)) for rows in (rows, *left)]
            break
        except Exception as error:
            if reward.groupwise or len(rows) == 1:
                pieces.append((rows, failed(len(rows), error)))
            else:  # there is no other group
                left = [[row] for row in rows]
    result = assemble(count, pieces)

    if (nested := NESTED.get()) is not None:
        nested += [f"{reward.name}: {text}" for text in dict.fromkeys(result.failures.values())]
    line = "reward %s failed on %d of %d images (rows %s), which are invalid: %s"
    for reason in dict.fromkeys(result.failures.values()):
        rows = [row for row, text in result.failures.items() if text == reason]
        log.warning(line, reward.name, len(rows), count, rows[:8], reason)
    return result


def _warn_of_shrinking(reward: RewardBase, height: int, width: int) -> None:
    factor = reward.resize_factor(height, width)
    if factor < SHRUNK:
        text = f"reward {reward.name} sees images of {height}x{width} pixels at {factor:.0%} of"
        warn_once(f"{text} that: small text and details are lost.")


@torch.no_grad()
def _checked(
    reward: RewardBase, images: Tensor, prompts: Sequence[str], metadata: Metadata
) -> Scores:
    """One call with its answer checked: float32, on the CPU, NaN where invalid, with a reason."""
    _warn_of_shrinking(reward, *images.shape[-2:])
    nested: list[str] = []
    token = NESTED.set(nested)
    try:
        with settings_kept(reward.name):
            scores: Any = reward(images, prompts, metadata)
    except (SystemExit, KeyboardInterrupt) as error:
        main = threading.current_thread() is threading.main_thread()
        if isinstance(error, Interrupted) or (main and isinstance(error, KeyboardInterrupt)):
            raise
        raise RuntimeError(f"it raised {error!r}, which would have ended the run") from error
    finally:
        NESTED.reset(token)
    count = len(images)
    if not isinstance(scores, Scores):
        kind = type(scores).__name__
        return failed(count, f"returned a {kind} where Scores is due; use Scores.of(values)")
    for name, tensor in {"value": scores.value, "valid": scores.valid, **scores.parts}.items():
        if not isinstance(tensor, Tensor) or list(tensor.shape) != [count]:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            return failed(count, f"{name} has shape {shape}, but there are {count} images")
    value = scores.value.detach().to("cpu", torch.float32)
    valid = scores.valid.detach().cpu().bool() & torch.isfinite(value)
    reasons = dict(scores.reasons)
    for row in (~valid).nonzero().flatten().tolist():
        inner = f" ({nested[0]})" if nested else ""
        reasons[row] = reasons.get(row) or f"returned {float(value[row])}{inner}"
    parts = {name: part.detach().to("cpu", torch.float32) for name, part in scores.parts.items()}
    return Scores(value.masked_fill(~valid, math.nan), valid, parts, reasons)


TORCH_SETTINGS = ("default_dtype", "default_device", "num_threads", "deterministic_debug_mode")
_changers = set[str]()  # rewards that left one of them changed


@contextmanager
def settings_kept(name: str) -> Iterator[None]:
    """Restores torch's global settings after the `with`. name: of the reward inside, for the
    log."""
    before = _settings()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        now = _settings()
        changed = {key: value for key, value in before.items() if now.get(key) != value}
        for key, value in changed.items():  # None restores the default device, the CPU
            getattr(torch, f"set_{key}")(None if value == torch.device("cpu") else value)
        if changed and name not in _changers:
            _changers.add(name)
            text = "reward %s changes torch's %s, which is set back after each call"
            log.warning(text, name, ", ".join(changed))


def _settings() -> dict[str, Any]:
    settings = {key: getattr(torch, f"get_{key}")() for key in TORCH_SETTINGS}
    with suppress(RuntimeError):  # set by torch's other way, `fp32_precision`
        settings["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return settings


# Putting scores together --------------------------------------------------------------------------


def failed(count: int, reason: str | Exception) -> Scores:
    """Scores of images that are all invalid for one reason."""
    text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    value = torch.full((count,), math.nan)
    valid = torch.zeros(count, dtype=torch.bool)
    return Scores(value, valid, {}, dict.fromkeys(range(count), text))


def assemble(count: int, pieces: Iterable[tuple[Sequence[int], Scores]]) -> Scores:
    """Scores of `count` images from pairs (rows, scores of these rows).

    A row without scores is invalid; a part that a row's scores lack is NaN there.
    """
    scores = failed(count, "")
    parts: dict[str, Tensor] = {}
    reasons: dict[int, str] = {}
    for rows, piece in pieces:
        rows = list(rows)
        scores.value[rows], scores.valid[rows] = piece.value, piece.valid
        for name, part in piece.parts.items():
            parts.setdefault(name, torch.full((count,), math.nan))[rows] = part
        reasons |= {rows[i]: text for i, text in piece.reasons.items()}
    return Scores(scores.value, scores.valid, parts, reasons)


class TaskRewards:
    """The rewards of a run by task name: every image is scored by the reward of its own task."""

    def __init__(self, rewards: Mapping[str, RewardBase]) -> None:
        self.rewards = rewards

    @property
    def groupwise(self) -> bool:
        """Whether a reward must see all images of a prompt at once."""
        return any(reward.groupwise for reward in self.rewards.values())

    def __call__(self, images: Tensor, batch: PromptBatch) -> Scores:
        """images [B,3,H,W] and their rows -> Scores of B; parts of other tasks are NaN."""
        pieces = []
        for task in dict.fromkeys(batch.tasks):
            rows = [i for i, name in enumerate(batch.tasks) if name == task]
            of_task = batch.select(rows)
            scores = score(self.rewards[task], images[rows], of_task.prompts, of_task.metadata)
            pieces.append((rows, scores))
        return assemble(len(images), pieces)


# While the next images are sampled ----------------------------------------------------------------


class Worker:
    """Runs calls in the order of `submit`, one at a time, in a thread: rewards are not thread safe.

    Whatever a call raises, KeyboardInterrupt and SystemExit included, is raised by its future.
    The thread's current device is that of the thread that makes the worker. It works on a stream of
    its own: a call sees all that its submitter has started, and its result is complete.
    """

    def __init__(self) -> None:
        self._stream = SideStream()
        self._pool = ThreadPoolExecutor(1, "reward", self._stream.activate)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """The future result of a call; it can be cancelled until its turn comes."""
        return self._pool.submit(self._run, call, self._stream.record())

    def close(self) -> None:
        """End the thread, once what was submitted is done or cancelled; does not wait."""
        self._pool.shutdown(wait=False)

    def _run(self, call: Callable[[], Any], event: Any) -> Any:
        self._stream.wait(event)
        result = call()
        self._stream.synchronize()
        return result


class AsyncScorer:
    """Scores batches of images in order, in one thread, while the caller samples the next ones.

    The scores are those of calling `score` at once, as far as a reward judges each image by itself.
    `submit` waits for a thread's first batch, and for all where a reward changes torch's global
    settings, so that no image is sampled under these.
    seconds: a batch that takes longer is given up and its images are invalid (None = wait for
    ever). Python cannot end the thread that hangs: it is left behind, and a new one takes over.
    """

    def __init__(self, score: Score, seconds: float | None = None) -> None:
        self.score = score
        self.seconds = seconds
        self._jobs: list[tuple[Tensor, PromptBatch, Future[Scores]]] = []
        self._worker: Worker | None = None

    @property
    def waiting(self) -> int:
        """How many images were submitted and not collected."""
        return sum(len(images) for images, _, _ in self._jobs)

    def submit(self, images: Tensor, batch: PromptBatch) -> None:
        """Start to score images [B,3,H,W] and their B rows; returns at once."""
        if is_first := self._worker is None:
            self._worker = Worker()
            weakref.finalize(self, self._worker.close)
        future = self._worker.submit(partial(self.score, images, batch))
        self._jobs.append((images, batch, future))
        if is_first or _changers:
            wait([future], self.seconds)

    def collect(self) -> Scores:
        """The scores of everything submitted since the last call, in order: `results`, joined."""
        pieces = []
        start = 0
        for scores in self.results():
            stop = start + len(scores.value)
            pieces.append((range(start, stop), scores))
            start = stop
        return assemble(start, pieces)

    def results(self) -> Iterator[Scores]:
        """The scores of each batch submitted since the last call, in order, as they come.

        Whatever `score` raises, KeyboardInterrupt included, is raised here.
        """
        while self._jobs:
            images, _, future = self._jobs.pop(0)
            if wait([future], self.seconds).done:
                yield future.result()
                continue
            rest = self._jobs
            self.discard()
            for others, batch, _ in rest:  # to a new thread
                self.submit(others, batch)
            yield failed(len(images), f"TimeoutError: no answer within {self.seconds:g} s")

    def discard(self) -> None:
        """Drop what was submitted and not collected; the batch being scored runs on, unread."""
        for *_, future in self._jobs:
            future.cancel()
        self._jobs = []
        if self._worker is not None:
            self._worker.close()
        self._worker = None
