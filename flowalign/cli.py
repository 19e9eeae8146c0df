"""The `flowalign` command, which runs one of COMMANDS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

COMMANDS = {
    "train": ("flowalign.train:main", "Train from a config, as `accelerate launch train.py`."),
    "watch": ("flowalign.watch:main", "One page that shows a run while it goes on."),
    "eval": ("flowalign.eval.run:main", "Score models on held-out prompts."),
    "sample": ("flowalign.cli:sample", "Sample images with a model and an optional LoRA."),
    "merge": ("flowalign.cli:merge", "Merge LoRA adapters of one base into one."),
    "data": ("flowalign.prompts.cli:main", "Prompt sets: generate, fetch, list, check."),
    "push": ("flowalign.publish.push:main", "Upload an adapter to the Hugging Face Hub."),
    "doctor": ("flowalign.doctor:main", "Examine a config or a reward before a run."),
    "serve-reward": (
        "flowalign.rewards.service.command:main",
        "Serve a reward over HTTP, for runs that name it as `remote`.",
    ),
    "demo": ("flowalign.demo:main", "Distil three tiny teachers into one student, in minutes."),
}
"""Name -> (module:function from arguments to exit status, what it does)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; exit status 2 for one that does not exist."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: flowalign COMMAND ...\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:14}{text}")
        print("\n`flowalign COMMAND --help` tells more.")
        return 0
    if argv[0] not in COMMANDS:
        possible = ", ".join(COMMANDS)
        print(f"flowalign: no command {argv[0]!r}; possible: {possible}", file=sys.stderr)
        return 2
    module, function = COMMANDS[argv[0]][0].split(":")  # imported only when it is asked for
    return getattr(import_module(module), function)(list(argv[1:]))


def sample(argv: Sequence[str]) -> int:
    """Sample images of prompts with a model and an optional LoRA, as one labelled grid.

    They are the images that an evaluation with the same seed, steps and guidance scores.
    """
    parser = argparse.ArgumentParser("flowalign sample", description=sample.__doc__)
    parser.add_argument("prompts", nargs="+", help="for example 'a red sign that says \"CAT\"'")
    parser.add_argument("--model", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--lora", help="an adapter folder, such as outputs/.../adapter, or Hub id")
    parser.add_argument("--out", type=Path, default=Path("samples.png"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="pixels; default: the model's own")
    parser.add_argument("--device", help="default: the GPU if there is one")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16, float32 on a CPU")
    args = parser.parse_args(argv)
    from flowalign.backbone import DTYPES, Backbone, load_pipeline
    from flowalign.backbone.pipeline import text_length
    from flowalign.config import SamplingConfig
    from flowalign.devices import resolve
    from flowalign.eval.suite import generate
    from flowalign.pictures import grid
    from flowalign.progress import quiet
    from flowalign.types import PromptBatch

    quiet()
    count = len(args.prompts)
    try:
        settings = SamplingConfig(
            steps=args.steps, guidance=args.guidance, seed=args.seed, batch_size=8
        )
        device = resolve(args.device)
        dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        length = text_length(args.model, args.lora)
        pipe = load_pipeline(args.model, dtype=DTYPES[dtype])
        size = args.size or pipe.default_sample_size * pipe.vae_scale_factor
        backbone = Backbone(
            pipe, height=size, width=size, max_sequence_length=length, device=device
        )
        if args.lora:
            backbone.load_adapter("sampled", args.lora, frozen=True)
    except (ValueError, OSError) as error:
        print(f"flowalign sample: {error}", file=sys.stderr)
        return 2
    prompts = PromptBatch(args.prompts, ["sample"] * count, [{}] * count)
    with backbone.adapter("sampled" if args.lora else None):
        images = generate(backbone, prompts, settings)
    grid(args.out, images, args.prompts)
    print(args.out)
    return 0


def merge(argv: Sequence[str]) -> int:
    """Merge LoRA adapters of one base into one, by adding their weight updates."""
    parser = argparse.ArgumentParser("flowalign merge", description=merge.__doc__)
    parser.add_argument("adapters", nargs="+", help="adapter folders, such as outputs/.../adapter")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--method", default="concat", help="concat (exact), svd, ties or dare")
    parser.add_argument("--weights", nargs="+", type=float, help="one each; default: 1, the sum")
    parser.add_argument("--rank", type=int, help="of the result; default: the largest given")
    parser.add_argument("--density", type=float, default=0.5, help="what ties and dare keep")
    parser.add_argument("--seed", type=int, default=0, help="of what dare drops")
    parser.add_argument("--lines", nargs=2, type=float, metavar=("SHALLOW", "DEEP"))
    args = vars(parser.parse_args(argv))
    from flowalign.teachers import merge as merging

    try:
        print(merging.merge(args.pop("adapters"), args.pop("out"), **args))
    except (ValueError, OSError) as error:
        print(f"flowalign merge: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
