"""A moving average of the adapter, as in Flow-GRPO and Flow-OPD. Pure tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def decay_at(steps: int, decay: float) -> float:
    """The share of the old average that is kept after `steps` optimizer steps (1, 2, ...).

    min(decay, (1 + n) / (10 + n)) with n = steps - 1, which reaches .9 after 80 steps. (diffusers'
    EMAModel counts averagings instead: with one every 8 steps, .9 takes about 650 steps.)
    """
    return min(decay, steps / (9 + steps))


def rising_decay(steps: int, *, decay: float, rise: float, after: int) -> float:
    """The share of a policy's old weights that is kept after `steps` optimizer steps of a run:
    0 up to step `after`, then `rise` more with each step, up to `decay`."""
    return min(decay, max(0.0, rise * (steps - after)))


class MovingAverage:
    """The average of some parameters, updated every `every` optimizer steps.

    Its only state is `shadow_params`: all else follows from the number of optimizer steps.
    """

    def __init__(self, parameters: Sequence[Tensor], *, decay: float, every: int) -> None:
        self.decay, self.every = decay, every
        self.shadow_params = [p.detach().clone() for p in parameters]

    def step(self, parameters: Sequence[Tensor], steps: int) -> None:
        """After optimizer step number `steps`: update the average, if it is due."""
        if steps % self.every == 0:
            _copy(self._mixed(parameters, decay_at(steps, self.decay)), self.shadow_params)

    @contextmanager
    def of(self, parameters: Sequence[Tensor], steps: int) -> Iterator[None]:
        """Inside the `with`, the parameters are the average as of `steps`.

        Two departures from the published code, which takes the last averaging as it is. Before the
        first one it is the adapter itself, so that a short run returns what it learnt. Steps since
        the last one count for their share: k of `every` steps keep decay^(k / every).
        """
        if steps < self.every:  # before the first averaging
            yield
            return
        decay = decay_at(steps, self.decay) ** (steps % self.every / self.every)
        saved = [p.detach().clone() for p in parameters]
        _copy(self._mixed(parameters, decay), parameters)
        try:
            yield
        finally:
            _copy(saved, parameters)

    @torch.no_grad()
    def _mixed(self, parameters: Sequence[Tensor], decay: float) -> list[Tensor]:
        pairs = zip(self.shadow_params, parameters, strict=True)
        # decay * average + (1 - decay) * p, rounded as diffusers' EMAModel rounds it
        return [average - (1 - decay) * (average - p.detach()) for average, p in pairs]


def _copy(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)  # in place: the optimizer holds these tensors
