"""Many LoRAs into one student without a reward: twelve style LoRAs of the tiny model.

    python benchmarks/many_loras.py --out outputs/many_loras

Makes the LoRAs (plain flow matching on 200 rendered images each), and for 2, 4, 8 and 12 of them a
student, by the config that `flowalign init --stage opd --loras` writes. Then it compares, on
held-out prompts and with equal noise, the base, the stacked adapters and the student with each
LoRA. Prints Markdown, writes OUT/many_loras.json and OUT/many_loras.png. What is there already is
not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from flowalign import gallery
from flowalign.backbone import Backbone
from flowalign.config import ModelConfig
from flowalign.system.escape import table
from flowalign.teachers.bank import Bank, Member
from flowalign.training.algorithm import STUDENT
from flowalign.training.data import load_prompts
from flowalign.training.rollout import Noise, places, sample
from flowalign.types import PromptBatch, Rollout, Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts" / "tiny"))
import prompts  # noqa: E402
import styles  # noqa: E402

MODEL = ModelConfig(id="tiny", height=64, width=64, max_sequence_length=16)
TAGS = ("colors", "two_object", "counting", "color_attr")
IMAGES, HELD_OUT, BATCH = 200, 24, 16
STEPS = 10
SEED = 0


def scenes(split: str, count: int, seed: int) -> list[prompts.Metadata]:
    """Scenes of a split, as the preference task words them, of each tag alike."""
    rng = np.random.default_rng(seed)
    pools = [prompts.geneval_splits(tag)[split] for tag in TAGS]
    pools = [pool for pool in pools if pool]
    rows = [pools[i % len(pools)][rng.integers(len(pools[i % len(pools)]))] for i in range(count)]
    return [prompts.preference_prompt(row) for row in rows]


def write_prompts(name: str, folder: Path, seed: int) -> None:
    """NAME.txt and NAME_val.txt, where `flowalign init` finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, split, count in (("", "train", 4 * IMAGES), ("_val", "val", HELD_OUT)):
        texts = [styles.STYLES[name].prompt(row["prompt"]) for row in scenes(split, count, seed)]
        (folder / f"{name}{suffix}.txt").write_text("\n".join(texts) + "\n")


def train_lora(name: str, folder: Path, steps: int, seed: int) -> None:
    """A LoRA by flow matching: at x_sigma = (1 - sigma) x0 + sigma eps fit v to eps - x0."""
    style, rng = styles.STYLES[name], np.random.default_rng(seed)
    rows = scenes("train", IMAGES, seed)
    pictures = np.stack([style.draw(styles.compose(row, rng)) for row in rows])
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    torch.manual_seed(seed)
    backbone = Backbone.load(MODEL)
    vae = backbone.pipe.vae
    with torch.no_grad():
        mean = torch.cat([vae.encode(part).latent_dist.mean for part in pixels.split(50)])
    clean = (mean - vae.config.shift_factor) * vae.config.scaling_factor
    text = backbone.encode([style.prompt(row["prompt"]) for row in rows])
    backbone.add_adapter(name, rank=8, alpha=16)
    optimizer = torch.optim.AdamW(backbone.adapter_parameters(name), 3e-3, weight_decay=0)
    for step in range(steps):
        chosen = torch.randperm(IMAGES)[:BATCH]
        sigma, noise = torch.rand(BATCH), torch.randn(BATCH, *clean.shape[1:])
        s = sigma.view(-1, 1, 1, 1)
        x = (1 - s) * clean[chosen] + s * noise
        velocity = backbone.velocity(x, sigma, text.select(chosen), guidance=1.0)
        mse_loss(velocity, noise - clean[chosen]).backward()
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    backbone.save_adapter(name, folder)


def in_children(commands: Sequence[Sequence[str]], workers: int) -> list[tuple[float, float]]:
    """Run them, so many at once: (CPU seconds, peak resident GB) of each."""

    def run(command: Sequence[str]) -> tuple[float, float]:
        child = subprocess.Popen([sys.executable, *command], env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, used = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)}: ended with status {status}")
        return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, commands))


def init_words(names: Sequence[str], out: Path, config: Path) -> list[str]:
    """The arguments of `flowalign` that write the student's config."""
    loras = [str(out / "loras" / name) for name in names]
    files = [str(out / "prompts" / f"{name}.txt") for name in names]
    words = ["init", "--stage", "opd", "--loras", *loras, "--prompts", *files]
    return [*words, "--out", str(config), "--force"]


# What is compared --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fidelity:
    """Of a model to one LoRA, each relative to the base's: 0 is the LoRA, 1 the base."""

    velocity: float  # mean square distance on the LoRA's own trajectories
    images: float  # mean square distance of pixels, same prompts and noise


