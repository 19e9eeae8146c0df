"""What a config may hold: frozen pydantic models, one a section, one a stage.

A docstring under each field says what it means; `flowalign.config` reads YAML into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(gt=0, multiple_of=16)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

SD3_ATTENTION = [
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
]  # fmt: skip


ADAPTER = "pytorch_lora_weights.safetensors"  # what an adapter folder holds


class ConfigError(ValueError):
    """A config that cannot be run; `problems` holds one text for each thing wrong with it."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  - ".join([f"{source}: {count}", *self.problems]))


class Section(BaseModel):
    """A part of the config: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )  # fmt: skip


class ModelConfig(Section):
    """The base model."""

    id: str = Field(examples=["tiny", "stabilityai/stable-diffusion-3.5-medium"])
    """`tiny` (ships with the package), a folder, or a Hub id."""
    revision: str | None = Field(default=None, examples=["main"])
    """Branch, tag or commit on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Storage and arithmetic of the transformer, adapters included; the adapter that is trained
    keeps its weights in float32. float16 scales the loss."""
    vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the VAE (0.3 GB in float32); 16 bits cause visible artifacts."""
    quantization: Literal["nf4", "fp8"] | None = None
    """Storage of the frozen transformer below dtype, in which it computes all the same: nf4, 4 bits
    (bitsandbytes, a GPU); fp8, 8 bits (want gradient_checkpointing with it)."""
    height: Pixels = 512
    """Pixels, a multiple of 16."""
    width: Pixels = 512
    """Pixels, a multiple of 16."""
    max_sequence_length: Count = 128
    """Tokens of the T5 encoder."""
    text_cache: str | None = Field(default=None, examples=["outputs/text_cache"])
    """Folder where encoded prompts are kept, for any run of the same encoders; null = none are.
    Stable Diffusion 3.5 needs 1.7 MB a prompt in 16 bits."""
    offload_text_encoders: bool = False
    """The text encoders wait in the memory of the CPU, and are on the GPU only while they encode:
    11 GB less of Stable Diffusion 3.5 in 16 bits."""
    decode_batch: Count | None = Field(default=None, examples=[4])
    """Images a VAE decode; null = as many as were sampled at once."""
    attention: str | None = Field(default=None, examples=["native", "xformers", "flash"])
    """A diffusers attention backend; null = its default (SDPA)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    compile: bool = False
    """torch.compile the blocks of the transformer."""


class LoraConfig(Section):
    """The adapter that is trained."""

    rank: Count = 32
    """Rank r of the update (alpha / r) B A."""
    alpha: Positive = 64.0
    """Scale of the update, divided by the rank."""
    targets: list[str] = Field(default=SD3_ATTENTION, min_length=1)
    """Name endings of the layers that are adapted."""
    init: str | None = Field(default=None, examples=["runs/teacher_ocr/adapter"])
    """Adapter folder to start from; null = a fresh one (B = 0). It brings its own rank, scale and
    layers: rank, alpha and targets are ignored, and a warning says so where they were set."""


class RewardConfig(Section):
    """A reward by its registered name."""

    name: str = Field(examples=["ocr"])
    """Name in flowalign.rewards, built in or plugged in."""
    options: dict[str, Any] = {}
    """Keyword arguments of the reward."""


class TaskConfig(Section):
    """A named group of prompts with its own reward or teacher."""

    name: str = Field(min_length=1, examples=["ocr"])
    """What logs and teachers call it."""
    prompts: str = Field(examples=["tiny/ocr_train", "prompts/train.jsonl"])
    """Training prompts: a .txt, a .jsonl, or tiny/NAME."""
    validation: str | None = Field(default=None, examples=["tiny/ocr_test", "prompts/test.jsonl"])
    """Held-out prompts, in the same formats."""
    weight: Positive = 1.0
    """Share of every batch, relative to the other tasks."""
    reward: RewardConfig | None = None
    """What scores its images; a student or sft needs none, but for an evaluation."""
    teacher: str | None = Field(default=None, examples=["ocr"])
    """The teacher that its images are routed to (opd, sft); null = the one of the task's name."""


