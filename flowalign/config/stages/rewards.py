"""Stages that learn from rewards: GRPO on trajectories; DiffusionNFT and AWM on clean images with
noise.

DPO learns from pairs of images, of which people, or a reward, chose one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from flowalign.config.learning import AdvantageConfig, AdvantageName
from flowalign.config.rollout import RolloutConfig, steps_within
from flowalign.config.section import (
    Decay,
    Many,
    NotNegative,
    Positive,
    Section,
    Share,
    Steps,
    as_tuple,
)
from flowalign.config.stages.base import either
from flowalign.config.stages.training import TrainingStage
from flowalign.types import Problem


class RewardStage(TrainingStage):
    """A teacher that learns from rewards; the section of its own name says how."""

    @property
    def credited(self) -> AdvantageConfig | None:
        return getattr(self, self.stage)

    @property
    def learns_from_rewards(self) -> bool:
        return True


class GrpoConfig(AdvantageConfig):
    """The policy gradient."""

    clip_range: Positive = 1e-4
    """PPO's epsilon (log-probs are means over pixels, so ratios stay within 1e-4 of 1)."""
    kl_weight: NotNegative = 0.0
    """Weight of the KL to the base model; 0 saves its forward pass."""
    kl: Literal["exact", "published"] = "exact"
    """The KL that kl_weight multiplies. exact: of the two transitions. published: that times -dt,
    as in the code of Flow-GRPO and Flow-OPD: 3.7 to 25 times smaller over ten steps of shift 3."""


