"""What is learnt, from what, and by which steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from flowalign.config.section import (
    Count,
    Decay,
    FileName,
    Location,
    Many,
    NotNegative,
    Pair,
    Positive,
    Section,
    Share,
    Steps,
    as_tuple,
)
from flowalign.system.files import expanded


def _expanded(option: Any) -> Any:
    """An option with the texts in it that begin as paths do, `expanded`."""
    if isinstance(option, dict):
        return {key: _expanded(value) for key, value in option.items()}
    if isinstance(option, list):
        return list(map(_expanded, option))
    path = isinstance(option, str) and re.match(r"(~[\w.-]*|\$\w+|\$\{\w+\})/", option)
    return expanded(option) if path else option


class RewardConfig(Section):
    """A reward by its registered name."""

    name: str = Field(examples=["ocr"])
    """Name in flowalign.rewards, built in or plugged in."""
    options: Annotated[dict[str, Any], AfterValidator(_expanded)] = {}
    """Keyword arguments of the reward."""


class TaskConfig(Section):
    """A named group of prompts with its own reward or teacher."""

    name: FileName = Field(examples=["ocr"])
    """Its name in logs, and of its teacher if `teacher` is null."""
    prompts: Location = Field(examples=["tiny/ocr_train", "prompts/train.jsonl"])
    """Training prompts: a .txt, a .jsonl, or tiny/NAME."""
    validation: Location | None = Field(default=None, examples=["tiny/ocr_test", "my_test.jsonl"])
    """Held-out prompts, in the same formats."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of every batch, relative to the other tasks."""
    reward: RewardConfig | None = None
    """Scores its images. opd and sft use it, with `validation`, only to evaluate: a task without
    both is trained and not evaluated. An opd run in which every task has `validation` and none a
    reward keeps the adapter of the least distance to its targets (student.fixed_prompts)."""
    teacher: str | None = Field(default=None, examples=["ocr"])
    """The teacher that labels its images (opd, sft); null = the teacher with the task's name."""
    size: Pair | None = Field(default=None, examples=[[512, 768]])
    """[height, width] of its images, one of the model's sizes; null = all of them in turn, and the
    first in evaluations. A rollout holds tasks of one size only."""

    @property
    def evaluated(self) -> bool:
        """Whether there are held-out prompts, and a reward that scores them."""
        return self.validation is not None and self.reward is not None


AdvantageName = Literal["group_std", "batch_std", "gaussian", "gdpo", "adora", "gated"]


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


class ForwardConfig(AdvantageConfig):
    """Learning from clean images, to which noise is added: at which noise levels."""

    states: Steps = 4
    """Noise levels at which each image is trained."""
    own_levels: bool = True
    """Each image has noise levels of its own. false = all images of an update share them."""
    levels: Literal["sampler", "random", "stratified"] = "stratified"
    """sampler: they are steps of the rollout's own schedule, one drawn in each of `states` parts of
    about equal size. random: any `states` of these steps. stratified: drawn in as many parts of the
    continuous schedule."""
    within: Annotated[tuple[Share, Share], as_tuple] = (0.0, 0.99)
    """The part of the way from noise (0) to the image (1) that they are drawn from."""
    guidance: NotNegative | None = Field(default=None, examples=[1.0])
    """CFG scale in the loss; null = rollout.guidance."""
    kl_weight: NotNegative = 0.0
    """Weight of |v - v_base|^2; 0 saves its forward pass."""

    def problems(self) -> Iterator[str]:
        """A part of the way that is none."""
        low, high = self.within
        if low >= high:
            yield f"within: [{low}, {high}] is empty. Use [0, 1] for the whole way."


class NftConfig(ForwardConfig):
    """DiffusionNFT (2509.16117)."""

    advantage: AdvantageName = "batch_std"
    """Variant of flowalign.credit, as in `grpo`."""
    beta: Positive = 1.0
    """Distance of the positive and the negative velocity from the old policy's. Official: 1, or 0.1
    for OCR and for several rewards."""
    adv_mode: Literal["all", "positive_only", "negative_only", "binary", "one_only"] = "all"
    """Which advantages count. positive_only, negative_only: the others are 0. binary: their sign.
    one_only: 1 where they are above 0, else 0."""
    old: PolicyConfig = PolicyConfig()
    """The old policy, which samples. Official: {decay: 0.5} for GenEval and PickScore; {decay:
    0.999, rise: 0.0075, after: 75} for OCR. The default, the trained weights, is ours."""


class AwmConfig(ForwardConfig):
    """Advantage weighted matching (2509.25050)."""

    advantage: AdvantageName = "batch_std"
    """Variant of flowalign.credit, as in `grpo`."""
    advantage_clip: Positive = 1.0
    """Advantages are clipped to +- this, as in Flow-Factory. The authors clip to +- 5 and divide by
    5: the same as 5 here, with kl_weight, ema_kl_weight and optimizer.max_grad_norm times 5."""
    within: Annotated[tuple[Share, Share], as_tuple] = (0.01, 0.9)
    """The part of the way from noise (0) to the image (1) that noise levels are drawn from."""
    weighting: Literal["ghuber", "uniform", "t", "t2", "huber"] = "ghuber"
    """How the matching error becomes a log-likelihood; see
    flowalign.teachers.awm.awm_log_prob."""
    ghuber_power: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The power of ghuber."""
    clip_range: Positive = 1.0
    """PPO's epsilon. Only rollouts with several optimizer steps have ratios other than 1."""
    ema_kl_weight: NotNegative = 0.0
    """Weight of |v - v_average|^2, where an average of the weights gives v_average; 0 saves its
    forward pass. Official: 1."""
    average: PolicyConfig = PolicyConfig(decay=0.3)
    """That average."""