class RolloutConfig(Section):
    """How trajectories are sampled for training."""

    steps: Count = 10
    """Denoising steps T."""
    kind: Literal["sde", "cps", "ode"] = "sde"
    """How a step adds noise; see flowalign.sde."""
    noise_level: NotNegative = 0.7
    """The a of sde (any) and cps (up to 1)."""
    guidance: NotNegative = 4.5
    """CFG scale; 1 = no unconditional pass."""
    window: Annotated[tuple[int, int], _as_tuple] | None = Field(default=None, examples=[[0, 5]])
    """[start, stop): the steps with noise and training; null = all but the last."""
    shared_noise: bool = False
    """One initial noise for all images of a prompt."""
    prompts: Count = 8
    """P, distinct prompts of an update, over all processes."""
    copies: Count = 16
    """K, images of a prompt: the group of an advantage (for distillation 1 will do)."""
    batch_size: Count = 16
    """Images per forward pass of a process."""

    @property
    def trained(self) -> tuple[int, int]:
        """[start, stop) of the steps with noise and training."""
        return self.window or (0, self.steps - 1)

    @property
    def images(self) -> int:
        """Images of a rollout, over all processes."""
        return self.prompts * self.copies


class GrpoConfig(Section):
    """The policy gradient."""

    advantage: Literal["group_std", "batch_std", "gaussian"] = "group_std"
    """Which variant of flowalign.credit. A batch's statistics are those of the image's own task."""
    advantage_clip: Positive = 5.0
    """Advantages are cut to +- this."""
    clip_range: Positive = 1e-4
    """PPO's epsilon (log-probs are means over pixels, so ratios stay within 1e-4 of 1)."""
    kl_weight: NotNegative = 0.0
    """Weight of the KL to the base model; 0 saves its forward pass."""
    kl: Literal["exact", "published"] = "exact"
    """Which KL kl_weight belongs to. exact: of the two transitions. published: that times -dt, as
    Flow-GRPO's and Flow-OPD's code has it, 3.7 to 25 times smaller over ten steps of shift 3."""


class TeacherConfig(Section):
    """A frozen velocity field on the same base."""

    adapter: str | None = Field(examples=["runs/teacher_ocr/adapter"])
    """Adapter folder or Hub id; null = the base itself."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """Its CFG scale; null = the one that the student is trained at. Another is a mixture: above the
    student's, guidance is distilled into the student; below it, the student unlearns its own."""


class AnchorConfig(TeacherConfig):
    """Manifold-anchor regularisation (MAR): a teacher of every task, whatever its routing."""

    weight: NotNegative = 0.04
    """Lambda, relative to the distillation loss."""


class StatesConfig(Section):
    """Which states of a rollout are trained, among those of rollout.window."""

    select: Literal["all", "window", "random", "low_noise", "high_noise"] = "all"
    """all; or, drawn anew for every update: count steps in a row, anywhere, or Beta(5, 2) towards
    low noise, Beta(2, 5) towards high noise."""
    count: Count = 1
    """How many (no matter for all). The rollout stops at the last one."""


class StudentConfig(Section):
    """On-policy distillation: how the student is pulled towards its teachers."""

    gradient: Literal["pathwise", "policy", "published", "detached"] = "pathwise"
    """pathwise: through the weighted velocity distance. policy: a clipped policy gradient on the
    teacher's log-ratio. published: the official arithmetic. detached: its control, whose expected
    gradient is zero."""
    weighting: Literal["kl", "published", "mean", "velocity"] = "velocity"
    """w(sigma) of the distance w |v - v_teacher|^2; see flowalign.losses.step_weights. The default,
    with that of states, is what docs/study.md found best; kl and all states are the paper's."""
    states: StatesConfig = StatesConfig(select="high_noise")
    guidance: NotNegative | None = Field(default=None, examples=[1.0])
    """CFG scale of the student where it is trained; null = rollout.guidance."""
    clip_range: Positive = 1e-4
    """PPO's epsilon (policy, published, detached)."""
    advantage_clip: Positive = 5.0
    """Advantages are cut to +- this (policy, published, detached)."""
    reward_to_go: bool = False
    """policy: credit a step with the log-ratios of all later trained steps, too."""
    reward_weight: NotNegative = 0.0
    """Weight of a GRPO loss on the tasks' rewards (section grpo) beside the distillation."""
    label_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """How labels are stored between rollout and update."""
    label_batch: Count = 64
    """(image, step) pairs per forward pass of the teachers."""
    diagnose_every: Count = 10
    """Rollouts between two gradient cosines of the tasks."""


class SftConfig(Section):
    """Cold start: flow matching on images that the routed teachers sample."""

    states: Count = 4
    """Noise levels at which each image is learnt from."""