class Judge:
    """The trajectories and images of each LoRA on its held-out prompts."""

    def __init__(self, names: Sequence[str], out: Path) -> None:
        self.backbone = Backbone.load(MODEL)
        self.schedule = Schedule(self.backbone.sigmas(STEPS), "ode", 0.0, (0, STEPS), actions=False)
        loaded = {name: Member(out / "loras" / name) for name in names}
        self.members = {"base": Member(None), **loaded}
        self.bank = self.bank_of(self.members)
        self.paths = {n: self.sample(n, out, f"teacher_{n}") for n in names}
        self.base = {n: self.sample(n, out, None) for n in names}

    def bank_of(self, members: dict[str, Member]) -> Bank:
        return Bank(
            self.backbone, members, {name: name for name in members}, dtype=torch.float32
        )

    def sample(self, style: str, out: Path, adapter: str | None) -> Rollout:
        """Images of a style's held-out prompts, by one adapter or by those that are active."""
        batch = load_prompts(str(out / "prompts" / f"{style}_val.txt"), style)
        active = adapter == "active"
        with nullcontext() if active else self.backbone.adapter(adapter), torch.no_grad():
            return sample(
                self.backbone, batch, self.schedule, guidance=1.0, noise=Noise((SEED,)),
                places=places(len(batch), 1),
            )  # fmt: skip

    def velocity(self, path: Rollout) -> Tensor:
        """[B,T,C,h,w] of what is active, at the states of a trajectory."""
        columns = []
        with torch.no_grad():
            for column, sigma in enumerate(path.sigmas[:-1].tolist()):
                x = path.states[:, column]
                columns.append(self.backbone.velocity(x, sigma, path.conditioning, guidance=1.0))
        return torch.stack(columns, 1)

    def fidelity(self, style: str, out: Path) -> tuple[Fidelity, Rollout]:
        """Of what is active, to one style's LoRA; and its images."""
        path, base, own = self.paths[style], self.base[style], self.sample(style, out, "active")
        target, reference = (
            self.bank(replace(path, batch=replace(path.batch, tasks=[name] * len(path)))).velocity
            for name in (style, "base")
        )
        far = [mse_loss(v, target) for v in (self.velocity(path), reference)]
        seen = [mse_loss(r.images, path.images) for r in (own, base)]
        return Fidelity(float(far[0] / far[1]), float(seen[0] / seen[1])), own

    def stacked(self, names: Sequence[str], weight: float) -> None:
        """Activate several LoRAs at once, as `pipe.set_adapters(names, weights)` does."""
        loras = [f"teacher_{name}" for name in names]
        self.backbone.core.set_adapters(loras, [weight] * len(loras))

    def unstacked(self, names: Sequence[str]) -> None:
        """Back to one adapter at a time, at its own scale."""
        self.stacked(names, 1.0)
        self.backbone.activate(None)


def seconds(call: object, repeats: int = 3) -> float:
    """The least CPU time of a call."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()  # type: ignore[operator]
        times.append(time.process_time() - began)
    return min(times)


def measure(names: Sequence[str], out: Path, student: Path) -> tuple[dict, dict]:
    """Fidelity of each model to each LoRA, and speeds; with the images of each."""
    judge, count = Judge(names, out), len(names)
    judge.backbone.load_adapter(STUDENT, student, frozen=True)
    models = {
        "stacked, weight 1": lambda: judge.stacked(names, 1.0),
        "stacked, weight 1/n": lambda: judge.stacked(names, 1 / count),
        "student": lambda: judge.backbone.activate(STUDENT),
    }
    fidelity, images, speeds = {}, {}, {}
    for model, activate in models.items():
        activate()
        both = {name: judge.fidelity(name, out) for name in names}
        fidelity[model] = {name: asdict(value) for name, (value, _) in both.items()}
        images[model] = {name: rollout.images for name, (_, rollout) in both.items()}
        path = judge.paths[names[0]]
        speeds[f"{model}: velocities a CPU second"] = (
            path.states[:, :-1].shape[0] * STEPS / seconds(lambda path=path: judge.velocity(path))
        )
        judge.unstacked(names)
    images["base"] = {name: judge.base[name].images for name in names}
    images["LoRA"] = {name: judge.paths[name].images for name in names}
    mixed = judge.paths[names[0]]  # labels of a rollout in which the tasks take turns
    tasks = [names[row % count] for row in range(len(mixed))]
    mixed = replace(mixed, batch=replace(mixed.batch, tasks=tasks))
    speeds["labels a CPU second"] = len(mixed) * STEPS / seconds(lambda: judge.bank(mixed))
    return {"fidelity": fidelity, "speeds": speeds}, images
