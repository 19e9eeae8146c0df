"""YAML -> frozen pydantic models. A wrong config is refused with everything that is wrong in it.

config = load("configs/tiny/teacher_ocr.yaml", ["optimizer.lr=3e-4", "tasks.0.weight=2"])
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from flowalign.data import PromptError, load_prompts
from flowalign.pictures import IMAGES, image_files
from flowalign.tiny import TEACHERS

Count = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(gt=0, multiple_of=16)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
_no_is_a_word = BeforeValidator(lambda value: "no" if value is False else value)  # YAML 1.1

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


class Model(Section):
    """The base model."""

    id: str = Field(examples=["tiny", "stabilityai/stable-diffusion-3.5-medium"])
    """`tiny` (ships with the package), a folder, or a Hub id."""
    revision: str | None = Field(default=None, examples=["main"])
    """Branch, tag or commit on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Storage of the frozen weights; adapters are trained in float32."""
    height: Pixels = 512
    """Pixels, a multiple of 16."""
    width: Pixels = 512
    """Pixels, a multiple of 16."""
    max_sequence_length: Count = 128
    """Tokens of the T5 encoder."""
    attention: str | None = Field(default=None, examples=["native", "xformers", "flash"])
    """A diffusers attention backend; null = its default (SDPA)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    compile: bool = False
    """torch.compile the transformer."""


class Lora(Section):
    """The adapter that is trained."""

    rank: Count = 32
    """Rank r of the update (alpha / r) B A."""
    alpha: Positive = 64.0
    """Scale of the update, divided by the rank."""
    targets: list[str] = Field(default=SD3_ATTENTION, min_length=1)
    """Name endings of the layers that are adapted."""
    init: str | None = Field(default=None, examples=["runs/teacher_ocr/adapter"])
    """Adapter folder to start from; null = a fresh one (B = 0)."""


class RewardSpec(Section):
    """A reward by its registered name."""

    name: str = Field(examples=["ocr"])
    """Name in flowalign.rewards, built in or plugged in."""
    options: dict[str, Any] = {}
    """Keyword arguments of the reward."""


class Task(Section):
    """A named group of prompts with its own reward or teacher."""

    name: str = Field(min_length=1, examples=["ocr"])
    """What logs and teachers call it."""
    prompts: str = Field(examples=["tiny/ocr_train", "prompts/train.jsonl"])
    """Training prompts: a .txt, a .jsonl, or tiny/NAME."""
    validation: str | None = Field(default=None, examples=["tiny/ocr_test", "prompts/test.jsonl"])
    """Held-out prompts, in the same formats."""
    weight: Positive = 1.0
    """Share of every batch, relative to the other tasks."""
    reward: RewardSpec | None = None
    """What scores its images; a student or sft needs none, but for an evaluation."""
    teacher: str | None = Field(default=None, examples=["ocr"])
    """The teacher that its images are routed to (opd, sft); null = the one of the task's name."""


class Rollout(Section):
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


class Grpo(Section):
    """The policy gradient."""

    advantage: Literal["group_std", "batch_std", "gaussian"] = "group_std"
    """Which variant of flowalign.credit."""
    advantage_clip: Positive = 5.0
    """Advantages are cut to +- this."""
    clip_range: Positive = 1e-4
    """PPO's epsilon (log-probs are means over pixels, so ratios stay within 1e-4 of 1)."""
    kl_weight: NotNegative = 0.0
    """Weight of the KL to the base model; 0 saves its forward pass."""


class Teacher(Section):
    """A frozen velocity field on the same base."""

    adapter: str | None = Field(examples=["runs/teacher_ocr/adapter"])
    """Adapter folder or Hub id; null = the base itself."""
    guidance: NotNegative = 1.0
    """Its CFG scale. Above the student's it is distilled into the student."""


class Anchor(Teacher):
    """Manifold-anchor regularisation (MAR): a teacher of every task, whatever its routing."""

    weight: NotNegative = 0.04
    """Lambda, relative to the distillation loss."""


class States(Section):
    """Which states of a rollout are trained, among those of rollout.window."""

    select: Literal["all", "window", "random", "low_noise", "high_noise"] = "all"
    """all; or, drawn anew for every update: count steps in a row, anywhere, or Beta(5, 2) towards
    low noise, Beta(2, 5) towards high noise."""
    count: Count = 1
    """How many (no matter for all). The rollout stops at the last one."""


