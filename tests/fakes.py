"""A small SD3 pipeline with random weights, rewards that nobody needs, and runs of both."""

# diffusers' annotations are narrower than what it takes (tuple[str], CLIPTokenizer):
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from flowalign import config
from flowalign.backbone import Backbone
from flowalign.backbone.sd3 import SD3
from flowalign.checks import Launch, enforce
from flowalign.commands import build, recipe, train
from flowalign.config.safe_yaml import dump_yaml
from flowalign.rewards import RewardBase
from flowalign.training.algorithm import STUDENT
from flowalign.training.loop import Loop
from flowalign.types import PromptBatch, Rollout, Scores

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "tiny"))  # in processes of ours, too
import parts

TARGETS = SD3.targets
Rows = Sequence[Mapping[str, Any]]  # the metadata of prompts
PROMPTS = [f'a {colour} sign that says "{text}"' for colour in ("red", "blue") for text in "ABCD"]


# The model ---------------------------------------------------------------------------------------


def pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """The tiny model's text encoders with a smaller transformer and VAE, all weights random."""
    torch.manual_seed(seed)
    width = sum(parts.CLIP_WIDTHS)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=parts.LATENT_CHANNELS,
        out_channels=parts.LATENT_CHANNELS, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, caption_projection_dim=32, joint_attention_dim=width,
        pooled_projection_dim=width, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
        latent_channels=parts.LATENT_CHANNELS, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    vae.register_to_config(shift_factor=0.1, scaling_factor=1.3)
    clips = [parts.clip(width).eval() for width in parts.CLIP_WIDTHS]
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(), scheduler=parts.scheduler(), vae=vae.eval(),
        text_encoder=clips[0], tokenizer=parts.tokenizer(), text_encoder_2=clips[1],
        tokenizer_2=parts.tokenizer(), text_encoder_3=parts.t5().eval(),
        tokenizer_3=parts.tokenizer(max_length=256),
    )  # fmt: skip


def larger(folder: Path) -> str:
    """The same with a transformer of twice the width and more layers, saved in a folder."""
    pipe = pipeline()
    torch.manual_seed(7)
    wider = {"num_layers": 3, "num_attention_heads": 4, "caption_projection_dim": 64}
    transformer = SD3Transformer2DModel(**{**pipe.transformer.config, **wider})
    pipe.register_modules(transformer=transformer.eval())
    pipe.save_pretrained(folder)
    return str(folder)


SMALL: dict[str, Any] = {"height": 32, "width": 32, "max_sequence_length": parts.T5_LENGTH}


def backbone(model: str, pipe: Any = None, **options: Any) -> Backbone:
    """The model of a folder for small images, without an adapter. pipe: its pipeline, changed."""
    settings = config.ModelConfig(id=model, **SMALL | options)
    return Backbone(pipe, settings) if pipe else Backbone.load(settings)


def adapted(
    model: str, name: str = STUDENT, *, rank: int = 4, alpha: float = 6.0,
    targets: list[str] | None = None, seed: int = 1, scale: float = 0.1, **options: Any,
) -> Backbone:  # fmt: skip
    """The same with an adapter that matters."""
    found = backbone(model, **options)
    found.add_adapter(name, rank=rank, alpha=alpha, targets=targets)
    shake(found, name, seed, scale)
    return found


def velocities(backbone: Backbone, found: Rollout, rows: list[int], guidance: float) -> Tensor:
    """Of a model that knows nothing of a student [B,S,C,h,w], at the states of some images."""
    steps = len(found.steps)
    sigma = found.sigmas[found.steps].repeat(len(rows))
    cond = found.conditioning.select(torch.tensor(rows).repeat_interleave(steps))
    with torch.no_grad():
        flat = backbone.velocity(found.states[rows].flatten(0, 1), sigma, cond, guidance=guidance)
    return flat.unflatten(0, (len(rows), steps))


