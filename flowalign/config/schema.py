"""What a config may hold: frozen pydantic models, one a section, one a stage.

A docstring under each field says what it means. `problems` of a section says which of its values do
not go together. What follows from the keys (is a reward needed? at which CFG scale is a teacher
asked?) is a property of the stage. Nothing is read from disk here.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from flowalign.system import files


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[\w-]{1,60}", name):
        raise PydanticCustomError(
            "file_name",
            "letters, digits, _ and - only, at most 60, as it stands in file names and tables",
        )
    return name


def _path(text: str) -> str:
    if problem := files.impossible(text):
        raise PydanticCustomError("path", "a path; this one {problem}", {"problem": problem})
    return text


# The upper limits are far beyond any run. They keep a slip of the keyboard from filling the memory.
Count = Annotated[int, Field(ge=1, le=100_000)]
Many = Annotated[int, Field(ge=1, le=10_000_000)]  # of updates, prompts of a file
Steps = Annotated[int, Field(ge=1, le=10_000)]
Pixels = Annotated[int, Field(gt=0, le=8192, multiple_of=16)]  # the VAE's factor 8, patches of 2
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # 3 years; a timer of the system cannot hold more
Place = Annotated[str, AfterValidator(_path)]  # a file, a folder or a Hub id
LISTED = 200  # tasks, benchmarks, models, teachers, adapters or stages of one config
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
FileName = Annotated[str, AfterValidator(_file_name)]
# YAML has lists only, and a strict pydantic takes no list for a tuple.
_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

MARKS = ("[fixed]", "[moving]", "[one]", "[several]")  # forms of a value in pydantic's errors
Side = Annotated[
    Annotated[Pixels, Tag(MARKS[2])]
    | Annotated[list[Pixels], Field(min_length=1, max_length=64), Tag(MARKS[3])],
    Discriminator(lambda value: MARKS[2 + isinstance(value, list)]),
]
Size = tuple[int, int]  # height and width in pixels
Pair = Annotated[tuple[Pixels, Pixels], _as_tuple]

RENAMED = {"train.mixed_precision": "model.dtype"}  # keys of past versions, and what they are now
REMOVED = {  # and those that have no successor, with what to do
    "train.disk_full": "a full disk always stops the run, with its last checkpoint. Leave it out."
}
ADAPTER = "pytorch_lora_weights.safetensors"  # what an adapter folder holds


class ConfigError(ValueError):
    """A config that cannot be run; `problems` holds one text for each place where it is wrong, and
    `lines` one for each thing that is: a file that is missing in many places is one line."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = list(problems)
        places: dict[str, list[str]] = {}  # by what is wrong there
        for problem in self.problems:
            place, colon, text = problem.partition(": ")
            places.setdefault(colon + text, []).append(place)
        self.lines = [_places(where) + text for text, where in places.items()]
        count = "1 problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
        super().__init__("\n  - ".join([f"{source}: {count}", *self.lines]))


def _places(names: Sequence[str]) -> str:
    shown, more = (names, 0) if len(names) <= 3 else (names[:2], len(names) - 2)
    return ", ".join(shown) + (f" and {more} more places" if more else "")


def close_to(word: str, possible: Iterable[str], cutoff: float = 0.6) -> str | None:
    """What may have been meant, of the possible words; cutoff: similarity in 0..1 at least."""
    return next(iter(difflib.get_close_matches(word, possible, n=1, cutoff=cutoff)), None)


def sizes_of(height: int | Sequence[int], width: int | Sequence[int]) -> list[Size]:
    """(height, width) of each bucket, of numbers or lists of them; one number stands for all."""
    count = max((len(side) for side in (height, width) if not isinstance(side, int)), default=1)
    heights, widths = ([s] * count if isinstance(s, int) else s for s in (height, width))
    return list(zip(heights, widths, strict=False))  # of unequal lengths: refused elsewhere


class Section(BaseModel):
    """A part of the config: frozen, no unknown keys, no silent conversion of types."""

    # strict: `steps: 2.5` or `guidance: yes` is a mistake, and must not become 2 or 1.0
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        """Values that are possible alone but not together: "key: what was seen, what to do", the
        key relative to this section."""
        yield from ()

    @model_validator(mode="after")
    def _refuse(self) -> Section:
        # One error for all problems, since pydantic stops at the first validator that raises.
        if problems := list(self.problems()):
            raise PydanticCustomError("problems", "{problems}", {"problems": problems})
        return self


class ModelConfig(Section):
    """The base model."""

    id: Place = Field(examples=["tiny", "stabilityai/stable-diffusion-3.5-medium"])
    """`tiny` (ships with the package), a folder, or a Hub id."""
    revision: str | None = Field(default=None, examples=["main"])
    """Branch, tag or commit on the Hub."""
    family: str | None = Field(default=None, examples=["my_family"])
    """The model family, where model_index.json names a pipeline class of your own; null = the
    family of that class."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the transformer and its adapters, stored and computed. The adapter that is trained
    keeps its weights in float32. float16 scales the loss."""
    vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the VAE (0.3 GB in float32). 16 bits cause visible artifacts."""
    quantization: Literal["nf4", "fp8"] | None = None
    """The frozen transformer is stored in fewer bits and computes in dtype. nf4: 4 bits; needs
    bitsandbytes and a GPU. fp8: 8 bits; use gradient_checkpointing with it."""
    height: Side = Field(default=512, examples=[512, [512, 768]])
    """Pixels, a multiple of 16. A list: several sizes, the buckets. All images of a rollout have
    one of them, and they take turns."""
    width: Side = Field(default=512, examples=[512, [768, 512]])
    """Pixels, a multiple of 16, or a list as long as that of height. One number stands for all."""
    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = 128
    """Tokens of a prompt, at most (of the T5 encoder where there are several)."""
    text_cache: Place | None = Field(default=None, examples=["outputs/text_cache"])
    """Folder that keeps encoded prompts for later runs with the same encoders; null = keep none.
    Stable Diffusion 3.5 needs 1.7 MB a prompt in 16 bits."""
    offload_text_encoders: bool = False
    """Keep the text encoders on the CPU, and move them to the GPU only to encode. Saves 11 GB with
    Stable Diffusion 3.5 in 16 bits."""
    decode_batch: Many | None = Field(default=None, examples=[4])
    """Images per forward pass of the VAE; null = all that were sampled at once."""
    attention: str | None = Field(default=None, examples=["native", "xformers", "flash"])
    """A diffusers attention backend; null = its default (SDPA)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    compile: bool = False
    """torch.compile the blocks of the transformer."""

    @property
    def sizes(self) -> list[Size]:
        """(height, width) of each bucket."""
        return sizes_of(self.height, self.width)

    @property
    def listed_sizes(self) -> str:
        """As text, such as 512x512, 512x768: height first."""
        return ", ".join(f"{height}x{width}" for height, width in self.sizes)

    def bucket(self, size: Size | None) -> int:
        """The number of one of its sizes; None = the first."""
        return self.sizes.index(size) if size else 0

    def size_problems(self, wanted: Mapping[str, Size | None]) -> Iterator[str]:
        """Sizes that the model does not have. wanted: {place in the config: size}."""
        for place, size in wanted.items():
            if size and size not in self.sizes:
                listed = ", ".join(f"[{height}, {width}]" for height, width in self.sizes)
                yield (
                    f"{place}.size: [{size[0]}, {size[1]}] is none of the model's sizes, "
                    f"{listed}. Use one of them, or add it to model.height and model.width."
                )

    def problems(self) -> Iterator[str]:
        """Sizes that are no pairs, or come twice."""
        lists = [side for side in (self.height, self.width) if not isinstance(side, int)]
        if len({len(side) for side in lists}) > 1:
            yield (
                f"height: {len(lists[0])} sizes, but width has {len(lists[1])}. Give lists of the "
                "same length, or one number for all."
            )
        elif len(set(self.sizes)) < len(self.sizes):
            yield f"height: with width {self.width} two sizes are the same. List each once."