class OptimizerConfig(Section):
    """AdamW and what surrounds it."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit needs bitsandbytes (the `gpu` extra)."""
    lr: Positive = 1e-4
    """Learning rate, reached after the warm-up."""
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
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates of linear warm-up."""
    updates_per_rollout: Count = 1
    """Optimizer steps per rollout, each on an equal share of its prompts."""
    micro_batch: Count = 16
    """(image, step) pairs per forward and backward pass."""


class EmaConfig(Section):
    """A moving average of the adapter, which is evaluated and saved."""

    decay: Decay = 0.9
    """Share of the old average that is kept; at most n / (9 + n) after n optimizer steps, so .9
    is reached after 80."""
    every: Count = 8
    """Optimizer steps between two averagings. Before the first one the adapter itself is evaluated
    and saved; steps since the last one count for their share."""


class TrainConfig(Section):
    """Length and housekeeping of the run."""

    updates: Count = 100
    """Rollouts in all."""
    checkpoint_every: Count = 20
    """Rollouts between two checkpoints."""
    keep: Count = 3
    """Checkpoints that are kept, the newest."""
    sample_every: Count = 20
    """Rollouts between two sample grids."""
    deterministic: bool = False
    """On a GPU, too, the same run gives the same bits, and a resumed one those of one that was not
    interrupted: slower backward passes, torch's own attention only, and an operation that cannot
    (in a reward, too) raises. See flowalign.determinism."""
    max_invalid_share: Share = 0.5
    """The run stops when a larger share of a rollout could not be scored."""
    score_while_sampling: bool = True
    """Score a batch of images while the next is sampled (not groupwise rewards)."""
    score_seconds: Positive | None = 1800.0
    """A batch of images whose reward takes longer is masked; null = wait for ever."""
    timeout_seconds: Positive | None = Field(default=None, examples=[7200.0])
    """A run of several processes ends when one has waited so long for another; null = longer than
    all calls of a reward that hangs, so that it is masked instead (score_seconds null: 30 days)."""
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Where accelerate logs to: metrics, the config and sample grids. TensorBoard's files lie under
    <output>/tensorboard; a W&B run is named as the output folder."""
    project: str = Field(default="flowalign", min_length=1)
    """What the trackers call the project."""


class BenchmarkConfig(Section):
    """Held-out prompts and what judges their images."""

    name: str = Field(min_length=1, examples=["ocr"])
    """What tables and files call it."""
    prompts: str = Field(examples=["tiny/ocr_test", "prompts/test.jsonl"])
    """A .txt, a .jsonl, or tiny/NAME."""
    limit: Count | None = Field(default=None, examples=[128])
    """Take the first prompts of the file only (in a file that is sorted by tag, those of its first
    tags); null = all. More of them later go on with the images of fewer."""
    images: Count = 1
    """Images of a prompt, each with its own noise; GenEval officially has 4."""
    reward: RewardConfig | None = None
    """What scores its images; its number is called as the benchmark is."""
    rewards: dict[str, RewardConfig] = Field(default={}, examples=[{"pick": {"name": "pickscore"}}])
    """In place of `reward`, several judges of the same images, which are sampled once: each is a
    benchmark of its own, called NAME_JUDGE."""
    layout: Literal["geneval", "t2i_compbench", "dpg_bench"] | None = None
    """Also write the images as the official scripts read them, into
    <output>/layouts/MODEL/NAME; with neither `reward` nor `rewards` that is all that is done."""

    @property
    def judges(self) -> dict[str, RewardConfig]:
        """{column: reward}: what tables and files call each score, and what gives it."""
        own = {self.name: self.reward} if self.reward else {}
        return own | {f"{self.name}_{judge}": spec for judge, spec in self.rewards.items()}

    @property
    def reward_keys(self) -> dict[str, RewardConfig]:
        """{key below the benchmark: reward}, in the order of `judges`."""
        own = {"reward": self.reward} if self.reward else {}
        return own | {f"rewards.{judge}": spec for judge, spec in self.rewards.items()}


class SamplingConfig(Section):
    """How images are sampled for an evaluation."""

    steps: Count = 10
    """Denoising steps, without noise (Euler)."""
    guidance: NotNegative = 4.5
    """CFG scale; 1 = no unconditional pass."""
    seed: int = 1234
    """Seed of the initial noise, the same for every model."""
    batch_size: Count = 32
    """Images per forward pass of a process."""