def shake(backbone: Backbone, name: str = STUDENT, seed: int = 1, scale: float = 0.1) -> None:
    """Random weights for both halves of an adapter: a fresh one has B = 0 and does nothing."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backbone.adapter_parameters(name):
        drawn = scale * torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn.to(parameter.device)


def batch(count: int = 4) -> PromptBatch:
    """The first prompts, of task `red`."""
    return PromptBatch(PROMPTS[:count], ["red"] * count, [{}] * count)


# Rewards -----------------------------------------------------------------------------------------


def redness(images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
    """How much more red than the rest."""
    red, rest = images[:, 0].mean((1, 2)), images[:, 1:].mean((1, 2, 3))
    return Scores.of(red - rest, red=red)


def noisy_redness(images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
    """Redness, plus what a plugin might draw from the global generators."""
    noise = torch.rand(len(images)).to(images.device) + random.random()
    return Scores.of(redness(images, prompts, metadata).value + 1e-2 * noise)


def first_of_pair(images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
    """Redness for the images of the first prompt; all others are worth the same."""
    value = redness(images, prompts, metadata).value
    mine = torch.tensor([p == prompts[0] for p in prompts], device=value.device)
    return Scores.of(torch.where(mine, value, 0.5))


class Graded(RewardBase):
    """Redness with a gradient."""

    differentiable = True

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        return redness(images, prompts, metadata)

    def with_gradient(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Tensor:
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


class Vivid(Graded):
    """Redness with a gradient, in a range a thousand times larger."""

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        return vivid(images, prompts, metadata)

    def with_gradient(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Tensor:
        return 1e3 * super().with_gradient(images, prompts, metadata)


class Seeding:
    """Redness that seeds the global generators."""

    def __init__(self) -> None:
        set_seed(123)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        set_seed(0)
        return redness(images, prompts, metadata)


def constant(images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
    """Whatever it is, it is worth a half."""
    return Scores.of([0.5] * len(images))


def vivid(images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
    """Redness in a range a thousand times larger."""
    return Scores.of(1e3 * redness(images, prompts, metadata).value)


class Faulty:
    """Redness that fails on its n-th images (counted over all calls), with a NaN or an error."""

    def __init__(self, rows: list[int], how: str = "nan") -> None:
        self.rows, self.how, self.seen = rows, how, 0

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        value = redness(images, prompts, metadata).value
        mine = range(self.seen, self.seen + len(images))
        self.seen += len(images)
        failing = [row - mine[0] for row in self.rows if row in mine]
        if failing and self.how == "raise":
            raise ConnectionError("the judge is on holiday")
        value[failing] = float("nan")
        return Scores.of(value)


class Choosy:
    """Redness that breaks on some prompts and finds the images of others all alike."""

    def __init__(self, bad: list[str], flat: list[str]) -> None:
        self.bad, self.flat = bad, flat

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        if any(prompt in self.bad for prompt in prompts):
            raise RuntimeError("no opinion")
        found = redness(images, prompts, metadata)
        flat = torch.tensor([prompt in self.flat for prompt in prompts], device=images.device)
        parts = {} if bool(flat.all()) else {"red": found.parts["red"]}
        return Scores.of(torch.where(flat, 0.0, found.value), **parts)


def press(number: int = signal.SIGINT) -> None:
    """Signal the main thread, as Ctrl-C does; it has a moment to see it before this returns."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    time.sleep(0.5)


class Interrupting:
    """Noisy redness that has its process signalled at its n-th call: by default, as by Ctrl-C.
    once: a file that is then written, after which it is no longer."""

    def __init__(self, call: int, once: str | None = None, number: int = signal.SIGINT) -> None:
        self.call, self.number, self.calls = call, number, 0
        self.once = Path(once) if once else None

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        self.calls += 1
        found = noisy_redness(images, prompts, metadata)
        if self.calls == self.call and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            press(self.number)
        return found


# Features ----------------------------------------------------------------------------------------


def mean_colour(images: Tensor) -> Tensor:
    """[B,3]: what a picture looks like from afar."""
    return images.mean((2, 3))


# Runs --------------------------------------------------------------------------------------------


def settings(
    model: str, output: Path, *overrides: str, reward: str = "redness"
) -> config.TrainingStage:
    """A small GRPO run: 2 prompts x 4 copies, 4 steps of which 3 train, one optimizer step in one
    micro-batch. Without an alarm, for which the base samples images, too."""
    output.mkdir(parents=True, exist_ok=True)
    prompts = output.parent / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    data = {
        "stage": "grpo", "output": str(output), "model": {"id": model, **SMALL},
        "lora": {"rank": 4, "alpha": 8.0},
        "tasks": [{"name": "red", "prompts": str(prompts), "reward": {"name": f"fakes:{reward}"}}],
        "rollout": {"steps": 4, "guidance": 1.0, "prompts": 2, "group_size": 4, "batch_size": 8},
        "optimizer": {"lr": 1e-3, "micro_batch": 32}, "ema": {"decay": 0.5, "every": 1},
        "train": {"updates": 4, "checkpoint_every": 2, "trackers": []}, "evaluation": None,
        "alarm": None,
    }  # fmt: skip
    return config.parse(data, overrides)