class LoraConfig(Section):
    """The adapter that is trained."""

    rank: Annotated[int, Field(ge=1, le=8192)] = 32
    """Rank r of the update (alpha / r) B A."""
    alpha: Positive = 64.0
    """Scale of the update, divided by the rank."""
    targets: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = Field(
        default=None, examples=[["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]]
    )
    """Layers that are adapted, by the end of their names; null = the attention layers of the
    model's family."""
    init: Place | None = Field(default=None, examples=["runs/teacher_ocr/adapter"])
    """Adapter folder to start from; null = a fresh adapter (B = 0). It brings its own rank, scale
    and layers: rank, alpha and targets are ignored, with a warning if they were set."""


class RewardConfig(Section):
    """A reward by its registered name."""

    name: str = Field(examples=["ocr"])
    """Name in flowalign.rewards, built in or plugged in."""
    options: dict[str, Any] = {}
    """Keyword arguments of the reward."""


class TaskConfig(Section):
    """A named group of prompts with its own reward or teacher."""

    name: FileName = Field(examples=["ocr"])
    """Its name in logs, and of its teacher if `teacher` is null."""
    prompts: Place = Field(examples=["tiny/ocr_train", "prompts/train.jsonl"])
    """Training prompts: a .txt, a .jsonl, or tiny/NAME."""
    validation: Place | None = Field(default=None, examples=["tiny/ocr_test", "prompts/test.jsonl"])
    """Held-out prompts, in the same formats."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of every batch, relative to the other tasks."""
    reward: RewardConfig | None = None
    """Scores its images. opd and sft use it, with `validation`, only to evaluate: a task without
    both is trained and not evaluated."""
    teacher: str | None = Field(default=None, examples=["ocr"])
    """The teacher that labels its images (opd, sft); null = the teacher with the task's name."""
    size: Pair | None = Field(default=None, examples=[[512, 768]])
    """[height, width] of its images, one of the model's sizes; null = all of them in turn, and the
    first in evaluations. A rollout holds tasks of one size only."""

    @property
    def evaluated(self) -> bool:
        """Whether there are held-out prompts, and a reward that scores them."""
        return self.validation is not None and self.reward is not None


class WindowConfig(Section):
    """A window of steps that moves while a run goes on (MixGRPO, 2507.21802): only its steps have
    noise and are trained. Its places are those inside of all steps but the last."""

    width: Steps = Field(examples=[4])
    """Number of steps."""
    every: Many = 1
    """Updates between two moves. MixGRPO has 25 in runs of several hundred updates."""
    random: bool = False
    """false: the window moves on by one step, from high to low noise, and starts over after its
    last place. true: its place is drawn anew."""


Window = Annotated[
    Annotated[tuple[int, int], _as_tuple, Tag(MARKS[0])] | Annotated[WindowConfig, Tag(MARKS[1])],
    Discriminator(lambda value: MARKS[isinstance(value, Mapping | WindowConfig)]),
]


class RolloutConfig(Section):
    """How trajectories are sampled for training."""

    steps: Steps = 10
    """Denoising steps T."""
    kind: Literal["sde", "cps", "ode"] = "sde"
    """How a step adds noise; see flowalign.sde."""
    noise_level: NotNegative = 0.7
    """Noise level a: any for sde, at most 1 for cps."""
    solver: Literal["euler", "heun", "dpm2"] = "euler"
    """How an ode is solved. heun and dpm2 are of second order: dpm2 (DPM-Solver++) costs a forward
    pass a step, heun two. See flowalign.training.solvers."""
    guidance: NotNegative = 4.5
    """CFG scale; 1 = no unconditional pass."""
    window: Window | None = Field(default=None, examples=[[0, 5]])
    """[start, stop): the steps with noise and training; null = all but the last. Or {width, every,
    random}: a window of `width` steps that moves."""
    shared_noise: bool = False
    """One initial noise for all images of a prompt."""
    prompts: Count = 8
    """P: distinct prompts per update, over all processes."""
    copies: Count = 16
    """K: images per prompt (group size). 1 is enough for distillation."""
    batch_size: Many = 16
    """Images per forward pass of a process."""

    @property
    def trained(self) -> tuple[int, int]:
        """[start, stop) of the steps with noise and training; of a window that moves, all the
        steps that it comes to."""
        return self.window if isinstance(self.window, tuple) else (0, self.steps - 1)

    @property
    def width(self) -> int:
        """Number of steps with noise and training in one update."""
        start, stop = self.trained
        return self.window.width if isinstance(self.window, WindowConfig) else stop - start

    @property
    def images(self) -> int:
        """Images of a rollout, over all processes."""
        return self.prompts * self.copies

    def problems(self) -> Iterator[str]:
        """A noise level that cps does not have; a window that holds no step to train."""
        start, stop = self.trained
        if self.images > 1_000_000:
            yield (
                f"copies: {self.prompts} prompts x {self.copies} copies are {self.images} images "
                "of an update; at most 1000000 are possible. Use fewer of either."
            )
        if self.solver != "euler" and self.kind != "ode":
            yield (
                f"solver: {self.solver!r} with kind {self.kind!r}, whose steps have a formula of "
                "their own. Use kind 'ode', or solver 'euler'."
            )
        if self.kind == "cps" and self.noise_level > 1:
            yield f"noise_level: got {self.noise_level}; kind 'cps' wants a value in (0, 1]."
        if not isinstance(self.window, tuple) and self.steps == 1:
            yield "steps: 1, and the default window leaves out the last step. Use 2 or more."
        elif isinstance(self.window, WindowConfig) and self.width > stop:
            yield (
                f"window.width: {self.width}, but there are only {stop} steps to move in, all but "
                f"the last. Use at most {stop}."
            )
        elif not 0 <= start < stop <= self.steps:
            yield (
                f"window: got [{start}, {stop}]; want 0 <= start < stop <= {self.steps}, the steps."
            )
        elif self.kind == "cps" and stop == self.steps:  # its std is sigma_next * sin(a pi / 2)
            yield (
                f"window: [{start}, {stop}] holds the last step, which has no noise under 'cps'. "
                f"Let it stop at {self.steps - 1} or earlier, or use kind 'sde'."
            )


AdvantageName = Literal["group_std", "batch_std", "gaussian", "gdpo", "adora", "gated"]
EARLIER = ("adora", "gated")  # the advantages that remember earlier rollouts


class EarlierConfig(Section):
    """What an advantage remembers of earlier rollouts, and how it weights prompts by it."""

    decay: Decay = 0.9
    """Share of the old average that is kept when a rollout is added to it."""
    threshold: Share = 0.5
    """adora: a prompt is hard if at most this share of its images succeeds."""
    amplify: Positive = 2.0
    """adora: factor of the advantages of hard prompts."""
    attenuate: Share = 0.1
    """gated: factor of the advantages of prompts that do not get better."""


class AdvantageConfig(Section):
    """How rewards become advantages: of every stage that learns from rewards."""

    advantage: AdvantageName = "group_std"
    """Variant of flowalign.credit. Statistics over a batch are per task. gdpo needs a reward with
    several parts (`weighted`)."""
    earlier: EarlierConfig | None = None
    """What adora and gated make of earlier rollouts; null = the defaults."""
    advantage_clip: Positive = 5.0
    """Advantages are clipped to +- this."""

    def problems(self) -> Iterator[str]:
        """A memory that nothing uses."""
        if self.earlier and self.advantage not in EARLIER:
            yield (
                f"earlier: given, but the advantage {self.advantage!r} looks at one rollout only. "
                f"Leave it out, or use {' or '.join(EARLIER)}."
            )


class GrpoConfig(AdvantageConfig):
    """The policy gradient."""

    clip_range: Positive = 1e-4
    """PPO's epsilon (log-probs are means over pixels, so ratios stay within 1e-4 of 1)."""
    ratio: Literal["plain", "guard"] = "plain"
    """guard: GRPO-Guard's normalised ratio and weights of the steps (flowalign.training.losses).
    Its ratios are closer to 1, so that it wants a smaller clip_range."""
    kl_weight: NotNegative = 0.0
    """Weight of the KL to the base model; 0 saves its forward pass."""
    kl: Literal["exact", "published"] = "exact"
    """The KL that kl_weight multiplies. exact: of the two transitions. published: that times -dt,
    as in the code of Flow-GRPO and Flow-OPD: 3.7 to 25 times smaller over ten steps of shift 3."""


class PolicyConfig(Section):
    """Weights that follow those that are trained. After the optimizer steps of each rollout, a
    share d of them is kept: d = min(decay, rise x (steps - after)), not below 0, where steps counts
    the optimizer steps of the run."""

    decay: Decay = 0.0
    """Largest share that is kept; 0 = they are the trained weights."""
    rise: Positive = 0.001
    """How much the share grows with each optimizer step."""
    after: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Optimizer steps after which it begins to grow."""


def steps_within(steps: int, within: tuple[float, float]) -> tuple[int, int]:
    """[start, stop) of a schedule's steps inside a part of the way: (0, .99) leaves out the last
    of at most 100 steps, (.01, .9) the first one and the last tenth."""
    return math.ceil(within[0] * steps - 1e-9), math.floor(within[1] * steps + 1e-9)


class ForwardConfig(AdvantageConfig):
    """Learning from clean images, to which noise is added: at which noise levels."""

    states: Steps = 4
    """Noise levels at which each image is trained."""
    own_levels: bool = True
    """Each image has noise levels of its own. false = all images of an update share them."""
    levels: Literal["sampler", "stratified"] = "stratified"
    """sampler: they are steps of the rollout's own schedule, one drawn in each of `states` parts of
    about equal size. stratified: drawn in as many parts of the continuous schedule."""
    within: Annotated[tuple[Share, Share], _as_tuple] = (0.0, 0.99)
    """The part of the way from noise (0) to the image (1) that they are drawn from."""
    guidance: NotNegative | None = Field(default=None, examples=[1.0])
    """CFG scale in the loss; null = rollout.guidance."""
    kl_weight: NotNegative = 0.0
    """Weight of |v - v_base|^2; 0 saves its forward pass."""

    def problems(self) -> Iterator[str]:
        """Those of an advantage; a part of the way that is none."""
        yield from super().problems()
        low, high = self.within
        if low >= high:
            yield f"within: [{low}, {high}] is empty. Use [0, 1] for the whole way."


class NftConfig(ForwardConfig):
    """DiffusionNFT (2509.16117)."""

    advantage: AdvantageName = "batch_std"
    """Variant of flowalign.credit, as in `grpo`."""
    beta: Positive = 1.0
    """How far the two branches lie from the old policy. Official: 1, or 0.1 for OCR and for several
    rewards."""
    adv_mode: Literal["all", "positive_only", "negative_only", "binary", "one_only"] = "all"
    """Which advantages count. positive_only, negative_only: the others are 0. binary: their sign.
    one_only: 1 where they are above 0, else 0."""
    old: PolicyConfig = PolicyConfig()
    """The old policy, which samples. Official: {decay: 0}; {decay: 0.5} for GenEval and PickScore;
    {decay: 0.999, rise: 0.0075, after: 75} for OCR."""


class AwmConfig(ForwardConfig):
    """Advantage weighted matching (2509.25050)."""

    advantage: AdvantageName = "batch_std"
    """Variant of flowalign.credit, as in `grpo`."""
    advantage_clip: Positive = 1.0
    """Advantages are clipped to +- this."""
    within: Annotated[tuple[Share, Share], _as_tuple] = (0.01, 0.9)
    """The part of the way from noise (0) to the image (1) that noise levels are drawn from."""
    weighting: Literal["ghuber", "uniform", "t", "t2", "huber"] = "ghuber"
    """How the matching error becomes a log-likelihood; see
    flowalign.training.matching.awm_log_prob."""
    ghuber_power: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The power of ghuber."""
    clip_range: Positive = 1.0
    """PPO's epsilon. Only rollouts with several optimizer steps have ratios other than 1."""
    ema_kl_weight: NotNegative = 0.0
    """Weight of |v - v_average|^2, where an average of the weights gives v_average; 0 saves its
    forward pass. Official: 1."""
    average: PolicyConfig = PolicyConfig(decay=0.3)
    """That average."""


class TeacherConfig(Section):
    """A frozen velocity field on the same base."""

    adapter: Place | None = Field(examples=["runs/teacher_ocr/adapter"])
    """Adapter folder or Hub id; null = the base itself."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """Its CFG scale; null = that of the student. A larger scale is distilled into the student; with
    a smaller one the student unlearns its own."""


class AnchorConfig(TeacherConfig):
    """Manifold-anchor regularisation (MAR): a second teacher for the images of every task."""

    weight: NotNegative = 0.04
    """Lambda, relative to the distillation loss."""


class StatesConfig(Section):
    """Which states of a rollout are trained, among those of rollout.window."""

    select: Literal["all", "window", "random", "low_noise", "high_noise"] = "all"
    """all, or `count` steps that are drawn anew for every update. window: steps in a row. random:
    any steps. low_noise, high_noise: by Beta(5, 2), Beta(2, 5) over the place in the window."""
    count: Count = 1
    """Number of steps (unused with all). The rollout stops at the last one."""


class StudentConfig(Section):
    """On-policy distillation: the loss between the student and its teachers."""

    gradient: Literal["pathwise", "policy", "published", "detached"] = "pathwise"
    """pathwise: through the weighted velocity distance. policy: a clipped policy gradient on the
    teacher's log-ratio. published: the official arithmetic. detached: its control, whose expected
    gradient is zero."""
    weighting: Literal["kl", "published", "mean", "velocity"] = "velocity"
    """w(sigma) of the distance w |v - v_teacher|^2; see flowalign.training.losses.step_weights. The
    defaults here and of states did best in docs/study.md. The paper has kl and all states."""
    states: StatesConfig = StatesConfig(select="high_noise")
    guidance: NotNegative | None = Field(default=None, examples=[1.0])
    """CFG scale of the student in the loss; null = rollout.guidance."""
    clip_range: Positive = 1e-4
    """PPO's epsilon (policy, published, detached)."""
    advantage_clip: Positive = 5.0
    """Advantages are clipped to +- this (policy, published, detached)."""
    reward_to_go: bool = False
    """policy: a step's advantage includes the log-ratios of all later trained steps."""
    reward_weight: NotNegative = 0.0
    """Weight of a GRPO loss on the tasks' rewards (section grpo) added to the distillation."""
    label_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the stored labels."""
    label_batch: Many = 64
    """(image, step) pairs per forward pass of the teachers."""
    diagnose_every: Many = 10
    """Rollouts between two measurements of the cosines between the tasks' gradients."""

    def problems(self) -> Iterator[str]:
        """Settings that belong to another gradient."""
        if self.gradient in ("published", "detached") and self.weighting != "published":
            yield (
                f"weighting: {self.weighting!r} with gradient {self.gradient!r}, which is the "
                "published arithmetic. Use weighting 'published', or gradient 'pathwise'."
            )
        if self.reward_to_go and self.gradient != "policy":
            yield f"reward_to_go: true, but gradient {self.gradient!r}; it is for 'policy' only."


class SftConfig(Section):
    """Cold start: flow matching on images that the routed teachers sample."""

    states: Steps = 4
    """Noise levels at which each image is trained."""


class OptimizerConfig(Section):
    """AdamW, its schedule and the size of its steps."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit needs bitsandbytes (the `gpu` extra)."""
    lr: Positive = 1e-4
    """Learning rate after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay at lr, or fall to 0 at the end of train.updates."""
    weight_decay: NotNegative = 1e-4
    """Decoupled weight decay."""
    betas: Annotated[tuple[Decay, Decay], _as_tuple] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Positive = 1.0
    """The gradient's norm is clipped to this."""
    warmup: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Updates of linear warm-up."""
    updates_per_rollout: Count = 1
    """Optimizer steps per rollout, each on an equal share of its prompts."""
    micro_batch: Many = 16
    """(image, step) pairs per forward and backward pass."""


class EmaConfig(Section):
    """An exponential moving average of the adapter: it is what is evaluated and saved."""

    decay: Decay = 0.9
    """Share of the old average that is kept. After n optimizer steps it is at most n / (9 + n), so
    0.9 is reached after 80."""
    every: Many = 8
    """Optimizer steps between two averagings. Before the first one, the adapter itself is evaluated
    and saved. Steps since the last one count in proportion."""


class TrainConfig(Section):
    """Length and housekeeping of the run."""

    updates: Many = 100
    """Number of rollouts."""
    checkpoint_every: Many = 20
    """Rollouts between two checkpoints."""
    keep: Many = 3
    """Number of newest checkpoints that are kept."""
    sample_every: Many = 20
    """Rollouts between two sample grids."""
    keep_samples: Count | None = Field(default=200, examples=[50])
    """Number of newest sample grids in <output>/samples that are kept, of rollouts and of
    evaluations each; the oldest one stays, too. null = keep all. What else grows with a run:
    metrics.jsonl by a line an update (about 0.5 KB), and the trackers' files."""
    deterministic: bool = False
    """The same run gives the same bits on a GPU as well, also after a resume. Backward passes are
    slower, attention is torch's own, and an operation without a deterministic form raises, in
    rewards as well. See flowalign.training.run.determinism."""
    max_invalid_share: Share = 0.5
    """The run stops when a larger share of a rollout could not be scored."""
    max_skipped: Count = 5
    """An optimizer step is skipped if its loss or gradient is NaN or infinite. The run stops after
    so many updates in a row without a step."""
    score_while_sampling: bool = True
    """Score a batch of images while the next is sampled (not groupwise rewards)."""
    score_seconds: Seconds | None = 1800.0
    """A batch of images is invalid if its reward takes longer; null = wait for ever."""
    timeout_seconds: Seconds | None = Field(default=None, examples=[7200.0])
    """With several processes, the run ends when one has waited this long for another; null = two
    hours. Each batch of a reward that hangs takes score_seconds."""
    max_minutes: Positive | None = Field(default=None, examples=[1430.0])
    """For a queue: the run ends with a checkpoint and exit status 75 before an update that would
    probably end later than this many minutes after the command's start. One update is always
    done. A recipe has a key of its own, `max_minutes`, for all its stages together."""
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Where accelerate logs metrics, the config, sample grids and the tables of evaluations.
    TensorBoard's files are in <output>/tensorboard. A W&B run has the name of the output folder; a
    run that is resumed goes on in the same W&B run."""
    project: str = Field(default="flowalign", pattern=r"^\w[\w .-]{0,99}$")
    """Name of the project in the trackers; TensorBoard makes a folder of it."""


class BenchmarkConfig(Section):
    """Held-out prompts and the rewards that score their images."""

    name: FileName = Field(examples=["ocr"])
    """Its name in tables and files."""
    prompts: Place = Field(examples=["tiny/ocr_test", "prompts/test.jsonl"])
    """A .txt, a .jsonl, or tiny/NAME."""
    limit: Many | None = Field(default=None, examples=[128])
    """Only the first prompts of the file; null = all. A file that is sorted by tag starts with its
    first tags. A larger limit later reuses the images that are there."""
    images: Count = 1
    """Images per prompt, each with its own noise. The official GenEval has 4."""
    size: Pair | None = Field(default=None, examples=[[512, 768]])
    """[height, width] of its images, one of the model's sizes; null = the first."""
    reward: RewardConfig | None = None
    """Scores its images. The score has the name of the benchmark."""
    rewards: dict[FileName, RewardConfig] = Field(
        default={}, examples=[{"pick": {"name": "pickscore"}}]
    )
    """Several rewards in place of `reward`. Images are sampled once, and each reward gives a score
    of its own, named NAME_JUDGE."""
    layout: Literal["geneval", "t2i_compbench", "dpg_bench"] | None = None
    """Also write the images for the official scripts, to <output>/layouts/MODEL/NAME. Without
    `reward` and `rewards` nothing is scored."""

    @property
    def judges(self) -> dict[str, RewardConfig]:
        """{name of a score in tables and files: its reward}."""
        own = {self.name: self.reward} if self.reward else {}
        return own | {f"{self.name}_{judge}": spec for judge, spec in self.rewards.items()}

    @property
    def reward_keys(self) -> dict[str, RewardConfig]:
        """{key below the benchmark: reward}, in the order of `judges`."""
        own = {"reward": self.reward} if self.reward else {}
        return own | {f"rewards.{judge}": spec for judge, spec in self.rewards.items()}

    def problems(self) -> Iterator[str]:
        """The images are scored by `reward` or `rewards`, or by neither for a layout alone."""
        if self.reward and self.rewards:
            yield "rewards: there is a `reward`, too. Make it one of the `rewards`."
        elif not self.judges and not self.layout:
            yield (
                "reward: missing. Add `reward:` with the keys name, options; or `rewards:` for "
                "several judges; or `layout:` to sample the images only."
            )


class SamplingConfig(Section):
    """How images are sampled for an evaluation."""

    steps: Steps = 10
    """Denoising steps, without noise (Euler)."""
    guidance: NotNegative = 4.5
    """CFG scale; 1 = no unconditional pass."""
    seed: Seed = 1234
    """Seed of the initial noise, the same for every model."""
    batch_size: Many = 32
    """Images per forward pass of a process."""


class EvaluationConfig(Section):
    """Evaluation on the validation prompts while training."""

    every: Many = 20
    """Rollouts between two evaluations."""
    prompts: Many = 128
    """At most this many prompts per task: a fixed subset of the file with every metadata `tag` in
    its proportion. A larger subset contains a smaller one."""
    steps: Steps | None = Field(default=None, examples=[40])
    """Denoising steps; null = rollout.steps."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """CFG scale; null = rollout.guidance."""
    batch_size: Many | None = Field(default=None, examples=[16])
    """Images per forward pass; null = rollout.batch_size."""
    seed: Seed = 1234
    """Seed of the initial noise, the same at every evaluation."""
    max_invalid_share: Share = 0.05
    """An evaluation does not count if a larger share of a task's images could not be scored: it
    never selects the best adapter. The run stops if its last evaluation does not count."""
    watch: list[BenchmarkConfig] = Field(default=[], max_length=LISTED)
    """Benchmarks that are scored but not trained on. A warning is logged when one falls."""

    def problems(self) -> Iterator[str]:
        """A layout, whose images no run keeps."""
        for index, benchmark in enumerate(self.watch):
            if benchmark.layout:
                yield (
                    f"watch.{index}.layout: {benchmark.layout!r}, but a run keeps no images. "
                    "Use it under `benchmarks` of an evaluation (`stage: eval`)."
                )


class AlarmConfig(Section):
    """An alarm at images that drift from the base model's: see docs/alarm.md."""

    warn: Positive = 3.0
    """Sigmas of a statistic's drift beyond which it is warned of. One sigma is half of what honest
    training moved it; see flowalign.training.report.drift.compare."""
    stop: Positive | None = Field(default=None, examples=[6.0])
    """Sigmas beyond which the run ends; null = never."""

    def problems(self) -> Iterator[str]:
        """A run that would end before it is warned of."""
        if self.stop is not None and self.stop < self.warn:
            yield f"stop: {self.stop:g} is below warn = {self.warn:g}. Use more, or null."


class TrainingAlarmConfig(AlarmConfig):
    """The same for a run, which samples the base for it."""

    every: Many = 4
    """Rollouts between two checks. Evaluations are checked always. 4 rollouts cost about 3 % of a
    run."""
    images: Annotated[int, Field(ge=2, le=100_000)] = 32
    """Images that the base samples for a check, two of a prompt: of a rollout at most a quarter of
    its images; of an evaluation so many a task."""


@dataclass(frozen=True)
class Judged:
    """Prompts whose images are scored: a task or a benchmark."""

    place: str  # in the config
    name: str
    rewards: Mapping[str, RewardConfig]  # by their key below the place
    prompts: Mapping[str, str]  # prompt sets by their key below the place


class Stage(Section):
    """The keys that all configs have; `load(..., stage=Stage)` accepts any of them."""

    stage: str
    """What is done: a key of STAGES."""
    output: Place = Field(min_length=1, examples=["runs/teacher_ocr"])
    """Folder of the run."""
    model: ModelConfig

    @property
    def inputs(self) -> dict[str, str]:
        """{place in the config: folder or Hub id} of every adapter that the stage reads."""
        return {}

    @property
    def scales(self) -> dict[str, float]:
        """{place in the config: guidance scale} of all that are given there."""
        return {}

    @property
    def credited(self) -> AdvantageConfig | None:
        """How its rewards become advantages; None where it does not learn from rewards."""
        return None

    @property
    def judged(self) -> list[Judged]:
        """Every task and benchmark; empty for a stage that samples no images."""
        return []


class Job(Stage):
    """What `flowalign train` runs."""


class TrainingStage(Job):
    """A training run. What it learns from depends on the stage."""

    algorithm: ClassVar[str]
    """module:Class of what is learnt (`flowalign.training.algorithm.Algorithm`)."""
    seed: Seed = 0
    """Seed of prompts, noise and initial weights."""
    lora: LoraConfig = LoraConfig()
    tasks: list[TaskConfig] = Field(min_length=1, max_length=LISTED)
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig | None = EmaConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig | None = EvaluationConfig()
    alarm: TrainingAlarmConfig | None = TrainingAlarmConfig()
    """null = no alarm at drift."""

    @property
    def guidance(self) -> float:
        """The CFG scale at which the adapter is trained."""
        return self.rollout.guidance

    def guidance_of(self, teacher: TeacherConfig) -> float:
        """The CFG scale of a teacher or anchor."""
        return self.guidance if teacher.guidance is None else teacher.guidance

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the loss needs scores, and so decoded images, of every rollout."""
        return False

    @property
    def evaluates(self) -> bool:
        """Whether held-out scores are taken while training; they choose the adapter that is
        kept."""
        return self.evaluation is not None and any(task.evaluated for task in self.tasks)

    @property
    def needs_actions(self) -> bool:
        """Whether the loss needs the sampled successors of the states and their log-probs."""
        return self.learns_from_rewards

    @property
    def needs_means(self) -> bool:
        """Whether the loss needs the means that those successors were sampled around."""
        return False

    @property
    def needs_noise(self) -> str:
        """What the stage would lack without noise in its rollouts; "" = nothing."""
        return ""

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """How evaluations sample: as the rollouts, where `evaluation` says nothing else."""
        evaluation, rollout = self.evaluation or EvaluationConfig(), self.rollout
        guidance = rollout.guidance if evaluation.guidance is None else evaluation.guidance
        return SamplingConfig(
            steps=evaluation.steps or rollout.steps,
            guidance=guidance,
            seed=evaluation.seed,
            batch_size=evaluation.batch_size or rollout.batch_size,
        )

    @property
    def batch_sizes(self) -> dict[str, int]:
        """{place in the config: rows of a forward pass}: what a run that lacks memory lowers."""
        return {
            "rollout.batch_size": self.rollout.batch_size,
            "optimizer.micro_batch": self.optimizer.micro_batch,
        }

    @property
    def clip_ranges(self) -> dict[str, float]:
        """{place in the config: clip range} of ratios of transitions."""
        return {}

    @property
    def watched(self) -> list[BenchmarkConfig]:
        """The benchmarks of evaluation.watch."""
        return self.evaluation.watch if self.evaluation else []

    @property
    def judged(self) -> list[Judged]:
        """The watched benchmarks and the tasks."""
        tasks = [
            Judged(
                f"tasks.{index}",
                task.name,
                {"reward": task.reward} if task.reward else {},
                _given({"prompts": task.prompts, "validation": task.validation}),
            )
            for index, task in enumerate(self.tasks)
        ]
        return [*_judged("evaluation.watch", self.watched), *tasks]

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.train.updates * self.optimizer.updates_per_rollout

    @property
    def labellers(self) -> dict[str, TeacherConfig]:
        """{place in the config: teacher}, with the anchor; empty for a stage without teachers."""
        return {}

    @property
    def scales(self) -> dict[str, float]:
        """Of rollouts, evaluations and teachers."""
        given = {f"{place}.guidance": who.guidance for place, who in self.labellers.items()}
        given["evaluation.guidance"] = self.evaluation.guidance if self.evaluation else None
        known = {place: scale for place, scale in given.items() if scale is not None}
        return {"rollout.guidance": self.rollout.guidance, **known}

    @property
    def routing(self) -> dict[str, str]:
        """Task -> name of its teacher; empty for a stage without teachers."""
        return {}

    @property
    def mixtures(self) -> dict[str, float]:
        """{place in the config: CFG scale} of the labellers whose scale is not the one that the
        student is trained at."""
        scales = {place: self.guidance_of(teacher) for place, teacher in self.labellers.items()}
        return {place: scale for place, scale in scales.items() if scale != self.guidance}

    @property
    def inputs(self) -> dict[str, str]:
        """{place in the config: folder or Hub id} of every adapter that the stage reads."""
        adapters = {place: teacher.adapter for place, teacher in self.labellers.items()}
        if "anchor" in adapters:  # the other places name a teacher, whose one file this is
            adapters["anchor.adapter"] = adapters.pop("anchor")
        return _given({"lora.init": self.lora.init} | adapters)

    def problems(self) -> Iterator[str]:
        """Noise, group size, prompts, rewards and names that do not fit what is learnt."""
        rollout, updates = self.rollout, self.optimizer.updates_per_rollout
        if rollout.kind == "ode" and self.needs_noise:
            yield f"rollout.kind: 'ode' adds no noise, so {self.needs_noise}. Use 'sde' or 'cps'."
        elif rollout.noise_level == 0 and self.needs_noise:
            yield f"rollout.noise_level: 0 adds no noise, so {self.needs_noise}. Use 0.7, say."
        if self.learns_from_rewards and rollout.copies < 2:
            yield (
                f"rollout.copies: got {rollout.copies}; an advantage is relative to the other "
                "images of a prompt. Use 2 or more."
            )
        if rollout.prompts % updates:  # advantages need the whole group of a prompt in one step
            yield (
                f"rollout.prompts: {rollout.prompts} prompts cannot be shared evenly among "
                f"optimizer.updates_per_rollout = {updates}; a group stays whole. Use a multiple "
                f"of {updates}, for example {-(-rollout.prompts // updates) * updates}."
            )
        for index, task in enumerate(self.tasks):
            text = "Add `reward:` with the keys name, options"
            if task.reward is None and self.learns_from_rewards:
                yield f"tasks.{index}.reward: missing, and this run learns from it. {text}."
            elif task.reward is None and task.validation and self.evaluation:
                yield (
                    f"tasks.{index}.reward: missing, and `evaluation` is on. {text}; or leave out "
                    "`validation`, and the task is not evaluated."
                )
            if task.validation is None and self.evaluation and task.reward:
                yield (
                    f"tasks.{index}.validation: missing, though `evaluation` is on. Name a prompt "
                    "set that is not trained on, or write `evaluation: null`."
                )
        if self.watched and not self.evaluates:
            yield (
                "evaluation.watch: no task has `validation` and `reward`, so nothing is evaluated. "
                "Add both to a task, or leave `watch` out."
            )
        tasks = {f"tasks.{index}": [task.name] for index, task in enumerate(self.tasks)}
        watched = {
            f"evaluation.watch.{i}": benchmark.judges for i, benchmark in enumerate(self.watched)
        }
        yield from _same_names({**tasks, **watched})
        sizes = {f"tasks.{index}": task.size for index, task in enumerate(self.tasks)}
        sizes |= {f"evaluation.watch.{i}": b.size for i, b in enumerate(self.watched)}
        yield from self.model.size_problems(sizes)

    def buckets(self, task: TaskConfig) -> list[int]:
        """The numbers of the sizes that a task's images have."""
        return [self.model.bucket(task.size)] if task.size else list(range(len(self.model.sizes)))


class RewardStage(TrainingStage):
    """A teacher that learns from the rewards of one or more tasks."""

    @property
    def learns_from_rewards(self) -> bool:
        """Always: there are no teachers."""
        return True

    def problems(self) -> Iterator[str]:
        """Those of every training run; teachers, which are not asked."""
        yield from super().problems()
        for index, task in enumerate(self.tasks):
            if task.teacher is not None:
                yield (
                    f"tasks.{index}.teacher: {task.teacher!r}, but the stage {self.stage!r} has no "
                    "teachers. Leave it out, or use the stage 'opd'."
                )


class GrpoStage(RewardStage):
    """Group-relative policy optimisation (GRPO) on the rewards of one or more tasks."""

    algorithm = "flowalign.teachers.grpo:Grpo"
    stage: Literal["grpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards."""
    grpo: GrpoConfig = GrpoConfig()

    @property
    def credited(self) -> AdvantageConfig:
        """The section `grpo`."""
        return self.grpo

    @property
    def clip_ranges(self) -> dict[str, float]:
        """That of grpo."""
        return {"grpo.clip_range": self.grpo.clip_range}

    @property
    def needs_means(self) -> bool:
        """With GRPO-Guard's ratio."""
        return self.grpo.ratio == "guard"

    @property
    def needs_noise(self) -> str:
        """The actions that differ within a group."""
        return "grpo has nothing to learn from"


class ForwardStage(RewardStage):
    """Rewards again, learnt from clean images with noise added: any sampler will do, and no
    trajectory is kept."""

    @property
    def forward(self) -> ForwardConfig:
        """The section of the stage's own algorithm."""
        raise NotImplementedError

    @property
    def credited(self) -> AdvantageConfig:
        """The same section."""
        return self.forward

    @property
    def policies(self) -> dict[str, PolicyConfig]:
        """{adapter beside the trained one: how it follows that}; the one named "old" samples."""
        raise NotImplementedError

    @property
    def guidance(self) -> float:
        """The CFG scale at which the adapter is trained."""
        own = self.forward.guidance
        return self.rollout.guidance if own is None else own

    @property
    def needs_actions(self) -> bool:
        """Never: there is no ratio of transitions."""
        return False

    def problems(self) -> Iterator[str]:
        """Those of every teacher; noise in rollouts, groups that are all alike, and more noise
        levels than there are."""
        yield from super().problems()
        rollout, forward, name = self.rollout, self.forward, self.stage
        if rollout.kind != "ode":
            yield (
                f"rollout.kind: {rollout.kind!r}, but {name} learns from clean images, and noise "
                "on the way only makes them worse. Use 'ode'."
            )
        if rollout.shared_noise:
            yield (
                "rollout.shared_noise: true without noise on the way makes all images of a prompt "
                "the same. Use false."
            )
        if rollout.window is not None:
            yield f"rollout.window: {name} trains no states of a rollout. Leave it out."
        start, stop = steps_within(rollout.steps, forward.within)
        if forward.levels == "sampler" and forward.states > stop - start:
            yield (
                f"{name}.states: {forward.states} noise levels, but {name}.within = "
                f"{list(forward.within)} holds only {max(stop - start, 0)} of the sampler's "
                f"{rollout.steps} steps. Use at most as many, or levels 'stratified'."
            )


class NftStage(ForwardStage):
    """DiffusionNFT on the rewards of one or more tasks."""

    algorithm = "flowalign.teachers.nft:Nft"
    stage: Literal["nft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards, on clean images."""
    nft: NftConfig = NftConfig()

    @property
    def forward(self) -> NftConfig:
        """The section `nft`."""
        return self.nft

    @property
    def policies(self) -> dict[str, PolicyConfig]:
        """The old policy, where it can differ from the student during an update: where it is an
        average, or a rollout has several optimizer steps."""
        needed = self.nft.old.decay > 0 or self.optimizer.updates_per_rollout > 1
        return {"old": self.nft.old} if needed else {}


class AwmStage(ForwardStage):
    """Advantage weighted matching on the rewards of one or more tasks."""

    algorithm = "flowalign.teachers.awm:Awm"
    stage: Literal["awm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards, on clean images."""
    awm: AwmConfig = AwmConfig()

    @property
    def forward(self) -> AwmConfig:
        """The section `awm`."""
        return self.awm

    @property
    def policies(self) -> dict[str, PolicyConfig]:
        """The student's weights at the rollout, where that has several optimizer steps; and their
        average, where ema_kl_weight asks for it."""
        own = {"old": PolicyConfig()} if self.optimizer.updates_per_rollout > 1 else {}
        return own | ({"average": self.awm.average} if self.awm.ema_kl_weight > 0 else {})


class DistillationStage(TrainingStage):
    """A student that learns from teachers: each task is routed to one of them."""

    teachers: dict[FileName, TeacherConfig] = Field(
        min_length=1, max_length=LISTED, examples=[{"ocr": {"adapter": "runs/ocr"}}]
    )
    """Teachers by name."""

    @property
    def routing(self) -> dict[str, str]:
        """Task -> name of its teacher."""
        return {task.name: task.teacher or task.name for task in self.tasks}

    @property
    def labellers(self) -> dict[str, TeacherConfig]:
        """{place in the config: teacher}."""
        return {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}

    def problems(self) -> Iterator[str]:
        """Those of every training run; tasks without a teacher, teachers without a task."""
        yield from super().problems()
        names, routing = sorted(self.teachers), self.routing
        for index, task in enumerate(self.tasks):
            if routing[task.name] not in names:
                yield (
                    f"tasks.{index}.teacher: task {task.name!r} is routed to "
                    f"{routing[task.name]!r}, and there are only {names}. Name one of these, or "
                    "add that teacher under `teachers`."
                )
        for name in sorted(self.teachers.keys() - set(routing.values())):
            yield f"teachers.{name}: no task is routed to it. Give one `teacher: {name}`."


class OpdStage(DistillationStage):
    """A student by on-policy distillation from routed teachers."""

    algorithm = "flowalign.training.student.opd:Opd"
    stage: Literal["opd"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers, on the student's own trajectories."""
    student: StudentConfig = StudentConfig()
    anchor: AnchorConfig | None = None
    """The anchor of MAR; null = none."""
    grpo: GrpoConfig = GrpoConfig()
    """Only for student.reward_weight > 0."""

    @property
    def guidance(self) -> float:
        """The CFG scale at which the student is trained."""
        own = self.student.guidance
        return self.rollout.guidance if own is None else own

    @property
    def learns_from_rewards(self) -> bool:
        """Whether a GRPO loss is added to the distillation."""
        return self.student.reward_weight > 0

    @property
    def credited(self) -> AdvantageConfig | None:
        """The section `grpo`, if rewards are learnt from."""
        return self.grpo if self.learns_from_rewards else None

    @property
    def needs_actions(self) -> bool:
        """Whether the loss has a ratio of new and old policy."""
        return self.student.gradient != "pathwise" or self.learns_from_rewards

    @property
    def needs_means(self) -> bool:
        """With GRPO-Guard's ratio in the loss on rewards."""
        return self.learns_from_rewards and self.grpo.ratio == "guard"

    @property
    def batch_sizes(self) -> dict[str, int]:
        """With that of labels."""
        return super().batch_sizes | {"student.label_batch": self.student.label_batch}

    @property
    def clip_ranges(self) -> dict[str, float]:
        """Those of the losses that have a ratio."""
        rewarded = {"grpo.clip_range": self.grpo.clip_range} if self.learns_from_rewards else {}
        gradient = self.student.gradient != "pathwise"
        return rewarded | ({"student.clip_range": self.student.clip_range} if gradient else {})

    @property
    def labellers(self) -> dict[str, TeacherConfig]:
        """{place in the config: teacher}, with the anchor."""
        return super().labellers | ({"anchor": self.anchor} if self.anchor else {})

    @property
    def needs_noise(self) -> str:
        """What the student would lack without noise in its rollouts; "" = nothing."""
        if self.learns_from_rewards:
            return "the reward (student.reward_weight) has nothing to learn from"
        if self.student.gradient != "pathwise":
            return f"student.gradient {self.student.gradient!r} has no log-probabilities"
        if self.student.weighting in ("kl", "published"):
            return f"student.weighting {self.student.weighting!r} (a KL) is infinite"
        return ""

    def problems(self) -> Iterator[str]:
        """Those of every student; a policy of two CFG scales, and more states than there are."""
        yield from super().problems()
        # PPO's ratio compares the new policy with the one that sampled, at its CFG scale.
        if self.needs_actions and self.guidance != self.rollout.guidance:
            yield (
                f"student.guidance: {self.guidance}, but the rollout has {self.rollout.guidance}: "
                "the ratio of new and old policy needs one policy. Use the same, or gradient "
                "'pathwise' without a reward."
            )
        states, width = self.student.states, self.rollout.width
        if states.select != "all" and states.count > width:
            yield (
                f"student.states.count: {states.count}, and rollout.window has only {width} steps. "
                f"Use at most {width}."
            )


class SftStage(DistillationStage):
    """A cold start from routed teachers' images."""

    algorithm = "flowalign.training.student.sft:Sft"
    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers' images."""
    sft: SftConfig = SftConfig()


class MergeStage(Job):
    """A merge of adapters of one base; see flowalign.teachers.merge."""

    stage: Literal["merge"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Add weight updates."""
    adapters: list[Place] = Field(
        min_length=2, max_length=LISTED, examples=[["runs/a/adapter", "runs/b/adapter"]]
    )
    """Adapter folders or Hub ids."""
    weights: list[float] | None = Field(default=None, examples=[[0.5, 0.5]])
    """One per adapter; null = 1 each, the sum. 1/n each is the average."""
    method: Literal["concat", "svd", "ties", "dare"] = "concat"
    """concat is exact, and the ranks add. A student that starts from it has the summed rank."""
    rank: Annotated[int, Field(ge=1, le=8192)] | None = Field(default=None, examples=[32])
    """Rank of the result (not for concat); null = the largest rank given. svd: at most their
    sum."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the entries that ties and dare keep."""
    seed: Seed = 0
    """Seed of the entries that dare drops."""
    lines: Annotated[tuple[float, float], _as_tuple] | None = Field(
        default=None, examples=[[0.5, 1]]
    )
    """LiNeS: scales of the first and the last block."""

    @property
    def inputs(self) -> dict[str, str]:
        """{place in the config: folder or Hub id} of every adapter that the stage reads."""
        return {f"adapters.{index}": source for index, source in enumerate(self.adapters)}

    def problems(self) -> Iterator[str]:
        """Weights that are not one an adapter; a rank that `concat` does not have."""
        if self.weights is not None and len(self.weights) != len(self.adapters):
            count = len(self.adapters)
            yield f"weights: {len(self.weights)} for {count} adapters. Give one each, or null."
        if self.rank is not None and self.method == "concat":
            yield f"rank: {self.rank}, but 'concat' adds the ranks. Use 'svd', or leave it out."


def _has_stage(name: str) -> str:
    if name == "recipe" or name not in stage_names():
        possible = ", ".join(repr(stage) for stage in stage_names() if stage != "recipe")
        raise PydanticKnownError("literal_error", {"expected": possible})
    return name


Variant = dict[Annotated[str, AfterValidator(_has_stage)], dict[str, Any]]
"""Kind of stage -> keys of its config."""


class RecipeStage(Job):
    """Stages that run one after the other, each in a folder of its name under `output`."""

    stage: Literal["recipe"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Run other stages."""
    seed: Seed = 0
    """Seed of every stage that sets none."""
    stages: dict[FileName, dict[str, Any]] = Field(
        min_length=1, max_length=LISTED, examples=[{"ocr": {"use": "teacher_ocr.yaml"}}]
    )
    """{name: keys of a stage's config}. They are laid over the file that `use` names (relative to
    this one); `set` lists changes as on the command line. A value `stage:NAME` is the adapter of an
    earlier stage."""
    max_minutes: Positive | None = Field(default=None, examples=[1430.0])
    """As `train.max_minutes`, in place of those of its stages."""
    variant: Variant = Field(default={}, examples=[{"grpo": {"rollout": {"batch_size": 4}}}])
    """{kind of stage: keys laid over all stages of that kind}: the same recipe for other hardware.
    `--variant FILE` on the command line sets it."""

    def problems(self) -> Iterator[str]:
        """Stages that would share a folder on some disks."""
        yield from _same_names({f"stages.{name}": [name] for name in self.stages})


class FidelityConfig(Section):
    """Fréchet distance between the features of the images and of reference images."""

    features: Place = Field(default="tiny", examples=["tiny", "my_features:dino"])
    """A CLIP (`tiny`, a folder, a Hub id), or package.module:function, [B,3,H,W] -> [B,D]."""
    reference: Place = Field(default="tiny", examples=["tiny", "data/coco_val2017"])
    """`tiny` (scenes drawn from the benchmarks' own metadata), or a folder of images."""


class ReportConfig(Section):
    """What report.html shows."""

    title: str | None = Field(default=None, examples=["Flow-OPD on the tiny world"])
    """Its heading; null = the name of the base model."""
    images: Annotated[int, Field(ge=0)] = 24
    """Number of prompts of a benchmark whose images are shown, evenly spaced over the set."""


class EvalStage(Stage):
    """An evaluation of the base model and of adapters on it."""

    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Evaluate models."""
    models: dict[FileName, Place | None] = Field(
        default={"base": None},
        min_length=1,
        max_length=LISTED,
        examples=[{"base": None, "ocr": "runs/ocr/adapter"}],
    )
    """{name: adapter folder, or null for the base model}. All are compared with the first."""
    compare: dict[str, list[str]] = Field(default={}, examples=[{"student": ["ocr", "merged"]}])
    """{name: other models that it is compared with}, besides the first."""
    benchmarks: list[BenchmarkConfig] = Field(min_length=1, max_length=LISTED)
    sampling: SamplingConfig = SamplingConfig()
    fidelity: FidelityConfig | None = None
    report: ReportConfig = ReportConfig()
    alarm: AlarmConfig | None = AlarmConfig()
    """Of the images that the report shows; null = none."""
    score_seconds: Seconds | None = 1800.0
    """A batch of images is invalid if its reward takes longer; null = wait for ever."""
    timeout_seconds: Seconds | None = Field(default=None, examples=[7200.0])
    """As train.timeout_seconds of a training run."""
    max_invalid_share: Share = 0.05
    """The evaluation stops without a table if a larger share of a benchmark's images could not be
    scored."""
    keep_images: bool = False
    """Keep every image in <output>/images, so that another reward can score it later; false = keep
    those that the report shows."""

    @property
    def inputs(self) -> dict[str, str]:
        """{place in the config: folder or Hub id} of every adapter that the stage reads."""
        return _given({f"models.{name}": folder for name, folder in self.models.items()})

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """The section `sampling`."""
        return self.sampling

    @property
    def judged(self) -> list[Judged]:
        """The benchmarks."""
        return _judged("benchmarks", self.benchmarks)

    @property
    def scales(self) -> dict[str, float]:
        """That of its images."""
        return {"sampling.guidance": self.sampling.guidance}

    def problems(self) -> Iterator[str]:
        """Names that tables and files cannot hold or tell apart; models that are not there."""
        places = {f"benchmarks.{i}": benchmark for i, benchmark in enumerate(self.benchmarks)}
        yield from self.model.size_problems({place: b.size for place, b in places.items()})
        names = _same_names({place: [benchmark.name] for place, benchmark in places.items()})
        columns = _same_names({place: benchmark.judges for place, benchmark in places.items()})
        yield from _same_names({f"models.{name}": [name] for name in self.models})
        yield from dict.fromkeys([*names, *columns])  # a single `reward` is in both: said once
        for place, benchmark in places.items():
            if benchmark.name in ("average", "fidelity"):
                yield f"{place}.name: every table has its own column {benchmark.name!r}. Rename it."
        for name, others in self.compare.items():
            for model in (m for m in (name, *others) if m not in self.models):
                close = close_to(model, self.models)
                hint = f" Did you mean {close!r}?" if close else ""
                possible = ", ".join(self.models)
                yield f"compare.{name}: no model is named {model!r}.{hint} Possible: {possible}."
            if name in others:
                yield f"compare.{name}: compared with itself. Leave it out."


def _given(sources: Mapping[str, str | None]) -> dict[str, str]:
    """Without what is null."""
    return {place: source for place, source in sources.items() if source is not None}


def _judged(place: str, benchmarks: Sequence[BenchmarkConfig]) -> list[Judged]:
    """Benchmarks, which are listed at a place."""
    return [
        Judged(f"{place}.{index}", b.name, b.reward_keys, {"prompts": b.prompts})
        for index, b in enumerate(benchmarks)
    ]


def _same_names(names: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Names that are given at more than one place. names: {place in the config: names there}."""
    places: dict[str, list[tuple[str, str]]] = {}
    for place, own in names.items():
        for name in own:
            # A disk may take these for one: it ignores the case, or how an accent is written.
            alike = unicodedata.normalize("NFKC", name).casefold()
            places.setdefault(alike, []).append((place, name))
    for where in places.values():
        if len(where) > 1:
            listed = " and ".join(repr(name) for name in dict.fromkeys(name for _, name in where))
            text = f"all are named {listed} in tables, logs and folders. Give each its own name."
            yield f"{', '.join(place for place, _ in where)}: {text}"


STAGES: dict[str, type[Stage]] = {  # by the value of `stage`
    "grpo": GrpoStage,
    "nft": NftStage,
    "awm": AwmStage,
    "opd": OpdStage,
    "sft": SftStage,
    "merge": MergeStage,
    "recipe": RecipeStage,
    "eval": EvalStage,
}


PLUGINS = "flowalign.algorithms"  # entry points: name of a stage -> its config class


def stage_names() -> list[str]:
    """The stages that there are: those of STAGES, then those of plugins."""
    return [*STAGES, *sorted({point.name for point in entry_points(group=PLUGINS)} - {*STAGES})]


def stage_class(name: str) -> type[Stage]:
    """The config class of a stage. A plugin is imported now; ConfigError if it cannot be."""
    if name in STAGES:
        return STAGES[name]
    (point, *_) = entry_points(group=PLUGINS, name=name)
    try:
        kind = point.load()
        if not issubclass(kind, TrainingStage):
            raise TypeError(f"{kind.__name__} is no TrainingStage")
    except Exception as error:
        text = f"stage: the plugin {name!r} ({point.value}) cannot be loaded: {error}"
        raise ConfigError([text]) from error
    return kind


def command(stage: str) -> str:
    """What runs a stage."""
    return "flowalign train" if issubclass(STAGES[stage], Job) else "flowalign eval"