class Student(Section):
    """On-policy distillation: how the student is pulled towards its teachers."""

    gradient: Literal["pathwise", "policy", "published", "detached"] = "pathwise"
    """pathwise: through the weighted velocity distance. policy: a clipped policy gradient on the
    teacher's log-ratio. published: the official arithmetic. detached: its control, whose expected
    gradient is zero."""
    weighting: Literal["kl", "published", "mean", "velocity"] = "kl"
    """w(sigma) of the distance w |v - v_teacher|^2; see flowalign.losses.step_weights."""
    states: States = States()
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


class Sft(Section):
    """Cold start: flow matching on images that the routed teachers sample."""

    states: Count = 4
    """Noise levels at which each image is learnt from."""


class Optimizer(Section):
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


class Ema(Section):
    """A moving average of the adapter."""

    decay: Decay = 0.9
    """Share of the old average that is kept."""
    every: Count = 8
    """Optimizer steps between two averagings."""


class Train(Section):
    """Length and housekeeping of the run."""

    updates: Count = 100
    """Rollouts in all."""
    mixed_precision: Annotated[Literal["no", "fp16", "bf16"], _no_is_a_word] = "no"
    """accelerate's autocast."""
    checkpoint_every: Count = 20
    """Rollouts between two checkpoints."""
    keep: Count = 3
    """Checkpoints that are kept, the newest."""
    sample_every: Count = 20
    """Rollouts between two sample grids."""
    max_invalid_share: Share = 0.5
    """The run stops when a larger share of a rollout could not be scored."""
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Where accelerate logs to."""


class Benchmark(Section):
    """Held-out prompts and what judges their images."""

    name: str = Field(min_length=1, examples=["ocr"])
    """What tables and files call it."""
    prompts: str = Field(examples=["tiny/ocr_test", "prompts/test.jsonl"])
    """A .txt, a .jsonl, or tiny/NAME."""
    limit: Count | None = Field(default=None, examples=[128])
    """Take the first prompts only; null = all."""
    reward: RewardSpec
    """What scores its images."""


class Evaluation(Section):
    """Evaluation on the validation prompts while training."""

    every: Count = 20
    """Rollouts between two evaluations."""
    prompts: Count = 128
    """Prompts per task, at most."""
    steps: Count | None = Field(default=None, examples=[40])
    """Denoising steps; null = rollout.steps."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """CFG scale; null = rollout.guidance."""
    batch_size: Count | None = Field(default=None, examples=[16])
    """Images per forward pass; null = rollout.batch_size."""
    seed: int = 1234
    """Seed of the initial noise, the same at every evaluation."""
    watch: list[Benchmark] = []
    """Benchmarks that are scored, too, but not aimed at: an alarm tells when one falls."""


class Root(Section):
    """What the configs of all stages have; `load(..., stage=Root)` takes any of them."""

    stage: str
    """What is done: a key of STAGES."""
    output: str = Field(min_length=1, examples=["runs/teacher_ocr"])
    """Folder of the run."""
    model: Model


class Job(Root):
    """What `flowalign train` runs."""


class Config(Job):
    """A training run; what is learnt depends on the stage."""

    seed: int = 0
    """Seed of prompts, noise and initial weights."""
    lora: Lora = Lora()
    tasks: list[Task] = Field(min_length=1)
    rollout: Rollout = Rollout()
    optimizer: Optimizer = Optimizer()
    ema: Ema | None = Ema()
    train: Train = Train()
    evaluation: Evaluation | None = Evaluation()


class GrpoConfig(Config):
    """A teacher, or a mix of tasks, by group-relative policy optimisation."""

    stage: Literal["grpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards."""
    grpo: Grpo = Grpo()