def evaluation(
    model: str, folder: Path, prompts: Sequence[Any], /, *benchmarks: Mapping[str, Any], **keys: Any
) -> Path:
    """The config of a small evaluation, as a file; it writes to folder/out. prompts: texts, or rows
    of a .jsonl. A benchmark that names no judge has redness."""
    rows = [row if isinstance(row, str) else json.dumps(row) for row in prompts]
    file = folder / f"prompts.{'txt' if rows == [*prompts] else 'jsonl'}"
    file.write_text("\n".join(rows))
    marks = []
    for given in benchmarks or [{}]:
        judged = given.keys() & {"reward", "rewards"}
        judge = {} if judged else {"reward": {"name": "fakes:redness"}}
        marks.append({"name": "red", "prompts": str(file), **judge, **given})
    data = {
        "stage": "eval", "output": str(folder / "out"), "model": {"id": model, **SMALL},
        "benchmarks": marks, "sampling": {"steps": 2, "guidance": 1.0, "batch_size": 4},
    }  # fmt: skip
    (folder / "eval.yaml").write_text(dump_yaml(data | keys))
    return folder / "eval.yaml"


def mixed(found: config.TrainingStage, *overrides: str) -> config.TrainingStage:
    """A GRPO run with a second task, whose rewards have a far larger range."""
    raw = found.model_dump(mode="json")
    (red,) = raw["tasks"]
    raw["tasks"] = [red, {**red, "name": "vivid", "reward": {"name": "fakes:vivid"}}]
    return config.parse(raw, overrides)


def wired(found: config.TrainingStage, *, moved: bool = False) -> Loop:
    """The run of a config as `train` builds it; moved: its adapter already matters."""
    AcceleratorState._reset_state(reset_partial_state=True)
    loop, *_ = build.wire(found)
    if moved:
        shake(loop.backbone)
    return loop


@functools.cache
def _teachers(model: str) -> Path:
    """The teachers of a model, made once."""
    folder = Path(tempfile.mkdtemp(prefix="teachers_"))
    for seed, name in enumerate(["even", "odd"]):
        teacher = adapted(model, "t", rank=2 + seed, alpha=4.0, seed=seed + 5, scale=0.2)
        teacher.save_adapter("t", folder / name)
    return folder


def stages_of(found: config.RecipeStage, home: Path, processes: int = 1) -> dict[str, config.Stage]:
    """The config of every stage by name, checked as before a run."""
    stages, problems = recipe.stages_and_problems(found, home, Launch(processes, False))
    enforce(problems)
    return stages


def teachers(model: str, folder: Path) -> dict[str, str]:
    """Two teachers of a model that differ: name -> adapter folder."""
    shutil.copytree(_teachers(model), folder, dirs_exist_ok=True)
    return {name: str(folder / name) for name in ("even", "odd")}


def distillation(
    model: str, output: Path, *overrides: str, stage: str = "opd", alone: str = ""
) -> config.TrainingStage:
    """The same run with two tasks and a teacher each; alone: the one that has both."""
    raw = settings(model, output).model_dump(mode="json", exclude={"grpo", "stage"})
    task = raw["tasks"][0]
    taught = {name: {"adapter": path} for name, path in teachers(model, output.parent).items()}
    raw["tasks"] = [{**task, "name": name} for name in taught]
    if alone:
        taught = {alone: taught[alone]}
        raw["tasks"] = [{**task, "teacher": alone} for task in raw["tasks"]]
    if stage == "opd":  # the paper's: every state is trained
        raw["student"] = {"weighting": "kl", "noise_levels": {"select": "all"}}
    return config.parse({**raw, "stage": stage, "teachers": taught}, overrides)


def forward(
    model: str, output: Path, *overrides: str, stage: str = "nft", reward: str = "redness"
) -> config.TrainingStage:
    """The same run on clean images: nft or awm, three noise levels."""
    found = settings(model, output, reward=reward)
    raw = found.model_dump(mode="json", exclude={"grpo", "stage"})
    raw["rollout"] |= {"kind": "ode", "window": None}
    return config.parse({**raw, "stage": stage, stage: {"noise_levels": 3}}, overrides)


