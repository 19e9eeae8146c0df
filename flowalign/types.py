"""What passes between the rooms: frozen dataclasses, and the protocols of plug-ins.

Shape legend: B images = P prompts x K copies, T steps, S trained steps (a subset of the T),
latent C x h x w (16x64x64 at 512 px), text length L, text width D, pooled width E.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """What a check says of a config.

    key: the key of the config that it is about, or a subject; "" where the text says it. level:
    "refuse" (nothing starts), "fault" (training would suffer), "note" (it may be intended), "ok"
    (nothing is wrong). stage: the name of a recipe's stage; "" for the config itself.
    """

    key: str
    text: str
    level: str = "refuse"
    stage: str = ""

    @property
    def place(self) -> str:
        """The key in the whole config."""
        return ".".join(filter(None, (self.stage and f"stages.{self.stage}", self.key)))

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text


Metadata = Sequence[Mapping[str, Any]]  # a mapping an image: what its reward needs to judge it


@dataclass(frozen=True)
class PromptBatch:
    """P prompts, each with the task it belongs to and what its reward needs to judge it."""

    prompts: list[str]
    tasks: list[str]
    metadata: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> PromptBatch:
        """The rows asked for, in that order; a row may be taken more than once."""
        return PromptBatch(
            prompts=[self.prompts[i] for i in rows],
            tasks=[self.tasks[i] for i in rows],
            metadata=[self.metadata[i] for i in rows],
        )


@dataclass(frozen=True)
class Conditioning:
    """What the transformer is told of P distinct prompts, and which of them each of B images uses.

    text {name: [P, ...]}, such as embeddings [P,L,D]; named by the model's family.
    index [B] into them (never one copy per image). negative {name: [1, ...]}: the unconditional
    half of CFG.
    """

    text: Mapping[str, Tensor]
    index: Tensor
    negative: Mapping[str, Tensor]

    def select(self, rows: Tensor | slice) -> Conditioning:
        """The same embeddings for some of the images: only the index is sliced."""
        return replace(self, index=self.index[rows])


@dataclass(frozen=True)
class Schedule:
    """Noise levels and how to step along them: noise inside the window only, Euler outside."""

    sigmas: Tensor  # [T+1]
    kind: str  # sde, cps or ode (`flowalign.sde.transition`)
    noise_level: float
    window: tuple[int, int] | None  # [start, stop) with noise and training; None = no step has any
    chosen: tuple[int, ...] | None = None  # steps of the window that are trained; None = all
    actions: bool = True  # are the successors of the trained states needed? (an ode has none)
    solver: str = "euler"  # of an ode, one of `flowalign.training.solvers`

    @property
    def trained(self) -> list[int]:
        """The steps whose states are kept, in order."""
        return list(range(*(self.window or (0, 0))) if self.chosen is None else self.chosen)

    @property
    def noisy(self) -> range:
        return range(*self.window) if self.window and self.kind != "ode" else range(0)


@dataclass(frozen=True)
class Rollout:
    """Trajectories sampled now. Only the S trained steps are kept."""

    states: Tensor  # [B,S,C,h,w] before each trained step, in their storage dtype
    next_states: Tensor | None  # [B,S,C,h,w] after it; None where none is needed, or random
    schedule: Schedule
    log_probs: Tensor | None  # [B,S] of next_states
    latents: Tensor | None  # [B,C,h,w] at the end; None where the rollout stopped before
    images: Tensor | None  # [B,3,H,W] in [0,1]
    group: Tensor  # [B] number of an image's prompt in the batch of all processes
    copy: Tensor  # [B] which of that prompt's images it is
    batch: PromptBatch  # a row an image
    conditioning: Conditioning
    own_sigmas: Tensor | None = None  # [B,S] of the states, where images differ; None = schedule's
    sources: Sequence[Source] | None = None  # [B] who sampled each; None = the active adapter

    def __len__(self) -> int:
        return self.states.shape[0]

    @property
    def steps(self) -> list[int]:
        """The S trained steps, as positions in the schedule."""
        return self.schedule.trained

    @property
    def sigmas(self) -> Tensor:
        """Noise levels [T+1] of the schedule."""
        return self.schedule.sigmas


def float32(values: Tensor | Sequence[float]) -> Tensor:
    """Values as a tensor of that type."""
    import torch  # here: commands that make no tensor start without it

    return torch.as_tensor(values, dtype=torch.float32)


@dataclass(frozen=True)
class Scores:
    """What a reward says of B images: value [B]; parts {name: [B]}; valid [B], False = it failed.

    The value of an invalid image is NaN, so that it is not taken for a score by accident.
    reasons {row: text}: why an image is invalid; a reward may also explain the score of a valid
    one. `flowalign.rewards.score` gives every invalid image a reason.
    """

    value: Tensor
    valid: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def of(value: Tensor | Sequence[float], **parts: Tensor) -> Scores:
        """Scores whose valid mask is read off the values: NaN and infinity are failures."""
        value = float32(value)
        return Scores(value=value, valid=value.isfinite(), parts=parts)

    @staticmethod
    def of_rows(rows: Sequence[Mapping[str, float]], reasons: Mapping[int, str]) -> Scores:
        """From the numbers of each image: its `value`, and parts, of which it may lack some."""
        columns = {
            name: float32([row.get(name, math.nan) for row in rows])
            for name in dict.fromkeys(name for row in rows for name in row)
        }
        return replace(Scores.of(columns.pop("value"), **columns), reasons=reasons)

    @property
    def failures(self) -> dict[int, str]:
        """The reasons of the invalid images."""
        return {row: text for row, text in self.reasons.items() if not self.valid[row]}

    @property
    def mean(self) -> float:
        """Mean over the valid images; NaN when there is none."""
        return float(self.value[self.valid].mean()) if bool(self.valid.any()) else float("nan")


@dataclass(frozen=True)
class Detections:
    """What a detector finds in one image, raw: no threshold, no order, no suppression.

    boxes {class: [[x1, y1, x2, y2, score], ...]} in pixels, y down, score in [0,1];
    colors {class: [colour of each box]}, or a callable (class, index of the box) -> colour.
    """

    boxes: Mapping[str, Sequence[Sequence[float]]]
    colors: Mapping[str, Sequence[str]] | Callable[[str, int], str]


@dataclass(frozen=True)
class Source:
    """Who samples an image: an adapter on the base (None = the base alone), and its CFG scale."""

    adapter: str | None
    guidance: float


@dataclass(frozen=True)
class TeacherLabel:
    """A teacher's velocity [B,S,C,h,w] at the states of a rollout, and whose it is: B names."""

    velocity: Tensor
    teacher: list[str]