class GrpoStage(RewardStage):
    """Group-relative policy optimisation (GRPO) on the rewards of one or more tasks.

    *Choose it when* you repeat a published run, or train on all rewards and want clean pictures.
    *Otherwise* nft: with one reward GRPO learnt layouts later (GenEval .711 after 2,880 images, NFT
    .79) and cost other tasks more (GenEval .475 after preference, NFT .681; docs/experiments.md).

    The log-probs are means over pixels, so that a ratio moves by 1e-4 where that of a language
    model moves by .2: a clip range of .2 never clips. On all rewards of the tiny world it ends at
    .848 ± .015, Flow-OPD at .901 ± .008 (docs/results.md).
    """

    algorithm = "flowalign.teachers.grpo:Grpo"
    stage: Literal["grpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards."""
    grpo: GrpoConfig = GrpoConfig()

    @property
    def clip_ranges(self) -> dict[str, float]:
        return {"grpo.clip_range": self.grpo.clip_range}


class PolicyConfig(Section):
    """Weights that follow those that are trained. After the optimizer steps of each rollout, a
    share d of them is kept: d = min(decay, rise x (steps - after)), not below 0, where steps counts
    the optimizer steps of the run."""

    decay: Decay = 0.0
    """Largest share that is kept; 0 = the trained weights themselves."""
    rise: Positive = 0.001
    """Increase of the share per optimizer step."""
    after: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Optimizer steps before the share grows."""


class PolicyLearning(Section):
    """Learning by the velocity, at a CFG scale and a distance to the base."""

    guidance: NotNegative | None = Field(default=None, examples=[1.0])
    """CFG scale in the loss; null = rollout.guidance."""
    kl_weight: NotNegative = 0.0
    """Weight of |v - v_base|^2; 0 saves its forward pass."""


class ForwardConfig(PolicyLearning, AdvantageConfig):
    """Learning from clean images, to which noise is added: at which noise levels."""

    noise_levels: Steps = 4
    """Noise levels at which each image is trained, drawn for each image."""
    levels: Literal["sampler", "random", "stratified"] = "stratified"
    """sampler: they are steps of the rollout's own schedule, one drawn in each of `noise_levels`
    parts of about equal size. random: any `noise_levels` of these steps. stratified: drawn in as
    many parts of the continuous schedule."""
    within: Annotated[tuple[Share, Share], as_tuple] = (0.0, 0.99)
    """Fraction of the schedule that they are drawn from; 0 is noise, 1 the image."""

    def problems(self) -> Iterator[Problem]:
        low, high = self.within
        if low >= high:
            yield Problem("within", f"[{low}, {high}] is empty. Use [0, 1] for the whole way.")


class PolicyStage(RewardStage):
    """Rewards, learnt by the velocity from images without noise; policies follow the student."""

    @property
    def forward(self) -> Any:
        """The section that has the name of the stage."""
        return getattr(self, self.stage)

    @property
    def policies(self) -> dict[str, PolicyConfig]:
        """{adapter beside the trained one: how it follows that}. The one named "old" samples; there
        is one where it can differ from the student during an update: where it is an average, or a
        rollout has several optimizer steps."""
        old = getattr(self.forward, "old", PolicyConfig())
        needed = old.decay > 0 or self.optimizer.updates_per_rollout > 1
        return {"old": old} if needed else {}

    @property
    def guidance(self) -> float:
        return either(self.forward.guidance, self.rollout.guidance)

    @property
    def needs_actions(self) -> bool:
        return False  # there is no ratio of transitions

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        rollout, name = self.rollout, self.stage
        if rollout.kind != "ode":
            text = f"{name} learns from clean images, which noise makes worse. Use 'ode'."
            yield Problem("rollout.kind", f"{rollout.kind!r}, but {text}")
        if rollout.window is not None:
            yield Problem("rollout.window", f"{name} chooses the states by itself. Leave it out.")
        if rollout.shared_noise:
            yield Problem(
                "rollout.shared_noise", "an ode gives all images of a prompt alike. Use false."
            )


class ForwardStage(PolicyStage):
    """Rewards, learnt from clean images with noise added: no trajectory is kept."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        rollout, forward, name = self.rollout, self.forward, self.stage
        start, stop = steps_within(rollout.steps, forward.within)
        if forward.levels != "stratified" and forward.noise_levels > stop - start:
            text = f"{max(stop - start, 0)} sampler steps in {name}.within. Use at most as many"
            yield Problem(
                f"{name}.noise_levels", f"{forward.noise_levels} of {text}, or levels 'stratified'."
            )


class NftConfig(ForwardConfig):
    """DiffusionNFT (2509.16117)."""

    advantage: AdvantageName = "batch_std"
    """Variant of flowalign.credit, as in `grpo`."""
    beta: Positive = 1.0
    """Distance of the positive and the negative velocity from the old policy's. Official: 1, or 0.1
    for OCR and for several rewards."""
    old: PolicyConfig = PolicyConfig()
    """The old policy, which samples. Official: {decay: 0.5} for GenEval and PickScore; {decay:
    0.999, rise: 0.0075, after: 75} for OCR. The default, the trained weights, is ours."""


class NftStage(ForwardStage):
    """DiffusionNFT on the rewards of one or more tasks.

    *Choose it when* you have a reward: it was the best and the steadiest here. *Otherwise*
    gradient, if the reward has one and hours are short; dpo, if you have votes.

    Sample without CFG. For clean pictures start from a LoRA that holds the base's guidance
    (`guided.yaml`); for layouts from the base, since guidance hides what the base draws wrong
    (GenEval .764 and .806 after 6,144 images; docs/log). Images whose group has one score teach
    nothing, and are left out.
    """

    algorithm = "flowalign.teachers.nft:Nft"
    stage: Literal["nft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards, on clean images."""
    nft: NftConfig = NftConfig()


class AwmConfig(ForwardConfig):
    """Advantage weighted matching (2509.25050)."""

    advantage: AdvantageName = "batch_std"
    """Variant of flowalign.credit, as in `grpo`."""
    advantage_clip: Positive = 1.0
    """Advantages are clipped to +- this, as in Flow-Factory. The authors clip to +- 5 and divide by
    5: the same as 5 here, with kl_weight, ema_kl_weight and optimizer.max_grad_norm times 5."""
    within: Annotated[tuple[Share, Share], as_tuple] = (0.01, 0.9)
    """Fraction of the schedule that noise levels are drawn from; 0 is noise, 1 the image."""
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
    """The average of the weights that gives v_average."""


class AwmStage(ForwardStage):
    """Advantage weighted matching on the rewards of one or more tasks.

    *Choose it when* you repeat a published run. *Otherwise* nft: with its settings AWM had .793 ±
    .066 of preference, NFT .967 ± .011 (docs/experiments.md).
    """

    algorithm = "flowalign.teachers.awm:Awm"
    stage: Literal["awm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards, on clean images."""
    awm: AwmConfig = AwmConfig()

    @property
    def policies(self) -> dict[str, PolicyConfig]:
        """The student's weights at the rollout, where that has several optimizer steps; and their
        average, where ema_kl_weight asks for it."""
        average = {"average": self.awm.average} if self.awm.ema_kl_weight > 0 else {}
        return super().policies | average


class GradientConfig(PolicyLearning):
    """MEND (2610.05954)."""

    at: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Which state of a trajectory is trained: the part of the steps before it. After .9 of 10 or of
    40 steps of shift 3 sigma is .25; MEND's is about .27. Of few steps it is the state before the
    last: of 4 steps of a distilled model perhaps .7."""
    lengths: list[Positive] = Field(default=[0.1, 0.2, 0.4], min_length=1)
    """How far an image moves along the reward's gradient: root mean squares, in latents."""
    threshold: Share = 0.75
    """Quantile of the rewards of a prompt's images, from which on an image stays as it is."""
    rise: Share = 0.05
    """How fast the floor of that threshold follows the mean quantile of the prompts, upward, per
    rollout."""
    moved: Annotated[tuple[Share, Share], as_tuple] = (0.3, 0.6)
    """Target share of a task's images that move: its `tau` falls above it, and rises below."""
    tau: Positive = 1.0
    """Price of the distance |y - x|^2 / (2 tau), in units of the reward, at the first rollout. Each
    task adapts its own."""
    kept_weight: NotNegative = 10.0
    """Weight of an image that stays, relative to one that moves."""
    batch: Many = 8
    """Images whose gradient passes through the decoder and the reward at once."""
    old: PolicyConfig = PolicyConfig(decay=0.5)
    """The policy that samples, and whose velocity is corrected: an average of the student."""


class GradientStage(PolicyStage):
    """A teacher from a reward that has a gradient: pickscore, clipscore, hpsv2, imagereward,
    aesthetic. Its targets are clean, so that it is for models of few steps, too.

    *Choose it when* hours are short: an image takes 14 function evaluations, with NFT 34.
    *Otherwise* nft: preference .967 for .864, GenEval .681 for .546 (docs/experiments.md).

    Published for Stable Diffusion 3.5 Medium: 10 GPU-hours for 100 updates, where NFT takes 47.
    """

    algorithm = "flowalign.teachers.gradient:Gradient"
    stage: Literal["gradient"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from the gradient of a reward."""
    gradient: GradientConfig = GradientConfig()

    @property
    def credited(self) -> None:
        return None

    @property
    def trained_step(self) -> int:
        """The index of the rollout's step whose state is trained."""
        return min(self.rollout.steps - 1, round(self.gradient.at * self.rollout.steps))


class DpoConfig(Section):
    """Flow-DPO (2501.13918): Diffusion-DPO (2311.12908) for a flow."""

    beta: Positive = 2000.0
    """How near the model stays to the reference: a large beta is satisfied by a small margin. It
    multiplies means over C, h, w, as in the code of Diffusion-DPO (2000 to 5000). The papers'
    formulas have sums: their beta is this one divided by C h w. The same at all noise levels, which
    Flow-DPO found better than beta (1 - sigma)^2."""
    noise_levels: Steps = 4
    """Noise levels at which each pair is trained, drawn for each pair."""


class DpoStage(TrainingStage):
    """A teacher from pairs: no reward is asked.

    *Choose it when* you have votes and no reward: 400 pairs take preference from .609 to .892.
    *Otherwise* nft: .982 on the reward itself (docs/experiments.md).

    A row of a task's `prompts`, a .jsonl, has `prompt`, `chosen` and `rejected`: images of the size
    of the model, their paths relative to the file. `flowalign vote` writes it. The reference is
    what the run starts from: the base, or the LoRA of `lora.init`.
    """

    algorithm = "flowalign.teachers.dpo:Dpo"
    stage: Literal["dpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from pairs of images."""
    rollout: RolloutConfig = RolloutConfig(group_size=2)
    """How evaluations sample, and how many pairs an update has (`prompts`). group_size: 2."""
    dpo: DpoConfig = DpoConfig()

    @property
    def images(self) -> int:
        return 0  # they are given

    @property
    def loss_guidance(self) -> float:
        return 1.0  # the loss has one velocity field, even if it is used with CFG

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if (copies := self.rollout.group_size) != 2:
            yield Problem("rollout.group_size", f"{copies}, but a row has two images. Use 2.")
        if (size := self.optimizer.micro_batch) % 2:
            yield Problem("optimizer.micro_batch", f"{size} would part a pair. Use an even number.")