class OpdConfig(Config):
    """A student by on-policy distillation from routed teachers."""

    stage: Literal["opd"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers, on the student's own trajectories."""
    teachers: dict[str, Teacher] = Field(min_length=1, examples=[{"ocr": {"adapter": "runs/ocr"}}])
    """Teachers by name."""
    student: Student = Student()
    anchor: Anchor | None = None
    """The anchor of MAR; null = none."""
    grpo: Grpo = Grpo()
    """Only for student.reward_weight > 0."""


class SftConfig(Config):
    """A cold start from routed teachers' images."""

    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers' images."""
    teachers: dict[str, Teacher] = Field(min_length=1, examples=[{"ocr": {"adapter": "runs/ocr"}}])
    """Teachers by name."""
    sft: Sft = Sft()


class MergeConfig(Job):
    """A merge of adapters of one base; see flowalign.teachers.merge."""

    stage: Literal["merge"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Add weight updates."""
    adapters: list[str] = Field(min_length=2, examples=[["runs/a/adapter", "runs/b/adapter"]])
    """Adapter folders or Hub ids."""
    weights: list[float] | None = Field(default=None, examples=[[0.5, 0.5]])
    """One an adapter; null = 1 each, the plain sum."""
    method: Literal["concat", "svd", "ties", "dare"] = "concat"
    """concat is exact, and the ranks add."""
    rank: Count | None = Field(default=None, examples=[32])
    """Rank of the result (not for concat); null = the largest given."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share that ties and dare keep."""
    seed: int = 0
    """Of what dare drops."""
    lines: Annotated[tuple[float, float], _as_tuple] | None = Field(
        default=None, examples=[[0.5, 1]]
    )
    """LiNeS: scales of the shallowest and the deepest block."""


class RecipeConfig(Job):
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


class Sampling(Section):
    """How images are sampled for an evaluation."""

    steps: Count = 10
    """Denoising steps, without noise (Euler)."""
    guidance: NotNegative = 4.5
    """CFG scale; 1 = no unconditional pass."""
    seed: int = 1234
    """Seed of the initial noise, the same for every model."""
    batch_size: Count = 32
    """Images per forward pass of a process."""


class Fidelity(Section):
    """How far the images are from reference images: a Fréchet distance between their features."""

    features: str = Field(default="tiny", examples=["tiny", "my_features:dino"])
    """A CLIP (`tiny`, a folder, a Hub id), or package.module:function, [B,3,H,W] -> [B,D]."""
    reference: str = Field(default="tiny", examples=["tiny", "data/coco_val2017"])
    """`tiny` (scenes drawn from the benchmarks' own metadata), or a folder of images."""


class Report(Section):
    """What report.html shows."""

    title: str | None = Field(default=None, examples=["Flow-OPD on the tiny world"])
    """Its heading; null = named after the base model."""
    images: Annotated[int, Field(ge=0)] = 24
    """Prompts of a benchmark whose images are shown, the first ones."""


class EvalConfig(Root):
    """An evaluation of the base model and of adapters on it."""

    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Says that this is an evaluation."""
    models: dict[str, str | None] = Field(
        default={"base": None}, min_length=1, examples=[{"base": None, "ocr": "runs/ocr/adapter"}]
    )
    """Name -> adapter folder, or null for the base model; the first is compared with."""
    compare: dict[str, list[str]] = Field(default={}, examples=[{"student": ["ocr", "merged"]}])
    """Name -> other models that it is compared with, besides the first."""
    benchmarks: list[Benchmark] = Field(min_length=1)
    sampling: Sampling = Sampling()
    fidelity: Fidelity | None = None
    report: Report = Report()
    keep_images: bool = False
    """Keep every image under <output>/images; false = those that the report shows."""


STAGES: dict[str, type[Root]] = {
    "grpo": GrpoConfig,
    "opd": OpdConfig,
    "sft": SftConfig,
    "merge": MergeConfig,
    "recipe": RecipeConfig,
    "eval": EvalConfig,
}
C = TypeVar("C", bound=Root)


def command(stage: str) -> str:
    """What runs a stage."""
    return "flowalign train" if issubclass(STAGES[stage], Job) else "flowalign eval"


# Reading ---------------------------------------------------------------------------------------


def load(path: str | Path, overrides: Sequence[str] = (), *, stage: type[C] = Config) -> C:
    """The config in a file, with `key.path=value` overrides (values are YAML, items by index).

    stage: the kind of config that is wanted, one of STAGES' values or Root.
    """
    return parse(read(path), overrides, source=str(path), stage=stage)


def read(path: str | Path) -> Any:
    """What a YAML file holds, unchecked; ConfigError if it is missing or not YAML."""
    path = Path(path)
    if not path.is_file():
        present = ", ".join(sorted(str(p) for p in path.parent.glob("*.yaml"))[:12])
        hint = f"there are {present}" if present else f"no .yaml lies in {path.parent.absolute()}"
        raise ConfigError([f"no such file; {hint}."], str(path))
    try:
        return _read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"not readable as YAML: {error}"], str(path)) from None


def parse(
    data: Any, overrides: Sequence[str] = (), *, source: str = "config", stage: type[C] = Config
) -> C:
    """The config in a mapping; every problem is collected into one ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError([f"want keys and values at the top, got {_shown(data)}."], source)
    data = deepcopy(dict(data))
    problems = [p for text in overrides if (p := _override(data, text))]
    root, wrong = _root(data, stage)
    problems += [wrong] if wrong else []
    if root is None:
        raise ConfigError(problems, source)
    try:
        config = root.model_validate(data)
        bad: set[str] = set()
    except ValidationError as error:
        problems += [_explain(e, root) for e in error.errors()]
        bad = {_dotted(e["loc"]) for e in error.errors()}
        config = _without(root, data, [e["loc"] for e in error.errors()])
    if config is not None:  # conflicts, but for those that involve a value already refused
        problems += [text for keys, text in _conflicts(config) if not _touch(keys, bad)]
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def _root(data: dict[str, Any], wanted: type[C]) -> tuple[type[C] | None, str]:
    """The model that `stage` names, and what is wrong with it ("" = nothing).

    A stage that does not exist is replaced by the one with the nearest name, or else with the
    most of the keys, so that the other keys are checked too.
    """
    possible = {name: root for name, root in STAGES.items() if issubclass(root, wanted)}
    listed = " or ".join(map(repr, possible))
    seen = data.get("stage")
    if isinstance(seen, str) and seen in possible:
        return possible[seen], ""
    if isinstance(seen, str) and seen in STAGES:
        return None, f"stage: {seen!r} is run by `{command(seen)}`; this command wants {listed}."
    close = difflib.get_close_matches(str(seen).lower(), possible, n=1)
    shared = {name: len(data.keys() & root.model_fields) for name, root in possible.items()}
    meant = close[0] if close else max(shared, key=shared.__getitem__)
    if "stage" in data:
        hint = f" Did you mean {close[0]!r}?" if close else ""
        problem = f"stage: got {_shown(seen)}; want {listed}.{hint}"
    else:
        problem = f"stage: missing. Add `stage:` with {listed}."
    data["stage"] = meant
    return possible[meant], problem


def to_yaml(config: Root) -> str:
    """The whole config, defaults included; `parse` of it gives the same config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader, but the last of two equal keys does not silently win."""
        keys = [k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode)]
        for key_node, _ in node.value:
            if keys.count(key_node.value) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} is given twice",
                    problem_mark=key_node.start_mark,
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
        list("-+.0123456789"),
    )


