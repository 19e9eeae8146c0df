"""The arguments of the commands whose own modules import torch and diffusers.

They are read before these imports, which take seconds. So --help, a typing error or a wrong config
is answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from flowalign.commands.doctor.gpus import GPUS
from flowalign.config import STAGES, ModelConfig, Stage, load, stage_names
from flowalign.config.loading import run_config
from flowalign.config.section import Count, NotNegative, Pixels, Seed, Steps, about
from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.training.sources import SOURCES

NONE = "none"  # a task without a reward
GRID_SIDE = 256  # pixels: a grid shows wider images smaller than they are


def with_examples(name: str, text: str, *examples: str) -> argparse.ArgumentParser:
    """The parser of a command whose help ends with examples."""
    return argparse.ArgumentParser(
        name,
        description=text,
        epilog="examples:\n" + "".join(f"  {example}\n" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def init(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign init`."""
    text = "Write a config with the keys that matter and their meaning."
    parser = with_examples(
        "flowalign init",
        text,
        "flowalign init --stage opd --loras a.safetensors b.safetensors --prompts a.txt b.txt",
        "flowalign init --stage nft --reward my_rewards:redness --model MODEL",
    )
    stages = "; ".join(f"{name}: {about(kind)}" for name, kind in STAGES.items())
    help = f"several LoRAs: opd; a reward: nft; several rewards: recipe; images: eval. {stages}"
    add = parser.add_argument
    add("--stage", choices=stage_names(), required=True, help=help)
    add("--model", default="tiny", help="tiny (default), a folder or a Hub id")
    many: Any = {"nargs": "+", "default": [], "action": "extend"}
    add("--reward", metavar="NAME", **many,
        help="what scores the images, such as ocr, geneval, my_rewards:redness or the URL of a "
        "reward's server, http://HOST:PORT; one per task "
        f"(grpo, nft, awm, opd, sft; {NONE} = a task of opd or sft without one), teacher (recipe: "
        "trained in it where no --teachers are given) or benchmark (eval)")  # fmt: skip
    add("--teachers", "--loras", metavar="[NAME=]ADAPTER", **many,
        help="adapters (folders, files or Hub ids) to learn from, merge or evaluate, each a task "
        "of its name, by default that of the folder or file")  # fmt: skip
    add("--prompts", metavar="FILE", **many,
        help="one per reward or teacher; NAME_val.txt beside NAME.txt is held out")  # fmt: skip
    help = f"change what does not fit this GPU, by prediction: {', '.join(GPUS)}"
    add("--gpu", type=str.lower, choices=list(GPUS), metavar="NAME", help=help)
    help = "with --gpu: a run that is predicted to take at most so long"
    add("--hours", type=float, metavar="H", help=help)
    add("--all", action="store_true", help="also write the keys at their defaults")
    add("--out", type=Path, help="file to write; default: STAGE.yaml")
    add("--force", action="store_true", help="replace a file that is there")
    add("overrides", nargs="*", metavar="key.path=value",
        help="change what is written, such as the changes that the doctor prints")  # fmt: skip
    args = parser.parse_args(argv)
    if args.hours and not args.gpu:
        parser.error("--hours needs --gpu")
    return args


def sample_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign sample`."""
    parser = argparse.ArgumentParser(
        "flowalign sample",
        description="Sample images of prompts as one labelled grid. They are the images that an "
        "evaluation with the same seed, steps and guidance scores.",
    )
    dtypes = get_args(ModelConfig.model_fields["dtype"].annotation)
    add = parser.add_argument
    add("prompts", nargs="+", help="for example 'a red sign that says \"CAT\"'")
    add("--model", help="tiny, a folder or a Hub id; default: the LoRA's, or tiny")
    help = "a folder, file or Hub id, or `base`. Several, each after a --lora of its own: side by "
    help += "side, of one noise"
    add("--lora", action="append", default=[], metavar="[NAME=]ADAPTER", help=help)
    help = "file of the grid; default: samples.png, or the next free number. Images above "
    help += f"{GRID_SIDE} pixels, and several of a prompt, also go one by one to a folder "
    help += "of that name"
    add("--out", type=Path, help=help)
    add("--images", type=_value(Count), default=1, metavar="N", help="per prompt")
    of_the_model = "default: as in the LoRA's run, else as the model has it"
    add("--steps", type=_value(Steps), help=of_the_model)
    add("--guidance", type=_value(NotNegative), help=f"CFG scale; 1 = none; {of_the_model}")
    add("--size", type=_value(Pixels), help=f"pixels; {of_the_model}")
    add("--seed", type=_value(Seed), default=0, help="of the initial noise")
    add("--dtype", choices=dtypes, help="default: bfloat16, float32 on a CPU")
    return parser.parse_args(argv)


def _value(kind: Any) -> Any:
    """A parser of one kind of a config's values."""

    def value(text: str) -> Any:
        try:
            return TypeAdapter(kind).validate_strings(text)
        except ValidationError as error:
            wrong = error.errors()[0]["msg"]
            raise argparse.ArgumentTypeError(f"got {text!r}. {wrong}") from None

    return value


@refusing("doctor")
def doctor(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign doctor`: --reward or --config, with the options of each. `root` is
    the config."""
    text = "Find what is wrong with a run or a reward before training starts."
    parser = with_examples(
        "flowalign doctor",
        text,
        "flowalign doctor --config opd.yaml --gpu 4090 --hours 24",
        "flowalign doctor --reward my_rewards:redness",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file of any stage or a recipe")
    what.add_argument("--reward", help="a name, or package.module:attribute")
    add("--variant", help="config: a YAML file of keys by stage: other hardware")
    add("--no-model", action="store_true", help="only checks without weights")
    help = "config: run the code that it names (module:name), and look in its folder for that code"
    add("--trust", action="store_true", help=help)
    help = f"plan for this GPU: {', '.join(GPUS)}; others by --memory and --tflops"
    add("--gpu", type=str.lower, choices=list(GPUS), metavar="NAME", help=help)
    help = "propose cuts, with which the config is predicted to run for so long at most"
    add("--hours", type=float, metavar="H", help=help)
    add("--gpus", type=int, default=1, help="GPUs of the run (default 1)")
    add("--memory", type=float, metavar="GIB", help="plan for such a GPU")
    add("--tflops", type=float, help="the rate to plan with, TFLOP/s a GPU")
    help = "reward: score scenes with these prompts, not with those of the tiny world"
    add("--prompts", metavar="FILE", help=help)
    help = "config: changes; reward: its options"
    add("options", nargs="*", metavar="key=value", help=help)
    args = parser.parse_args(argv)
    if args.config:
        args.root = load(args.config, args.options, stage=Stage, variant=args.variant)
    return args


def data(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign data`; no `names`: they are listed."""
    parser = argparse.ArgumentParser("flowalign data", description="Official prompt sets.")
    actions = parser.add_subparsers(required=True, metavar="fetch | list")
    text = "Get official sets from where they are published."
    add = actions.add_parser("fetch", help=text, description=text).add_argument
    help = f"one or more of {', '.join(SOURCES)}"
    add("names", nargs="+", choices=list(SOURCES), metavar="NAME", help=help)
    add("--out", default="data", help="folder (default: data)")
    add("--force", action="store_true", help="replace files that differ")
    text = "List the official sets: size, licence, source, checksums."
    actions.add_parser("list", help=text, description=text).set_defaults(names=())
    return parser.parse_args(argv)