class EvaluationConfig(Section):
    """Evaluation on the validation prompts while training."""

    every: Count = 20
    """Rollouts between two evaluations."""
    prompts: Count = 128
    """Prompts per task, at most: a fixed part of the file, with every metadata `tag` in its
    proportion; a larger one holds the smaller."""
    steps: Count | None = Field(default=None, examples=[40])
    """Denoising steps; null = rollout.steps."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """CFG scale; null = rollout.guidance."""
    batch_size: Count | None = Field(default=None, examples=[16])
    """Images per forward pass; null = rollout.batch_size."""
    seed: int = 1234
    """Seed of the initial noise, the same at every evaluation."""
    max_invalid_share: Share = 0.05
    """An evaluation in which a larger share of a task's images could not be scored does not count:
    it never chooses the best adapter. A run whose last one does not count stops."""
    watch: list[BenchmarkConfig] = []
    """Benchmarks that are scored, too, but not aimed at: an alarm tells when one falls."""


class Stage(Section):
    """What the configs of all stages have; `load(..., stage=Stage)` takes any of them."""

    stage: str
    """What is done: a key of STAGES."""
    output: str = Field(min_length=1, examples=["runs/teacher_ocr"])
    """Folder of the run."""
    model: ModelConfig

    @property
    def inputs(self) -> dict[str, str]:
        """{place in the config: folder or Hub id} of every adapter that the stage reads."""
        return {}


class Job(Stage):
    """What `flowalign train` runs."""


class TrainingStage(Job):
    """A training run; what is learnt depends on the stage."""

    seed: int = 0
    """Seed of prompts, noise and initial weights."""
    lora: LoraConfig = LoraConfig()
    tasks: list[TaskConfig] = Field(min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig | None = EmaConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig | None = EvaluationConfig()

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
    def needs_rewards(self) -> bool:
        """Whether every task needs a reward: to learn from, or to be evaluated by."""
        return self.learns_from_rewards or self.evaluation is not None

    @property
    def needs_actions(self) -> bool:
        """Whether the loss needs the sampled successors of the states and their log-probs."""
        return self.learns_from_rewards

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
    def watched(self) -> list[BenchmarkConfig]:
        """The benchmarks of evaluation.watch."""
        return self.evaluation.watch if self.evaluation else []

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.train.updates * self.optimizer.updates_per_rollout

    @property
    def labellers(self) -> dict[str, TeacherConfig]:
        """{place in the config: teacher}, with the anchor; empty for a stage without teachers."""
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


class GrpoStage(TrainingStage):
    """A teacher, or a mix of tasks, by group-relative policy optimisation."""

    stage: Literal["grpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards."""
    grpo: GrpoConfig = GrpoConfig()

    @property
    def learns_from_rewards(self) -> bool:
        """Always: that is what GRPO does."""
        return True


