"""`flowalign sample` draws images of prompts with the recommended settings of the model or LoRA.

Steps, CFG scale and size come from the first of these that says them: the command line, the run
that trained the LoRA, the model's card, its pipeline in diffusers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flowalign.backbone import Backbone, family_of, pipeline_name, resolve_model
from flowalign.backbone.adapters import Lora, read_lora
from flowalign.backbone.lora import other_base
from flowalign.backbone.structure import known, read_family
from flowalign.commands.arguments import GRID_SIDE
from flowalign.commands.init import named_sources
from flowalign.config import ConfigError, ModelConfig, SamplingConfig, load
from flowalign.config.loading import card_of
from flowalign.report.pictures import gallery, grid, png
from flowalign.report.progress import quiet
from flowalign.system import devices
from flowalign.system.exit import refusing
from flowalign.system.files import expanded, replacing
from flowalign.system.folder import RunFolder
from flowalign.training.rollout import generate
from flowalign.types import PromptBatch

BASE = "base"  # a value of --lora: no LoRA
TINY_SAMPLING = (10, 1.0)  # as the tiny configs train and evaluate
LISTED = "images.jsonl"  # the list of a folder of images
IMAGE_FORMATS = (".png", ".jpg", ".jpeg", ".webp", ".pdf")


@refusing("sample")
def main(args: argparse.Namespace) -> int:
    """Exit status: 0 done, 2 refused."""
    quiet()
    family = partial(read_family, ModelConfig(id=args.model)) if args.model else None
    loras = {
        name: None if source == BASE else read_lora(source, newest=True, family=family)
        for name, source in named_sources(args.lora or [BASE]).items()
    }
    plan = settle(args, *filter(None, loras.values()))
    write_output(plan, draw(args.prompts, plan, loras), args.prompts)
    return 0


@dataclass(frozen=True)
class Plan:
    """The models to sample, their settings, and the number of images of a prompt."""

    model: ModelConfig
    sampling: SamplingConfig
    images: int
    device: torch.device
    out: Path


def settle(args: argparse.Namespace, lora: Lora | None = None, *others: Lora) -> Plan:
    """Determine the settings of a command, from the first LoRA if they are missing. Reads only
    small config files. Raises ValueError for what cannot be sampled or written here."""
    model = args.model or (lora and lora.base) or "tiny"
    spec = known(ModelConfig(id=model))
    for one in filter(None, (lora, *others)):
        if reason := other_base(one, model, spec and spec.family.core):
            text = f"{one.file} is an adapter of another base than {model!r}: it {reason}"
            raise ValueError(f"--model: {text}. Give the base that it is of.")
    try:  # the run that trained the LoRA leaves its config above the adapter's folder
        run = load(RunFolder(lora.file.parent.parent).config) if lora else None
    except ConfigError:  # no config, or another program's
        run = None
    if run:
        steps, guidance = run.evaluation_sampling.steps, run.evaluation_sampling.guidance
        height, width = run.model.size
    else:
        steps, guidance = recommended(model)
        # not in the cache: the size of most of these models
        height = width = spec.family.usual if spec else 1024
    if args.size:
        height = width = args.size
        if spec and (problem := next(spec.family.size_problems(height, width), None)):
            raise ValueError(f"--size: {problem}")
    device = devices.resolve()
    on_gpu = device.type != "cpu"
    guidance = guidance if args.guidance is None else args.guidance
    config = ModelConfig(
        id=model,
        dtype=args.dtype or ("bfloat16" if on_gpu else "float32"),
        max_sequence_length=lora and lora.text_length,
        height=height,
        width=width,
        decode_batch=1 if on_gpu else 4,  # a float32 VAE needs 2.4 GB for 1024 pixels
        offload_text_encoders=on_gpu,
    )
    sampling = SamplingConfig(
        steps=args.steps or steps,
        guidance=max(1.0, guidance),  # below 1 there is no guidance, as in diffusers' pipeline
        seed=args.seed,
        batch_size=max(1, min(8, 8 * 512**2 // (height * width))),
    )
    return Plan(config, sampling, args.images, device, free_file(args.out))


def recommended(model: str) -> tuple[int, float]:
    """(steps, guidance scale) of a model, from its card, else from its pipeline."""
    if resolve_model(model) == resolve_model("tiny"):
        return TINY_SAMPLING
    if card := card_of(model):
        return card
    steps, guidance = family_of(pipeline_name(model)).defaults()
    spec = known(ModelConfig(id=model))
    return steps, 1.0 if spec and spec.family.guidance == "none" else guidance


def free_file(out: Path | None) -> Path:
    """A path for a new file. Raises ValueError if `out` exists or has no format."""
    if out is None:
        numbered = (Path(f"samples-{number}.png") for number in itertools.count(2))
        free = itertools.chain([Path("samples.png")], numbered)
        return next(file for file in free if not (file.exists() or file.with_suffix("").exists()))
    out = expanded(out)
    if out.suffix.lower() not in IMAGE_FORMATS:
        raise ValueError(
            f"--out: got {str(out)!r}; want the name of a file that ends in "
            f"{', '.join(IMAGE_FORMATS)}."
        )
    for taken in (out, out.with_suffix("")):  # the folder of the images in full size
        if taken.exists():
            raise ValueError(f"--out: {taken} is there already. Name another file, or remove it.")
    return out


def draw(prompts: Sequence[str], plan: Plan, loras: Mapping[str, Lora | None]) -> dict[str, Tensor]:
    """Images [P*N,3,H,W] in [0,1] of each model, on the CPU; the images of a prompt follow one
    another."""
    model, sampling = plan.model, plan.sampling
    print(
        f"{model.id}: {model.width}x{model.height} pixels, {sampling.steps} steps, guidance "
        f"{sampling.guidance:g}, seed {sampling.seed}, {model.dtype} on {plan.device}",
        file=sys.stderr,
        flush=True,
    )
    backbone = Backbone.load(model, plan.device)
    batch = PromptBatch(list(prompts), ["sample"] * len(prompts), [{} for _ in prompts])
    images = {}
    for number, (name, lora) in enumerate(loras.items()):
        adapter = f"sampled_{number}"
        if lora:
            backbone.load_adapter(adapter, lora, frozen=True)
        with backbone.adapter(adapter if lora else None):
            images[name] = generate(backbone, batch, sampling, copies=plan.images).cpu()
    return images


def write_output(plan: Plan, models: Mapping[str, Tensor], prompts: Sequence[str]) -> None:
    """Write the grid, with a column for each model, and print its path. Large images, and several
    of a prompt, are also written one by one (`write_images`); several models have a folder each."""
    out, copies = plan.out, plan.images
    texts = [prompt for prompt in prompts for _ in range(copies)]
    first, *others = models.values()
    if first.shape[-1] > GRID_SIDE or copies > 1:
        with replacing(out.with_suffix("")) as folder:
            for name, images in models.items():
                where = folder / name if others else folder
                write_images(where, images, prompts, plan.sampling.seed)
        print(f"{out.with_suffix('')}/: {len(models) * len(first)} images in full size")
    if others:
        with replacing(out) as part:
            gallery(models, texts).save(part, format=out.suffix[1:].replace("jpg", "jpeg"))
    else:
        grid(out, first, texts)
    print(out)


def write_images(folder: Path, images: Tensor, prompts: Sequence[str], seed: int) -> None:
    """Images [P*N,3,H,W] of P prompts as files of a new folder, and its list of them: the file, the
    prompt, and what the initial noise is drawn by (`flowalign.training.rollout.Noise`)."""
    folder.mkdir(parents=True)
    rows = []
    for number, image in enumerate(images):
        prompt, copy = divmod(number, len(images) // len(prompts))
        name = f"{prompt + 1:03d}_{copy + 1:02d}.png"
        (folder / name).write_bytes(png(image))
        row = {"file": name, "prompt": prompts[prompt], "noise": [seed, prompt, copy]}
        rows.append(json.dumps(row, ensure_ascii=False) + "\n")
    (folder / LISTED).write_text("".join(rows), encoding="utf-8")