@dataclass(frozen=True)
class Gaussian:
    """A transition: mean [B,C,h,w], std [B,1,1,1] (0 = deterministic)."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class StepLoss:
    """The loss of one micro-batch, a scalar, and metrics to log."""

    total: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)  # pairs of a metric, if not all


@dataclass(frozen=True)
class EvalImage:
    """An image of an evaluation: its prompt, whose place in the set is index, and which of the
    prompt's images it is."""

    index: int
    copy: int
    prompt: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class ImageScore:
    """What a judge gives for an image. NaN = it has no such number.

    weight {"value" or a part: how often it counts in a mean}: once where it is not named; 0 = it is
    no metric. reason: why the image has no value, or what the score rests on.
    """

    image: EvalImage
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    weight: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def numbers(self) -> dict[str, float]:
        """The value and the parts, by name."""
        return {"value": self.value, **self.parts}

    def number(self, name: str) -> float:
        """The value or a part; NaN for a part that it has not."""
        return self.value if name == "value" else self.parts.get(name, math.nan)

    def replaced(self, name: str, number: float) -> ImageScore:
        """The same score with another value or part."""
        if name == "value":
            return replace(self, value=number)
        return replace(self, parts={**self.parts, name: number})


@dataclass(frozen=True)
class EvalRow:
    """One number of an evaluation."""

    benchmark: str
    metric: str
    mean: float
    stderr: float
    n: int  # images that have a score
    low: float = float("nan")  # lower end of the 95 % interval
    high: float = float("nan")
    total: int | None = None  # images that were sampled; None = n
    # {prompt: how far its scores move the mean}; stderr is the root of the sum of squares
    influence: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    def moved_from(self, other: EvalRow) -> dict[str, float]:
        """{prompt: how far it moves this mean minus the other's}, for the same prompts and noise;
        the standard error of the difference is the root of the sum of squares. Rows without
        influences are independent."""
        if not (self.influence and other.influence):
            return {"": math.hypot(self.stderr, other.stderr)}
        return {
            prompt: self.influence.get(prompt, 0.0) - other.influence.get(prompt, 0.0)
            for prompt in {*self.influence, *other.influence}
        }


@dataclass(frozen=True)
class Example:
    """An image of an evaluation. score: the benchmark's number for it, NaN = invalid, None = it has
    no reward."""

    prompt: str
    score: float | None
    picture: bytes  # a PNG file


@dataclass(frozen=True)
class Watched:
    """The number of a judge that a run does not learn from. images: the image set that it is of."""

    row: EvalRow
    images: str


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation measured."""

    rows: list[EvalRow]
    lost: Mapping[str, str] = field(default_factory=dict)  # {benchmark without enough scores: why}
    examples: Sequence[Example] = ()  # some of its images
    # {image set: {prompt: PNG file of its first image}}, of the sets that were asked for
    pictures: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    watched: Mapping[str, Watched] = field(default_factory=dict)  # by judge


class Reward(Protocol):
    """Anything that scores images. It may raise: the caller masks the images it failed on.

    Pointwise unless it has a true attribute `groupwise`: then it is called with all images of one
    prompt at a time, and may compare them.
    """

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] with their B prompts and metadata -> Scores of B."""
        ...


class Detector(Protocol):
    """Finds objects and their colours."""

    def __call__(self, images: Tensor) -> Sequence[Detections]:
        """images [B,3,H,W] in [0,1] -> B Detections."""
        ...


class Teacher(Protocol):
    """A frozen velocity field that labels the states of a rollout."""

    def __call__(self, rollout: Rollout) -> TeacherLabel:
        """Velocities at rollout.states, routed by rollout.batch.tasks."""
        ...

    def sources(self, tasks: list[str]) -> list[Source]:
        """Who samples the images of these tasks: the teacher of each."""
        ...
