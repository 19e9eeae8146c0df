"""Many LoRAs into one student without a reward: twelve style LoRAs of the tiny model.

    python benchmarks/many_loras.py --out outputs/many_loras

Makes the LoRAs (flow matching on 200 rendered images each), and for 2, 3, 4, 8 and 12 of them a
student, by the config that `flowalign init --stage opd --loras` writes. Then it compares, on
held-out prompts and with equal noise, nine merges and the student with each LoRA. Prints Markdown,
writes OUT/many_loras.json and OUT/many_loras.png. LoRAs and students that are there already are not
made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from flowalign import gallery
from flowalign.backbone import Backbone
from flowalign.commands import cli
from flowalign.config import ModelConfig
from flowalign.report.progress import quiet
from flowalign.system.files import read_lines
from flowalign.system.table import Table
from flowalign.teachers.bank import Bank, Member
from flowalign.teachers.merge import merge
from flowalign.training import metrics
from flowalign.training.data import load_prompts
from flowalign.training.rollout import Noise, places, sample
from flowalign.types import Rollout, Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts" / "tiny"))
import prompts  # noqa: E402
import styles  # noqa: E402

MODEL = ModelConfig(id="tiny", height=96, width=96, max_sequence_length=14)
TAGS = ("two_object", "counting", "color_attr")
IMAGES, HELD_OUT, BATCH = 200, 12, 16
STEPS = 10  # of sampling
LR = 3e-3
# of n LoRAs, each with the weight n^-power
MERGES = [(how, power) for how in ("concat", "ties", "dare") for power in (0.0, 0.5, 1.0)]


def scenes(split: str, count: int, seed: int) -> list[prompts.Metadata]:
    """Scenes of a split, as the preference task words them, of each tag alike."""
    rng = np.random.default_rng(seed)
    pools = [prompts.splits(tag)[split] for tag in TAGS]
    pools = [pool for pool in pools if pool]
    rows = [pools[i % len(pools)][rng.integers(len(pools[i % len(pools)]))] for i in range(count)]
    return [row | {"prompt": prompts.prompt(row, "preference")} for row in rows]


def write_prompts(name: str, folder: Path, seed: int) -> None:
    """NAME.txt and NAME_val.txt, where `flowalign init` finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, split, count in (("", "train", 4 * IMAGES), ("_val", "val", HELD_OUT)):
        texts = [styles.STYLES[name].prompt(row["prompt"]) for row in scenes(split, count, seed)]
        (folder / f"{name}{suffix}.txt").write_text("\n".join(texts) + "\n")


def drawn(style: styles.Style, seed: int) -> tuple[list[str], Tensor]:
    """Prompts and pictures [N,3,96,96] in [0,1] of training scenes in a style."""
    rows = scenes("train", IMAGES, seed)
    return [style.prompt(row["prompt"]) for row in rows], style.draw(rows, seed)


def train_lora(texts: Sequence[str], pictures: Tensor, folder: Path, steps: int, seed: int) -> None:
    """A LoRA by flow matching: at x_sigma = (1 - sigma) x0 + sigma eps fit v to eps - x0."""
    name = folder.name
    torch.manual_seed(seed)
    backbone = Backbone.load(MODEL)
    vae = backbone.pipe.vae
    with torch.no_grad():
        mean = torch.cat(
            [vae.encode(part).latent_dist.mean for part in (2 * pictures - 1).split(50)]
        )
    clean = (mean - vae.config.shift_factor) * vae.config.scaling_factor
    text = backbone.encode(texts)
    backbone.add_adapter(name, rank=8, alpha=16)
    optimizer = torch.optim.AdamW(backbone.adapter_parameters(name), LR, weight_decay=0)
    for step in range(steps):
        chosen = torch.randperm(len(texts))[:BATCH]
        sigma = torch.rand(BATCH)
        noise = torch.randn(BATCH, *clean.shape[1:])
        s = sigma.view(-1, 1, 1, 1)
        x = (1 - s) * clean[chosen] + s * noise
        velocity = backbone.velocity(x, sigma, text.select(chosen), guidance=1.0)
        mse_loss(velocity, noise - clean[chosen]).backward()
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    backbone.save_adapter(name, folder)