def ascending(model: str, output: Path, *overrides: str) -> config.TrainingStage:
    """The same run by the gradient of redness."""
    raw = settings(model, output, reward="Graded").model_dump(mode="json", exclude={"grpo"})
    raw["rollout"] |= {"kind": "ode", "window": None}
    raw |= {
        "stage": "gradient",
        "gradient": {"batch": 3, "tau": 1e3, "old": {"decay": 0.5, "rise": 0.25}},
    }
    return config.parse(raw, overrides)


def write_pairs(folder: Path, rows: int = 8, size: tuple[int, int] = (32, 32)) -> Path:
    """A file of pairs beside their images of random pixels, of height and width."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2 * rows):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    listed = [
        {"prompt": PROMPTS[row], "chosen": f"{2 * row}.png", "rejected": f"{2 * row + 1}.png"}
        for row in range(rows)
    ]  # fmt: skip
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    return folder / "pairs.jsonl"


def pairs(
    model: str, output: Path, *overrides: str, rows: int = 8, size: tuple[int, int] = (32, 32)
) -> config.TrainingStage:
    """The same run on pairs of images, two an update, at three noise levels."""
    raw = settings(model, output).model_dump(mode="json", exclude={"grpo", "stage", "rollout"})
    raw["tasks"] = [{"name": "red", "prompts": str(write_pairs(output.parent, rows, size))}]
    raw |= {
        "stage": "dpo",
        "dpo": {"noise_levels": 3},
        "rollout": {"steps": 4, "prompts": 2, "group_size": 2, "guidance": 1.0},
    }
    return config.parse(raw, overrides)


savefig = Figure.savefig


@functools.cache
def _empty_picture(kind: str) -> bytes:
    file = io.BytesIO()
    savefig(Figure(figsize=(1, 1)), file, format=kind)
    return file.getvalue()


def save_undrawn(self: Figure, fname: Any, format: str | None = None, **options: Any) -> None:
    """Save a figure as an empty picture: to draw it takes as long as the rest of a small run. Tests
    that look at pictures have the fixture `drawn`."""
    picture = _empty_picture(format or "png")
    fname.write_bytes(picture) if isinstance(fname, Path) else fname.write(picture)


Figure.savefig = save_undrawn


def weights(loop: Loop) -> Tensor:
    """All trained parameters of a run, flat."""
    return torch.cat([p.detach().flatten() for p in loop.parameters])


def gradient(loop: Loop, loss: Tensor) -> Tensor:
    """Of a loss, by them."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, loop.parameters)])


def lines(run: Loop | Path | str) -> list[dict[str, Any]]:
    """The log of a run, or of the folder of one."""
    folder = run.folder if isinstance(run, Loop) else Path(run)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(run: Loop | Path | str) -> list[dict[str, Any]]:
    """The same without seconds and rates."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in lines(run)]


def command(*argv: object) -> int:
    """The exit status of `flowalign train`, as in a process of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return train.main([str(arg) for arg in argv])


@dataclass
class FinishedRun:
    """A GRPO run of two tasks and two updates, as `flowalign train` leaves it."""

    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return lines(self.folder)


def finish_run(model: str, folder: Path) -> FinishedRun:
    """Train it. Tests get it as the fixture `finished_run`."""
    raw = mixed(settings(model, folder)).model_dump(mode="json")
    held_out = folder.parent / "held_out.txt"
    held_out.write_text("".join(f"prompt {i}\n" for i in range(20)))
    for task in raw["tasks"]:
        task["validation"] = str(held_out)
    given = [
        "train.updates=2", "train.sample_every=1", "train.trackers=[tensorboard]",
        "train.project=mine", "evaluation={every: 2, prompts: 8}", "alarm.every=1",
        "alarm.images=16", "rollout.prompts=4", "rollout.group_size=4",
    ]  # fmt: skip
    path = folder.parent / "config.yaml"
    path.write_text(config.to_yaml(config.parse(raw, given)))
    with mock.patch.object(Figure, "savefig", savefig):
        assert command("--config", path) == 0
    return FinishedRun(folder)


# Processes ---------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
launch = forked.launch