def _read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def _override(data: dict[str, Any], text: str) -> str | None:
    """Write one `key.path=value` into the raw data; return what is wrong with it, if anything."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return f"override {text!r}: want key.path=value, for example optimizer.lr=1e-4."
    try:
        parsed = _read_yaml(value)
    except yaml.YAMLError as error:
        return f"override {text!r}: the value is not YAML: {error}"
    here: Any = data
    for depth, key in enumerate(keys):
        name, last = ".".join(keys[:depth]), depth == len(keys) - 1
        place: Any = key
        if isinstance(here, list):
            if not key.isdecimal() or int(key) >= len(here):
                return f"override {text!r}: {name} has {len(here)} items, from 0, and no {key!r}."
            place = int(key)
        elif not isinstance(here, dict):
            return f"override {text!r}: {name} is {_shown(here)}, which has no keys."
        elif not last and here.get(key) is None:
            here[key] = {}
        if last:
            here[place] = parsed
        here = here[place]
    return None


# Explaining ------------------------------------------------------------------------------------


def _explain(error: Any, root: type[Root]) -> str:
    """One of pydantic's errors as: where, what was seen, what is possible, what to do."""
    *parents, name = error["loc"] or ("config",)
    where, seen = _dotted(error["loc"]), error["input"]
    owner, inner = _annotation_at(parents, root), _annotation_at(error["loc"], root)
    fields = owner.model_fields if _is_section(owner) else {}
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        return f"{where}: unknown key.{hint} Possible keys: {', '.join(fields)}."
    example = _example(fields.get(name)) if name in fields else ""
    if error["type"] == "missing":
        keys = f" with the keys {', '.join(inner.model_fields)}" if _is_section(inner) else ""
        return f"{where}: missing. Add `{name}:`{keys}.{example}"
    if error["type"].startswith("model_") and _is_section(inner):
        return f"{where}: got {_shown(seen)}; want the keys {', '.join(inner.model_fields)}."
    wanted = re.sub(
        "^Input should be |valid | after validation|^(List|Tuple|Dictionary) should have ",
        "",
        error["msg"],
    )
    if error["type"] == "literal_error":
        close = difflib.get_close_matches(str(seen).lower(), re.findall(r"'(.*?)'", wanted), n=1)
        example = f" Did you mean {close[0]!r}?" if close else ""
    elif error["type"] == "string_type" and not isinstance(seen, (list, dict, type(None))):
        example = f" Put it in quotes if it is meant as text.{example}"
    return f"{where}: got {_shown(seen)}; want {wanted}.{example}"


def _example(info: Any) -> str:
    """An example of a field: its own, or its default, as YAML."""
    default = None if info.is_required() else info.get_default()
    example = info.examples[0] if info.examples else default
    if example is None or isinstance(example, BaseModel):
        return ""
    text = yaml.dump([example], Dumper=_Dumper, default_flow_style=True, width=1000)
    return f" For example: {text.strip()[1:-1]}."