def in_child(words: Sequence[str]) -> tuple[float, float]:
    """Run Python with these arguments: CPU seconds, peak resident GB."""
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, *words], env=alone)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)}: ended with status {status}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6


def make_student(names: Sequence[str], out: Path, updates: int) -> None:
    """The student of these LoRAs, by the config that `flowalign init` writes, but for a short run;
    with its cost."""
    config = out / f"student_{len(names)}.yaml"
    run = out / f"run_{len(names)}"
    if (run / "cost.json").exists():
        return
    words = ["--stage", "opd", "--force", "--loras", *(str(out / "loras" / n) for n in names)]
    words += ["--prompts", *(str(out / "prompts" / f"{name}.txt") for name in names)]
    if cli.main(["init", *words, "--out", str(config)]):
        raise SystemExit("no config was written")
    words = ["-m", "flowalign.commands.cli", "train", "--config", str(config), f"output={run}"]
    words += [f"train.updates={updates}", f"evaluation.every={max(1, updates // 3)}", "alarm=null"]
    words += ["optimizer.lr=2e-3", "optimizer.updates_per_rollout=8", "optimizer.micro_batch=16"]
    words += ["model.compile=true"] if updates > 10 else []  # which takes a minute itself
    cost = in_child(words)
    (run / "cost.json").write_text(json.dumps(cost))


# What is compared --------------------------------------------------------------------------------


class Judge:
    """The LoRAs on one base, with their trajectories on their held-out prompts."""

    def __init__(self, names: Sequence[str], out: Path) -> None:
        self.backbone = backbone = Backbone.load(MODEL)
        self.schedule = Schedule(backbone.sigmas(STEPS), "ode", 0.0, (0, STEPS), actions=False)
        self.batches = {n: load_prompts(str(out / "prompts" / f"{n}_val.txt"), n) for n in names}
        members = {name: Member(out / "loras" / name) for name in names}
        self.bank = Bank(backbone, members, {name: name for name in names}, dtype=torch.float32)
        self.paths, self.velocities, self.base = {}, {}, {}
        for name in names:
            with backbone.adapter(f"teacher_{name}"):
                self.paths[name] = self.sample(name)
                self.velocities[name] = self.velocity(name)
            with backbone.base():
                self.base[name] = self.sample(name), self.velocity(name)

    def sample(self, style: str) -> Rollout:
        """Images of a style's held-out prompts, by the adapters that are active."""
        batch = self.batches[style]
        noise = Noise((0,))
        where = places(len(batch), 1)
        with torch.no_grad():
            return sample(
                self.backbone, batch, self.schedule, guidance=1.0, noise=noise, places=where
            )

    def velocity(self, style: str) -> Tensor:
        """[B,T,C,h,w] of the adapters that are active, at the states of the LoRA's trajectories."""
        path = self.paths[style]
        with torch.no_grad():
            columns = [
                self.backbone.velocity(x, sigma, path.conditioning, guidance=1.0)
                for x, sigma in zip(path.states.unbind(1), path.sigmas.tolist(), strict=False)
            ]
        return torch.stack(columns, 1)

    def distances(self, style: str) -> tuple[float, float, Tensor, float]:
        """Of the adapters that are active from the style's LoRA, relative to the base's distance:
        of velocities on the LoRA's trajectories, and of images. Then the images, and the CPU
        seconds that they took."""
        began = time.process_time()
        images = self.sample(style).images
        spent = time.process_time() - began
        base, velocity = self.base[style]
        target = self.velocities[style]
        shown = self.paths[style].images
        far = mse_loss(self.velocity(style), target) / mse_loss(velocity, target)
        seen = mse_loss(images, shown) / mse_loss(base.images, shown)
        return float(far), float(seen), images, spent

    def labels_a_second(self, names: Sequence[str]) -> float:
        """Of the bank, on a rollout in which the tasks take turns: the best of three."""
        path = self.paths[names[0]]
        times = []
        tasks = [names[row % len(names)] for row in range(len(path))]
        mixed = replace(path, batch=replace(path.batch, tasks=tasks))
        for _ in range(3):
            began = time.process_time()
            self.bank(mixed)
            times.append(time.process_time() - began)
        return len(mixed) * STEPS / min(times)


