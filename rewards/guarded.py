"""The failure policy of rewards: an image that a reward failed on is invalid, never scored 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowalign.types import Reward, Scores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guarded(Scores):
    """Scores with reasons {row: text}: why each invalid image is invalid, and, where a reward
    tells, what the score of a valid one rests on."""

    reasons: Mapping[int, str] = field(default_factory=dict)

    @property
    def failures(self) -> dict[int, str]:
        """The reasons of the invalid images."""
        return {row: text for row, text in self.reasons.items() if not self.valid[row]}


def score(
    reward: Reward,
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
) -> Guarded:
    """Ask a reward about images [B,3,H,W] and mask what it failed on; results are on the CPU.

    An image with pixels that are NaN or infinite is not shown to the reward: it is invalid.
    A reward whose attribute `groupwise` is true is asked about the images of one prompt at a time,
    in their order; any other about all at once. A pointwise reward that raises is asked again once,
    image by image, so that one bad image does not cost the batch. A failure that is not an image's
    (ConnectionError, TimeoutError, ImportError) ends the call: nothing more is asked. Answers that
    are no Scores, of the wrong length or dtype, mask every image they are about; NaN and infinity
    mask their image. Each distinct reason is logged once a call.
    Raises ValueError if the inputs differ in length; KeyboardInterrupt and SystemExit pass.
    """
    count = len(images)
    if not count == len(prompts) == len(metadata):
        raise ValueError(
            f"got {count} images, {len(prompts)} prompts and {len(metadata)} metadata; "
            "they must be one row an image."
        )
    groupwise = bool(getattr(reward, "groupwise", False))
    known = torch.isfinite(images).flatten(1).all(1) if count else torch.ones(0, dtype=torch.bool)
    shown, broken = known.nonzero().flatten().tolist(), (~known).nonzero().flatten().tolist()
    units = _groups(prompts, shown) if groupwise else [shown] if shown else []
    answers = [failed(len(broken), "the image has pixels that are NaN or infinite")]
    try:
        for rows in units:
            answers += _ask_rows(reward, images, prompts, metadata, rows, again=not groupwise)
    except (ConnectionError, TimeoutError, ImportError) as error:
        done = sum(len(answer.value) for answer in answers)
        answers.append(failed(count - done, _text(error)))
    result = _placed(join(answers), [*broken, *(row for rows in units for row in rows)])
    _report(reward, result)
    return result


def _groups(prompts: Sequence[str], rows: Sequence[int]) -> list[list[int]]:
    """These rows by distinct prompt."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(prompts[row], []).append(row)
    return list(groups.values())


def _ask_rows(
    reward: Reward,
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    rows: Sequence[int],
    *,
    again: bool,
) -> list[Guarded]:
    """One call about some rows; where it fails, one a row if `again`, else all are masked."""
    inputs: Any = images, prompts, metadata
    if len(rows) < len(images):
        inputs = images[rows], [prompts[r] for r in rows], [metadata[r] for r in rows]
    try:
        return [_ask(reward, *inputs)]
    except (ConnectionError, TimeoutError, ImportError):
        raise
    except Exception as error:
        if not again or len(rows) == 1:
            return [failed(len(rows), _text(error))]
    return [_ask_one(reward, images[[r]], [prompts[r]], [metadata[r]]) for r in rows]


def _ask_one(
    reward: Reward, image: Tensor, prompt: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> Guarded:
    try:
        return _ask(reward, image, prompt, metadata)
    except Exception as error:
        return failed(1, _text(error))


@torch.no_grad()
def _ask(
    reward: Reward, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> Guarded:
    """One call of the reward, with its answer checked. Whatever the reward raises passes."""
    answer = reward(images, prompts, metadata)
    count = len(images)
    fault = _fault(answer, count)
    if fault:
        return failed(count, fault)
    value = answer.value.detach().to("cpu", torch.float32)
    said_valid, finite = answer.valid.detach().cpu(), torch.isfinite(value)
    valid = said_valid & finite
    reasons = dict(answer.reasons) if isinstance(answer, Guarded) else {}
    for row in (~valid).nonzero().flatten().tolist():
        plain = f"returned {float(value[row])}" if not finite[row] else "said that it failed"
        reasons[row] = reasons.get(row) or plain
    parts = {name: part.detach().to("cpu", torch.float32) for name, part in answer.parts.items()}
    return Guarded(value.masked_fill(~valid, float("nan")), valid, parts, reasons)


def _fault(answer: Any, count: int) -> str:
    """What is wrong with an answer about `count` images; "" if nothing is."""
    if not isinstance(answer, Scores):
        return f"returned a {type(answer).__name__} where Scores is due; use Scores.of(values)"
    tensors = {"value": answer.value, "valid": answer.valid, **answer.parts}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            return f"{name} is a {type(tensor).__name__}, not a tensor"
        if tensor.shape != (count,):
            return f"{name} has shape {list(tensor.shape)}, but there are {count} images"
    if not answer.value.is_floating_point():
        return f"value has dtype {answer.value.dtype}, not a floating one"
    if answer.valid.dtype != torch.bool:
        return f"valid has dtype {answer.valid.dtype}, not torch.bool"
    return ""


def failed(count: int, reason: str) -> Guarded:
    """Scores of images that all failed for one reason."""
    value, valid = torch.full((count,), float("nan")), torch.zeros(count, dtype=torch.bool)
    return Guarded(value, valid, {}, dict.fromkeys(range(count), reason))


def join(answers: Sequence[Guarded]) -> Guarded:
    """Answers one after the other; a part that some of them lack is NaN there."""
    if not answers:
        return failed(0, "")
    part_names = dict.fromkeys(name for answer in answers for name in answer.parts)
    parts = {
        name: torch.cat(
            [a.parts.get(name, torch.full_like(a.value, float("nan"))) for a in answers]
        )
        for name in part_names
    }
    reasons, start = {}, 0
    for answer in answers:
        reasons.update({start + row: text for row, text in answer.reasons.items()})
        start += len(answer.value)
    value = torch.cat([answer.value for answer in answers])
    return Guarded(value, torch.cat([answer.valid for answer in answers]), parts, reasons)


def _placed(found: Guarded, order: Sequence[int]) -> Guarded:
    """The same scores with row i moved to order[i]."""
    place = torch.tensor(order, dtype=torch.long).argsort()
    parts = {name: part[place] for name, part in found.parts.items()}
    reasons = {order[row]: text for row, text in found.reasons.items()}
    return Guarded(found.value[place], found.valid[place], parts, reasons)


def _report(reward: Reward, result: Guarded) -> None:
    name = getattr(reward, "name", None) or getattr(reward, "__name__", type(reward).__name__)
    failures = result.failures
    for reason in dict.fromkeys(failures.values()):
        rows = [row for row, text in failures.items() if text == reason]
        log.warning(
            "reward %s failed on %d of %d images (rows %s), which are masked: %s",
            name,
            len(rows),
            len(result.value),
            rows[:8],
            reason,
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