def _annotation_at(loc: Sequence[int | str], root: type[Root]) -> Any:
    """The type that the schema has at this place; None where it has none."""
    here: Any = root
    for part in loc:
        if _is_section(here):
            here = here.model_fields[part].annotation if part in here.model_fields else None
        else:
            here = get_args(here)[-1] if get_args(here) else None  # of a mapping: its values
        while get_origin(here) in (Annotated, Union, UnionType):
            here = get_args(here)[0]
    return here


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _dotted(loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in loc)


def _shown(value: Any) -> str:
    kinds = {str: "text", int: "whole number", float: "number", bool: "true/false", list: "list"}
    if value is None:
        return "nothing (null)"
    value = list(value) if isinstance(value, tuple) else value
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"the {kinds.get(type(value), 'mapping')} {text}"


# Checking --------------------------------------------------------------------------------------


def _without(root: type[C], data: dict[str, Any], locs: Sequence[Sequence[int | str]]) -> C | None:
    """The config with the refused keys left out, if the rest makes one."""
    rest = deepcopy(data)
    for loc in locs:
        here: Any = rest
        for part in loc[:-1]:
            here = here.get(part) if isinstance(here, dict) else here[int(part)]
        if not isinstance(here, dict):
            return None  # without an item of a list the others would change their index
        here.pop(loc[-1], None)
    try:
        return root.model_validate(rest)
    except ValidationError:
        return None


def _touch(keys: Sequence[str], bad: set[str]) -> bool:
    pairs = [(f"{key}.", f"{other}.") for key in keys for other in bad]
    return any(a.startswith(b) or b.startswith(a) for a, b in pairs)


def _conflicts(config: Root) -> Iterator[tuple[list[str], str]]:
    """(the keys involved, the problem) for values that are possible alone but not together."""
    if isinstance(config, Config):
        yield from _noise_conflicts(config)
        yield from _window_conflicts(config.rollout)
        yield from _reward_conflicts(config)
        yield from _sharing_conflicts(config)
        watched = config.evaluation.watch if config.evaluation else []
        yield from _same_names("tasks", [task.name for task in config.tasks])
        if watched:
            names = [mark.name for mark in [*watched, *config.tasks]]
            yield from _same_names("evaluation.watch", names)
        yield from _validation_conflicts(config)
    if isinstance(config, OpdConfig | SftConfig):
        yield from _routing_conflicts(config)
    if isinstance(config, OpdConfig):
        yield from _student_conflicts(config)
    if isinstance(config, MergeConfig):
        yield from _merge_conflicts(config)
    if isinstance(config, RecipeConfig):
        yield from _file_names("stages", config.stages)
    if isinstance(config, EvalConfig):
        yield from _same_names("benchmarks", [mark.name for mark in config.benchmarks])
        yield from _file_names("benchmarks", [mark.name for mark in config.benchmarks])
        yield from _file_names("models", config.models)
        yield from _column_names(config.benchmarks)
        yield from _unknown_models(config)


def _merge_conflicts(config: MergeConfig) -> Iterator[tuple[list[str], str]]:
    if config.weights is not None and len(config.weights) != len(config.adapters):
        yield (
            ["weights", "adapters"],
            f"weights: {len(config.weights)} for {len(config.adapters)} adapters. Give one each, "
            "or null.",
        )
    if config.rank is not None and config.method == "concat":
        yield (
            ["rank", "method"],
            f"rank: {config.rank}, but method 'concat' has the sum of the ranks. Use 'svd', or "
            "leave it out.",
        )


def _sharing_conflicts(config: Config) -> Iterator[tuple[list[str], str]]:
    prompts, updates = config.rollout.prompts, config.optimizer.updates_per_rollout
    if prompts % updates:
        yield (
            ["rollout.prompts", "optimizer.updates_per_rollout"],
            f"rollout.prompts: {prompts} prompts cannot be shared evenly among "
            f"optimizer.updates_per_rollout = {updates}; a group stays whole. "
            f"Use a multiple of {updates}, for example {-(-prompts // updates) * updates}.",
        )


