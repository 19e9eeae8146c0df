"""Sections on the sampling of rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from flowalign.config.section import Count, Many, NotNegative, Section, Steps, as_tuple
from flowalign.types import Problem


class WindowConfig(Section):
    """A window of steps that moves while a run goes on (MixGRPO, 2507.21802): only its steps have
    noise and are trained."""

    width: Steps = Field(examples=[4])
    """Number of steps."""
    every: Many = 1
    """Updates between two moves, by one step from high to low noise; after its last place it starts
    over. MixGRPO has 25 in runs of several hundred updates."""


Window = Annotated[
    Annotated[tuple[int, int], as_tuple, Tag("[fixed]")] | Annotated[WindowConfig, Tag("[moving]")],
    Discriminator(lambda v: "[moving]" if isinstance(v, Mapping | WindowConfig) else "[fixed]"),
]


class RolloutConfig(Section):
    """How trajectories are sampled for training."""

    steps: Steps = 10
    """Denoising steps T; null = of a model that was distilled to few steps, its card's, else 10."""
    kind: Literal["sde", "cps", "ode"] = "sde"
    """How a step adds noise; see flowalign.sde."""
    noise_level: NotNegative = 0.7
    """Noise level a: any for sde, at most 1 for cps."""
    solver: Literal["euler", "dpm2"] = "euler"
    """How an ode is solved. dpm2 (DPM-Solver++) is of second order, and costs as much."""
    guidance: NotNegative = 4.5
    """CFG scale; 1 = no unconditional pass. null = that of the model's card, else 4.5."""
    window: Window | None = Field(default=None, examples=[[0, 5]])
    """[start, stop): the steps with noise and training; null = all but the last, which has no noise
    (ode: all). Or {width, every}: a window of `width` steps that moves."""
    shared_noise: bool = False
    """One initial noise for all images of a prompt."""
    prompts: Count = 8
    """P: distinct prompts per update, over all processes."""
    group_size: Count = 16
    """K: images per prompt. 1 is enough for distillation."""
    batch_size: Many = 16
    """Images per forward pass of a process."""

    @property
    def trained(self) -> tuple[int, int]:
        """[start, stop) of the steps with noise and training; for a moving window, of all steps
        that it reaches."""
        if isinstance(self.window, tuple):
            return self.window
        return 0, self.steps if self.kind == "ode" else self.steps - 1

    @property
    def width(self) -> int:
        start, stop = self.trained
        return self.window.width if isinstance(self.window, WindowConfig) else stop - start

    @property
    def images(self) -> int:
        """Images of a rollout, over all processes."""
        return self.prompts * self.group_size

    def problems(self) -> Iterator[Problem]:
        start, stop = self.trained
        if self.solver != "euler" and self.kind != "ode":
            yield Problem(
                "solver", f"{self.solver!r} is for kind 'ode' only. Use that, or 'euler'."
            )
        if self.kind == "cps" and self.noise_level > 1:
            yield Problem(
                "noise_level", f"got {self.noise_level}; kind 'cps' wants a value in (0, 1]."
            )
        if not isinstance(self.window, tuple) and stop == 0:
            yield Problem(
                "steps", "1, and the default window leaves out the last step. Use 2 or more."
            )
        elif isinstance(self.window, WindowConfig) and self.width > stop - start:
            yield Problem(
                "window.width", f"{self.width}, of {stop - start} steps that can be trained."
            )
        elif not 0 <= start < stop <= self.steps:
            wanted = f"want 0 <= start < stop <= {self.steps}, the steps."
            yield Problem("window", f"got [{start}, {stop}]; {wanted}")
        elif self.kind == "cps" and stop == self.steps:  # its std is sigma_next * sin(a pi / 2)
            yield Problem(
                "window", f"the last step has no noise under 'cps'. Let it stop at {stop - 1}."
            )


def steps_within(steps: int, within: tuple[float, float]) -> tuple[int, int]:
    """[start, stop) of the steps of a schedule inside a fraction of it: (0, .99) leaves out the
    last of at most 100 steps, (.01, .9) the first one and the last tenth."""
    return math.ceil(within[0] * steps - 1e-9), math.floor(within[1] * steps + 1e-9)