def fetch(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign fetch`."""
    text = "Download what a config reads: models, adapters, judges and prompt sets."
    parser = argparse.ArgumentParser("flowalign fetch", description=text)
    add = parser.add_argument
    add("--config", required=True, help="a YAML file of any stage or a recipe")
    add("--check", action="store_true", help="only say what is missing: status 1")
    add_changes(parser)
    return parser.parse_args(argv)


def add_changes(parser: argparse.ArgumentParser) -> None:
    """What changes the config of --config."""
    add = parser.add_argument
    add("--variant", help="of --config: a YAML file of keys by stage: other hardware")
    add("overrides", nargs="*", metavar="key.path=value", help="change the config")


def vote(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign vote`."""
    text = "Vote on the images of a folder, in a browser. Choices go to FOLDER/pairs.jsonl."
    parser = argparse.ArgumentParser("flowalign vote", description=text)
    add = parser.add_argument
    add("folder", type=Path, help="what `flowalign sample --images 2` wrote")
    add("--port", type=int, default=8001, help="0: any that is free")
    return parser.parse_args(argv)


def serve_reward(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign serve-reward`, without the limits at their defaults
    (`wire.Limits`)."""
    parser = argparse.ArgumentParser(
        "flowalign serve-reward",
        description="Serve a reward over HTTP, for `name: remote` in a config elsewhere. "
        "The token that callers must show is read from FLOWALIGN_REWARD_TOKEN.",
    )
    add = parser.add_argument
    add("name", help="a reward's name, or its path as package.module:attribute")
    add("pairs", nargs="*", metavar="key=value", help="options of the reward")
    add("--host", default="127.0.0.1", help="default: this machine only")
    add("--port", type=int, default=8000, help="0: any that is free")
    add("--insecure", action="store_true", help="serve other machines untokened")
    for flag, name, kind, text in (
        ("--max-batch", "images", int, "images a request"),
        ("--max-bytes", "bytes", int, "of a request, and of its images once decoded"),
        ("--max-pixels", "pixels", int, "of an image"),
        ("--max-seconds", "seconds", float, "for a request, waiting included"),
        ("--queue", "queue", int, "requests at once"),
    ):
        unset = argparse.SUPPRESS
        add(flag, dest=name, type=kind, default=unset, help=f"at most: {text}")
    return parser.parse_intermixed_args(argv)  # NAME --port 8000 key=value


def merge_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign merge`."""
    text = (
        "Merge LoRA adapters of one base into one, by adding their weight updates. The folder of "
    )
    text += "--out is the adapter: give it to --lora, lora.init or flowalign.load."
    parser = argparse.ArgumentParser("flowalign merge", description=text)
    add = parser.add_argument
    add("adapters", nargs="+", help="adapter folders, such as outputs/.../adapter")
    add("--out", required=True, help="the adapter's folder, to be written")
    add("--method", default="concat", help="concat (exact), svd, ties or dare")
    add("--weights", nargs="+", type=float, help="one each; default: 1, the sum")
    add("--rank", type=int, help="of the result; default: the largest given")
    add("--density", type=float, default=0.5, help="what ties and dare keep")
    add("--seed", type=int, default=0, help="of what dare drops")
    add("--model", help="the base, for LoRAs under another program's names")
    return parser.parse_args(argv)


@refusing("watch")
def watch(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign watch`: a folder that holds a run."""
    text = (
        "Write the page that shows a run or a recipe as it is now, RUN/report.html. A run writes "
    )
    text += "it by itself at each evaluation and at its end."
    parser = argparse.ArgumentParser("flowalign watch", description=text)
    add = parser.add_argument
    add("run", type=Path, help="the output folder of a run or a recipe")
    args = parser.parse_args(argv)
    args.run = expanded(args.run)
    run_config(args.run)
    return args