class DistillationStage(TrainingStage):
    """A student that learns from teachers, each task from the one that it is routed to."""

    teachers: dict[str, TeacherConfig] = Field(
        min_length=1, examples=[{"ocr": {"adapter": "runs/ocr"}}]
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


class OpdStage(DistillationStage):
    """A student by on-policy distillation from routed teachers."""

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
    def needs_actions(self) -> bool:
        """Whether the loss has a ratio of new and old policy."""
        return self.student.gradient != "pathwise" or self.learns_from_rewards

    @property
    def labellers(self) -> dict[str, TeacherConfig]:
        """{place in the config: teacher}, with the anchor."""
        return super().labellers | ({"anchor": self.anchor} if self.anchor else {})


class SftStage(DistillationStage):
    """A cold start from routed teachers' images."""

    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers' images."""
    sft: SftConfig = SftConfig()


class MergeStage(Job):
    """A merge of adapters of one base; see flowalign.teachers.merge."""

    stage: Literal["merge"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Add weight updates."""
    adapters: list[str] = Field(min_length=2, examples=[["runs/a/adapter", "runs/b/adapter"]])
    """Adapter folders or Hub ids."""
    weights: list[float] | None = Field(default=None, examples=[[0.5, 0.5]])
    """One an adapter; null = 1 each, the plain sum. 1/n each is the average."""
    method: Literal["concat", "svd", "ties", "dare"] = "concat"
    """concat is exact, and the ranks add: a student that starts from it has that rank."""
    rank: Count | None = Field(default=None, examples=[32])
    """Rank of the result (not for concat); null = the largest given. svd: at most their sum."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share that ties and dare keep."""
    seed: int = 0
    """Of what dare drops."""
    lines: Annotated[tuple[float, float], _as_tuple] | None = Field(
        default=None, examples=[[0.5, 1]]
    )
    """LiNeS: scales of the shallowest and the deepest block."""

    @property
    def inputs(self) -> dict[str, str]:
        """{place in the config: folder or Hub id} of every adapter that the stage reads."""
        return {f"adapters.{index}": source for index, source in enumerate(self.adapters)}


class RecipeStage(Job):
    """Stages that run one after the other, each in a folder of its name under `output`."""

    stage: Literal["recipe"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Run other stages."""
    seed: int = 0
    """Seed of every stage that does not set its own."""
    stages: dict[str, dict[str, Any]] = Field(
        min_length=1, examples=[{"ocr": {"use": "teacher_ocr.yaml"}}]
    )
    """Name -> the keys of a stage's config, over those of the file that `use` names (relative to
    this one), with changes in `set` as on the command line. `stage:NAME` as a value is the adapter
    of an earlier stage."""
    variant: dict[str, dict[str, Any]] = Field(
        default={}, examples=[{"grpo": {"rollout": {"batch_size": 4}}}]
    )
    """Kind of stage -> keys that every stage of it takes instead (`--variant FILE` on the command
    line): the same recipe for other hardware."""


class FidelityConfig(Section):
    """How far the images are from reference images: a Fréchet distance between their features."""

    features: str = Field(default="tiny", examples=["tiny", "my_features:dino"])
    """A CLIP (`tiny`, a folder, a Hub id), or package.module:function, [B,3,H,W] -> [B,D]."""
    reference: str = Field(default="tiny", examples=["tiny", "data/coco_val2017"])
    """`tiny` (scenes drawn from the benchmarks' own metadata), or a folder of images."""


class ReportConfig(Section):
    """What report.html shows."""

    title: str | None = Field(default=None, examples=["Flow-OPD on the tiny world"])
    """Its heading; null = named after the base model."""
    images: Annotated[int, Field(ge=0)] = 24
    """Prompts of a benchmark whose images are shown, the first ones."""


class EvalStage(Stage):
    """An evaluation of the base model and of adapters on it."""

    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Says that this is an evaluation."""
    models: dict[str, str | None] = Field(
        default={"base": None}, min_length=1, examples=[{"base": None, "ocr": "runs/ocr/adapter"}]
    )
    """Name -> adapter folder, or null for the base model; the first is compared with."""
    compare: dict[str, list[str]] = Field(default={}, examples=[{"student": ["ocr", "merged"]}])
    """Name -> other models that it is compared with, besides the first."""
    benchmarks: list[BenchmarkConfig] = Field(min_length=1)
    sampling: SamplingConfig = SamplingConfig()
    fidelity: FidelityConfig | None = None
    report: ReportConfig = ReportConfig()
    score_seconds: Positive | None = 1800.0
    """A batch of images whose reward takes longer is invalid; null = wait for ever."""
    timeout_seconds: Positive | None = Field(default=None, examples=[7200.0])
    """As train.timeout_seconds of a training run."""
    max_invalid_share: Share = 0.05
    """The evaluation stops, without a table, when a larger share of a benchmark's images could not
    be scored."""
    keep_images: bool = False
    """Keep every image under <output>/images, so that another reward can score it without sampling;
    false = those that the report shows."""

    @property
    def inputs(self) -> dict[str, str]:
        """{place in the config: folder or Hub id} of every adapter that the stage reads."""
        return _given({f"models.{name}": folder for name, folder in self.models.items()})


def _given(adapters: dict[str, str | None]) -> dict[str, str]:
    """Without those that are null, the base model."""
    return {place: source for place, source in adapters.items() if source is not None}


STAGES: dict[str, type[Stage]] = {
    "grpo": GrpoStage,
    "opd": OpdStage,
    "sft": SftStage,
    "merge": MergeStage,
    "recipe": RecipeStage,
    "eval": EvalStage,
}


def command(stage: str) -> str:
    """What runs a stage."""
    return "flowalign train" if issubclass(STAGES[stage], Job) else "flowalign eval"


def routing(config: DistillationStage) -> dict[str, str]:
    """config.routing, which replaces this."""
    return config.routing


def mixtures(config: TrainingStage) -> dict[str, float]:
    """config.mixtures, which replaces this."""
    return config.mixtures