class LabellerConfig(Section):
    """A frozen velocity field: a base, and perhaps an adapter of it."""

    adapter: Location | None = Field(examples=["runs/teacher_ocr/adapter"])
    """Adapter folder or Hub id; null = the base itself."""
    base: Location | None = Field(default=None, examples=["stabilityai/stable-diffusion-3.5-large"])
    """Another base (a folder or Hub id), such as a larger one, with the VAE, text encoders and
    scheduler of model.id: only its transformer is loaded. null = the student's base."""
    revision: str | None = Field(default=None, examples=["main"])
    """Branch, tag or commit of that base on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of its transformer and of the adapter on it; null = model.dtype."""
    quantization: Literal["nf4", "fp8"] | None = None
    """Its transformer is stored in fewer bits, as with model.quantization."""
    device: str | None = Field(default=None, pattern=r"^[a-z]+(:\d+)?$", examples=["cuda:1", "cpu"])
    """Where it lies, of each process a copy; null = on the device of the process."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """Its CFG scale; null = the student's. A larger scale is distilled into the student; with
    a smaller one the student unlearns its own."""

    def problems(self) -> Iterator[str]:
        """Settings of a base that is not named."""
        for key in ("revision", "dtype", "quantization", "device"):
            if self.base is None and getattr(self, key) is not None:
                yield f"{key}: it is of `base`, which is null. Name a base, or leave it out."


class TeacherConfig(LabellerConfig):
    """A teacher of the tasks that are routed to it."""

    extrapolate: Annotated[float, Field(ge=0, le=10)] = 1.0
    """lambda of the target v_ref + lambda (v_teacher - v_ref): 1 is the teacher itself, above 1 the
    target lies beyond it (ExOPD, 2602.12125). Other than 1, a label takes one more forward pass."""
    reference: Literal["base", "start"] = "base"
    """v_ref: the base, or what the student starts from (lora.init)."""


class AnchorConfig(LabellerConfig):
    """Manifold-anchor regularisation (MAR): a second teacher for the images of every task."""

    weight: NotNegative = 0.04
    """Lambda, relative to the distillation loss."""


class StatesConfig(Section):
    """Which states of a rollout are trained, of rollout.window."""

    select: Literal["all", "window", "random", "low_noise", "high_noise"] = "all"
    """all, or `count` steps that are drawn again for every update. window: steps in a row. random:
    any steps. low_noise, high_noise: by Beta(5, 2), Beta(2, 5) over the place in the window."""
    count: Count = 1
    """Number of steps (unused with all). The rollout stops at the last one."""


class StudentConfig(Section):
    """On-policy distillation: the loss between the student and its teachers."""

    gradient: Literal["pathwise", "policy", "published"] = "pathwise"
    """pathwise: through the weighted velocity distance. policy: a clipped policy gradient on the
    teacher's log-ratio. published: the official arithmetic."""
    weighting: Literal["kl", "published", "mean", "velocity"] = "velocity"
    """w(sigma) of the distance w |v - v_teacher|^2; see flowalign.training.losses.step_weights. The
    defaults here and of states did best in the first tiny world; in the second, random states are
    as good or better (docs/study.md). The paper has kl and all states."""
    states: StatesConfig = StatesConfig(select="high_noise")
    guidance: NotNegative | None = Field(default=None, examples=[1.0])
    """CFG scale of the student in the loss; null = rollout.guidance."""
    clip_range: Positive = 1e-4
    """PPO's epsilon (policy, published)."""
    advantage_clip: Positive = 5.0
    """Advantages are clipped to +- this (policy, published)."""
    reward_to_go: bool = False
    """policy: a step's advantage includes the log-ratios of all later trained steps."""
    label_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the stored labels."""
    label_batch: Many = 64
    """(image, step) pairs per forward pass of the teachers."""
    fixed_prompts: Annotated[int, Field(ge=0, le=10_000)] = 8
    """Prompts a task whose teachers' states stay the same through the run. Every evaluation
    measures the distance to the target there; on the student's own path the states move with the
    student. 0 = not measured."""
    patience: Many | None = Field(default=None, examples=[3])
    """The run ends where the mean of these distances on the teachers' paths has not fallen for so
    many evaluations; null = at train.updates."""
    diagnose_every: Many = 10
    """Rollouts between two measurements of the cosines between the tasks' gradients."""

    def problems(self) -> Iterator[str]:
        """A weighting or an advantage that belongs to another gradient."""
        if self.patience is not None and not self.fixed_prompts:
            yield "patience: it needs fixed_prompts, which are 0."
        if self.reward_to_go and self.gradient != "policy":
            yield f"reward_to_go: true, but gradient {self.gradient!r}; it is for 'policy' only."
        if self.gradient == "published" and self.weighting != "published":
            yield f"weighting: gradient {self.gradient!r} has 'published' only. Use it."


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
    betas: Annotated[tuple[Decay, Decay], as_tuple] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Positive = 1.0
    """The gradient's norm is clipped to this."""
    warmup: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Optimizer steps of linear warm-up. The first of them has a learning rate of 0."""
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