def _same_names(key: str, names: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        places = ", ".join(f"{key}.{i}" for i, other in enumerate(names) if other == name)
        yield [key], f"{places}: all are named {name!r}. Give each its own name."


def _file_names(key: str, names: Iterable[str]) -> Iterator[tuple[list[str], str]]:
    for name in names:
        if not re.fullmatch(r"[\w-]+", name):
            yield (
                [key],
                f"{key}: the name {name!r} is to stand in file names and tables. "
                "Use letters, digits, _ and - only.",
            )


def _column_names(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[list[str], str]]:
    for index, mark in enumerate(benchmarks):
        if mark.name in ("average", "fidelity"):
            yield (
                [f"benchmarks.{index}.name"],
                f"benchmarks.{index}.name: {mark.name!r} is a column that every table has for "
                "itself. Choose another name.",
            )


def _unknown_models(config: EvalConfig) -> Iterator[tuple[list[str], str]]:
    for name, others in config.compare.items():
        for model in (name, *others):
            if model not in config.models:
                close = difflib.get_close_matches(model, config.models, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                yield (
                    [f"compare.{name}", "models"],
                    f"compare.{name}: no model is named {model!r}.{hint} "
                    f"Possible: {', '.join(config.models)}.",
                )
        if name in others:
            yield [f"compare.{name}"], f"compare.{name}: compared with itself. Leave it out."


def _validation_conflicts(config: Config) -> Iterator[tuple[list[str], str]]:
    for index, task in enumerate(config.tasks):
        if config.evaluation and task.validation is None:
            yield (
                ["evaluation", f"tasks.{index}.validation"],
                f"tasks.{index}.validation: missing, though `evaluation` is on. Name a prompt set "
                "that is not trained on, or write `evaluation: null`.",
            )


def _noise_conflicts(config: Config) -> Iterator[tuple[list[str], str]]:
    """The noise that a stage cannot do without."""
    rollout, need = config.rollout, _noise_needed(config)
    keys = ["rollout.kind", "rollout.noise_level"]
    if rollout.kind == "ode" and need:
        yield (
            ["rollout.kind"],
            f"rollout.kind: 'ode' adds no noise, so {need}. Use 'sde' or 'cps'.",
        )
    elif rollout.kind != "ode" and rollout.noise_level == 0 and need:
        yield (
            keys,
            f"rollout.noise_level: 0 adds no noise, so {need}. "
            "Use a value above 0, for example 0.7.",
        )
    elif rollout.kind == "cps" and rollout.noise_level > 1:
        yield (
            keys,
            f"rollout.noise_level: {rollout.noise_level} with kind 'cps', whose angle a*pi/2 ends "
            "at a = 1. Use a value in (0, 1].",
        )


def _noise_needed(config: Config) -> str:
    """What a rollout without noise would lack for this config ("" = nothing)."""
    if isinstance(config, GrpoConfig):
        return "grpo has nothing to learn from"
    if not isinstance(config, OpdConfig):
        return ""
    if config.student.reward_weight > 0:
        return "the reward (student.reward_weight) has nothing to learn from"
    if config.student.gradient != "pathwise":
        return f"student.gradient {config.student.gradient!r} has no log-probabilities"
    if config.student.weighting in ("kl", "published"):
        return f"student.weighting {config.student.weighting!r} (a KL) is infinite"
    return ""


def _reward_conflicts(config: Config) -> Iterator[tuple[list[str], str]]:
    """Rewards and groups where rewards are learnt from, or evaluated."""
    learns = isinstance(config, GrpoConfig) or (
        isinstance(config, OpdConfig) and config.student.reward_weight > 0
    )
    if learns and config.rollout.copies < 2:
        yield (
            ["rollout.copies"],
            f"rollout.copies: got {config.rollout.copies}; an advantage is relative to the other "
            "images of a prompt. Use 2 or more.",
        )
    for index, task in enumerate(config.tasks):
        if task.reward is None and (learns or config.evaluation):
            why = "this run learns from it" if learns else "`evaluation` is on"
            yield (
                [f"tasks.{index}.reward", "evaluation"],
                f"tasks.{index}.reward: missing, and {why}. Add `reward:` with the keys name, "
                "options" + ("." if learns else ", or write `evaluation: null`."),
            )
        if task.teacher is not None and isinstance(config, GrpoConfig):
            yield (
                [f"tasks.{index}.teacher"],
                f"tasks.{index}.teacher: {task.teacher!r}, but the stage 'grpo' has no teachers. "
                "Leave it out, or use the stage 'opd'.",
            )


def routing(config: OpdConfig | SftConfig) -> dict[str, str]:
    """Task -> name of its teacher."""
    return {task.name: task.teacher or task.name for task in config.tasks}


def _routing_conflicts(config: OpdConfig | SftConfig) -> Iterator[tuple[list[str], str]]:
    names, routed = sorted(config.teachers), routing(config)
    for index, task in enumerate(config.tasks):
        if routed[task.name] not in names:
            yield (
                [f"tasks.{index}.teacher", "teachers"],
                f"tasks.{index}.teacher: task {task.name!r} is routed to "
                f"{routed[task.name]!r}, and there are only {names}. Name one of these, or add "
                "that teacher under `teachers`.",
            )
    for name in sorted(config.teachers.keys() - set(routed.values())):
        yield (
            ["teachers", "tasks"],
            f"teachers.{name}: no task is routed to it. Give a task `teacher: {name}`, or leave "
            "it out.",
        )
    yield from _file_names("teachers", names)


def _student_conflicts(config: OpdConfig) -> Iterator[tuple[list[str], str]]:
    student, rollout = config.student, config.rollout
    if student.gradient in ("published", "detached") and student.weighting != "published":
        yield (
            ["student.gradient", "student.weighting"],
            f"student.weighting: {student.weighting!r} with gradient {student.gradient!r}, which "
            "is the published arithmetic. Use weighting 'published', or gradient 'pathwise'.",
        )
    if student.gradient != "pathwise" or student.reward_weight > 0:
        own = rollout.guidance if student.guidance is None else student.guidance
        if own != rollout.guidance:
            yield (
                ["student.guidance", "rollout.guidance"],
                f"student.guidance: {own}, but the rollout has {rollout.guidance}: the ratio of "
                "new and old policy needs one policy. Use the same, or gradient 'pathwise' "
                "without a reward.",
            )
    if student.reward_to_go and student.gradient != "policy":
        yield (
            ["student.reward_to_go", "student.gradient"],
            f"student.reward_to_go: true, but gradient {student.gradient!r} has no rewards over "
            "time. Use gradient 'policy', or leave it out.",
        )
    start, stop = rollout.window or (0, max(rollout.steps - 1, 1))
    if student.states.select != "all" and student.states.count > stop - start:
        yield (
            ["student.states", "rollout.window", "rollout.steps"],
            f"student.states.count: {student.states.count}, and rollout.window has only "
            f"{stop - start} steps. Use at most {stop - start}.",
        )


def _window_conflicts(rollout: Rollout) -> Iterator[tuple[list[str], str]]:
    keys = ["rollout.window", "rollout.steps", "rollout.kind"]
    steps = rollout.steps
    if rollout.window is None:
        if steps == 1:
            yield (
                keys[:2],
                "rollout.steps: 1, and the default window is all steps but the last, which leaves "
                "none to train. Use more steps.",
            )
        return
    start, stop = rollout.window
    if not 0 <= start < stop <= steps:
        yield (
            keys[:2],
            f"rollout.window: [{start}, {stop}] is not a non-empty part of [0, {steps}] "
            f"(rollout.steps = {steps}). Want 0 <= start < stop <= {steps}.",
        )
    elif rollout.kind == "cps" and stop == steps:
        yield (
            keys,
            f"rollout.window: [{start}, {stop}] holds the last step, which is noiseless under "
            f"'cps'. Let it stop at {steps - 1} or earlier, or use kind 'sde'.",
        )


def check_world(config: Root, num_processes: int, pending: Collection[str] = ()) -> None:
    """Refuse what cannot run here: shares of the processes, prompt sets, rewards, adapters.

    Called before any model is loaded; raises one ConfigError with every problem. pending: adapters
    that are not there yet, because an earlier stage of a recipe will write them.
    """
    import flowalign.rewards as rewards  # only here: importing a config needs no rewards

    problems = list(_adapter_problems(config, pending))
    if isinstance(config, Config):
        problems += _training_problems(config, num_processes)
    if isinstance(config, EvalConfig):
        problems += _reference_problems(config.fidelity)
    for place, name, reward, sources in _judged(config):
        known = reward is not None
        try:
            if reward is not None:
                rewards.check(reward.name, reward.options)
        except (ValueError, KeyError, TypeError, ImportError) as error:
            problems.append(f"{place}.reward: {_text(error)}")
            known = False
        for key, source in sources.items():
            try:
                batch = load_prompts(source, name)
                if known and reward is not None:
                    options = reward.options
                    rewards.check_prompts(reward.name, options, batch.prompts, batch.metadata)
            except (PromptError, OSError) as error:
                problems.append(f"{place}.{key}: {error}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{place}.{key}: {source}, {_text(error)}")
    if problems:
        raise ConfigError(problems)


def _judged(
    config: Root,
) -> Iterator[tuple[str, str, RewardSpec | None, dict[str, str]]]:
    """(place in the config, name, its reward, {key: prompt set}) of every task or benchmark."""
    if isinstance(config, EvalConfig):
        for index, mark in enumerate(config.benchmarks):
            yield f"benchmarks.{index}", mark.name, mark.reward, {"prompts": mark.prompts}
        return
    if not isinstance(config, Config):
        return
    for index, mark in enumerate(config.evaluation.watch if config.evaluation else ()):
        yield f"evaluation.watch.{index}", mark.name, mark.reward, {"prompts": mark.prompts}
    for index, task in enumerate(config.tasks):
        sources = {"prompts": task.prompts}
        if task.validation is not None:
            sources["validation"] = task.validation
        yield f"tasks.{index}", task.name, task.reward, sources


def _training_problems(config: Config, num_processes: int) -> Iterator[str]:
    updates, prompts = config.optimizer.updates_per_rollout, config.rollout.prompts
    share = num_processes * updates
    if prompts % share:
        yield (
            f"rollout.prompts: {prompts} prompts cannot be shared by {num_processes} processes x "
            f"optimizer.updates_per_rollout = {updates}; a group stays whole. "
            f"Use a multiple of {share}, for example {-(-prompts // share) * share}."
        )
    if config.optimizer.name == "adamw8bit" and not importlib.util.find_spec("bitsandbytes"):
        yield (
            "optimizer.name: 'adamw8bit' needs bitsandbytes, which is not installed. "
            "Run `pip install 'flowalign[gpu]'`, or use 'adamw'."
        )


def adapters(config: Root) -> dict[str, str]:
    """{place in the config: folder or Hub id} of every adapter that a stage reads."""
    found: dict[str, str | None] = {}
    if isinstance(config, Config):
        found["lora.init"] = config.lora.init
    if isinstance(config, OpdConfig | SftConfig):
        found |= {f"teachers.{name}": t.adapter for name, t in config.teachers.items()}
    if isinstance(config, OpdConfig) and config.anchor:
        found["anchor.adapter"] = config.anchor.adapter
    if isinstance(config, MergeConfig):
        found |= {f"adapters.{i}": source for i, source in enumerate(config.adapters)}
    if isinstance(config, EvalConfig):
        found |= {f"models.{name}": folder for name, folder in config.models.items()}
    return {place: folder for place, folder in found.items() if folder is not None}


def adapter_folder(source: str | Path) -> Path:
    """Where an adapter lies: a folder, or tiny/NAME for one that ships with the package. A Hub id
    comes back as it is."""
    shipped = TEACHERS / str(source).removeprefix("tiny/")
    return shipped if str(source).startswith("tiny/") else Path(source).expanduser()


def _adapter_problems(config: Root, pending: Collection[str] = ()) -> Iterator[str]:
    """Adapters that are not there, or that say of themselves that they are another base's.
    pending: those that an earlier stage of a recipe will write."""
    for place, source in adapters(config).items():
        folder = adapter_folder(source)
        if source in pending:
            continue
        if (folder / ADAPTER).is_file():
            try:
                base = adapter_base(folder)
            except SafetensorError as error:
                yield f"{place}: {folder / ADAPTER} is not a safetensors file ({error})."
                continue
            if base not in (None, config.model.id):
                yield (
                    f"{place}: {source!r} was trained on {base!r}, and model.id is "
                    f"{config.model.id!r}. Name an adapter of this base, or that base as model.id."
                )
            continue
        if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not folder.parent.exists():
            continue  # a Hub id: found out when it is loaded
        inner = folder / "adapter"
        hint = f"did you mean {Path(source) / 'adapter'}?" if (inner / ADAPTER).is_file() else (
            "training writes one to <output>/adapter; null is the base model."
        )  # fmt: skip
        seen = "the folder holds" if folder.is_dir() else "no such folder, so"
        yield f"{place}: {source!r}: {seen} no {ADAPTER}; {hint}"


def adapter_base(folder: Path) -> str | None:
    """The base that a saved adapter names as its own, read from the head of its file."""
    with safe_open(folder / ADAPTER, framework="numpy") as file:
        text = (file.metadata() or {}).get("lora_adapter_metadata", "{}")
    return json.loads(text).get("transformer.base_model_name_or_path")


def _reference_problems(fidelity: Fidelity | None) -> Iterator[str]:
    if fidelity is None or fidelity.reference == "tiny":
        return
    folder = Path(fidelity.reference).expanduser()
    if image_files(folder):
        return
    seen = f"the folder holds no {', '.join(IMAGES)}" if folder.is_dir() else "no such folder"
    yield (
        f"fidelity.reference: {fidelity.reference!r}: {seen}. Name a folder of images, or 'tiny' "
        "for scenes drawn from the benchmarks' own metadata."
    )


def _text(error: Exception) -> str:
    return str(error.args[0] if error.args else error)