def compare(judge: Judge, names: Sequence[str], out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The distances of each model, and the images of each."""
    backbone = judge.backbone
    count = len(names)
    loras = [f"teacher_{name}" for name in names]
    trained = {"student": out / f"run_{count}" / "adapter"}
    for how, power in MERGES:
        name = f"{how}_{power:g}".replace(".", "")
        trained[name] = folder = out / f"merges_{count}" / name
        shutil.rmtree(folder, ignore_errors=True)
        rank = None if how == "concat" else 8 * count  # as many as the sum has
        weights = [count**-power] * count
        merge([out / "loras" / n for n in names], folder, weights=weights, method=how, rank=rank,
              model="tiny")  # fmt: skip
    for name, folder in trained.items():
        backbone.load_adapter(f"{name}_{count}", folder, frozen=True)

    def stack(weight: float) -> None:
        backbone.core.set_adapters(loras, [weight] * count)

    activate = {name: partial(backbone.activate, f"{name}_{count}") for name in trained}
    activate["stacked, weight 1"] = partial(stack, 1.0)
    models, images = {}, {}
    for model, switch_on in activate.items():
        switch_on()
        styles_of = names[:2] if model == "stacked, weight 1" else names  # the sum's images
        rows = {name: judge.distances(name) for name in styles_of}
        stack(1.0)
        images[model] = {name: row[2] for name, row in rows.items()}
        models[model] = {
            "velocity": {name: row[0] for name, row in rows.items()},
            "images": {name: row[1] for name, row in rows.items()},
            "images_a_cpu_second": len(rows) * HELD_OUT / sum(row[3] for row in rows.values()),
        }
    backbone.activate(None)
    return models, images


def leaks(judge: Judge, images: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{model: shares of its pictures that are nearest (mean square distance, equal noise) to what
    the LoRA of the prompt draws there, to the base's, to another LoRA's}. images: of the models, by
    style."""
    names = list(judge.paths)
    shown = {}
    for lora in names:
        with judge.backbone.adapter(f"teacher_{lora}"):
            shown[lora] = {style: judge.sample(style).images for style in names}
    shown["base"] = {style: judge.base[style][0].images for style in names}
    found = {}
    for model, of_styles in images.items():
        counts = {"own": 0, "base": 0, "another": 0}
        for style, pictures in of_styles.items():
            apart = [(pictures - shown[x][style]).square().flatten(1).mean(1) for x in shown]
            for nearest in torch.stack(apart).argmin(0).tolist():
                model_of_nearest = [*shown][nearest]
                if model_of_nearest == style:
                    counts["own"] += 1
                elif model_of_nearest == "base":
                    counts["base"] += 1
                else:
                    counts["another"] += 1
        found[model] = {who: count / sum(counts.values()) for who, count in counts.items()}
    return found


def mean(models: dict[str, Any], model: str, kind: str) -> float:
    """Over the styles."""
    return float(np.mean(list(models[model][kind].values())))


def best(models: dict[str, Any], kind: str) -> str:
    """The merge that is nearest to the LoRAs; chosen on the prompts that judge it."""
    merges = [name for name in models if name not in ("student", "stacked, weight 1")]
    return min(merges, key=lambda name: mean(models, name, kind))


def fixed_path(run: Path) -> float:
    """The run's own measure of the adapter that was kept: the distance on the LoRAs' paths."""
    rows = read_lines(run / "metrics.jsonl")
    return min(-row[metrics.HEADLINE] for row in rows if metrics.HEADLINE in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("outputs/many_loras"))
    add("--counts", type=int, nargs="+", default=[2, 3, 4, 8, 12])
    add("--steps", type=int, default=60, help="optimizer steps of a LoRA")
    add("--updates", type=int, default=8, help="rollouts of a student, for each of its LoRAs")
    add("--workers", type=int, default=2, help="processes at once, of one thread each")
    add("--only", nargs="+", help="make these LoRAs and nothing else")
    args = parser.parse_args()
    quiet()
    out = args.out
    every = list(styles.STYLES)
    counts = sorted(args.counts)
    if args.only:
        for name in args.only:
            write_prompts(name, out / "prompts", every.index(name))
            seed = every.index(name)
            train_lora(*drawn(styles.STYLES[name], seed), out / "loras" / name, args.steps, seed)
        return
    began = time.time()
    names = every[: counts[-1]]
    missing = [name for name in names if not (out / "loras" / name).exists()]
    shares = [missing[i :: args.workers] for i in range(args.workers)]
    again = [__file__, "--out", str(out), "--steps", str(args.steps), "--only"]
    with ThreadPoolExecutor(args.workers) as pool:
        costs = list(pool.map(in_child, [[*again, *share] for share in shares if share]))
        list(pool.map(lambda n: make_student(names[:n], out, n * args.updates), counts))
    spent = sum(cpu for cpu, _ in costs)
    judge = Judge(names, out)
    found = {}
    for count in counts:
        models, images = compare(judge, names[:count], out)
        found[count] = {
            "models": models,
            "fixed_path": fixed_path(out / f"run_{count}"),
            "labels_a_cpu_second": judge.labels_a_second(names[:count]),
            "cost": json.loads((out / f"run_{count}" / "cost.json").read_text()),
        }
    images.pop("stacked, weight 1")  # of two styles
    loras = {"made": len(missing), "cpu_seconds": spent}
    found = {"loras": loras, "students": found, "seconds": time.time() - began}
    found["leaks"] = leaks(judge, images)
    (out / "many_loras.json").write_text(json.dumps(found, indent=1))
    print(report(found))
    shown = {
        "base": [judge.base[name][0].images[1] for name in names],
        "LoRA": [judge.paths[name].images[1] for name in names],
        f"best merge of {len(names)}": [images[best(models, "images")][name][1] for name in names],
        f"student of {len(names)}": [images["student"][name][1] for name in names],
    }
    captions = [f"{name}: {judge.batches[name].prompts[1]}" for name in names]
    gallery(shown, captions).save(out / "many_loras.png")


def report(found: dict[str, Any]) -> str:
    """The numbers as Markdown."""
    head = ["LoRAs", "distance of", "sum", "average", "best of nine merges", "student",
            "its worst style"]  # fmt: skip
    rows, speed = [], []
    for count, student in found["students"].items():
        models = student["models"]
        for kind in ("velocity", "images"):
            shown = "concat_0", "concat_1", best(models, kind), "student"
            means = [f"{mean(models, model, kind):.2f}" for model in shown]
            means[2] += f" ({shown[2]})"
            worst = max(models["student"][kind].items(), key=lambda pair: pair[1])
            rows.append([str(count), kind, *means, f"{worst[0]} {worst[1]:.2f}"])
        spent, peak = student["cost"]
        rates = [
            f"{models[m]['images_a_cpu_second']:.1f}" for m in ("stacked, weight 1", "student")
        ]
        labels, path = f"{student['labels_a_cpu_second']:.0f}", f"{student['fixed_path']:.2f}"
        speed.append([str(count), f"{spent:.0f}", f"{peak:.2f}", labels, path, *rates])
    costs = ["LoRAs", "student, CPU s", "peak GB", "labels a CPU s", "fixed_path",
             "images a CPU s, stacked", "images a CPU s, student"]  # fmt: skip
    heads = ["pictures nearest to", "their LoRA's", "the base's", "another LoRA's"]
    nearest = [[m, *(f"{share:.2f}" for share in s.values())] for m, s in found["leaks"].items()]
    loras = "{made} LoRAs: {cpu_seconds:.0f} CPU s.".format(**found["loras"])
    total = f"{loras} All: {found['seconds'] / 60:.1f} min."
    tables = [Table(head, rows), Table(costs, speed), Table(heads, nearest)]
    return "\n\n".join([*(table.markdown() for table in tables), total])


if __name__ == "__main__":
    main()
