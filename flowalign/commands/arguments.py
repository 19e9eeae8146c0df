"""The arguments of the commands whose own modules import torch and diffusers.

They are read before these imports, which take seconds. So --help, a typing error or a wrong config
is answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from flowalign.commands.doctor.gpus import GPUS
from flowalign.config import STAGES, ModelConfig, Stage, load, stage_names
from flowalign.config.loading import run_config
from flowalign.config.section import about
from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.training.sources import SOURCES

NONE = "none"  # a task without a reward
MULTIPLE = 16  # of pixels: the VAE's factor 8, patches of 2
SHOWN = 256  # pixels: a grid shows wider images smaller than they are


def init(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign init`."""
    text = "Write a config with the keys that matter and their meaning."
    parser = argparse.ArgumentParser("flowalign init", description=text)
    stages = " ".join(f"{name}: {about(kind)}" for name, kind in STAGES.items())
    add = parser.add_argument
    add("--stage", choices=stage_names(), required=True, help=stages)
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
    add("--all", action="store_true", help="also write the keys at their defaults")
    add("--out", type=Path, help="file to write; default: STAGE.yaml")
    add("--force", action="store_true", help="replace a file that is there")
    add("overrides", nargs="*", metavar="key.path=value",
        help="change what is written, such as the changes that the doctor prints")  # fmt: skip
    return parser.parse_args(argv)


def sample(argv: Sequence[str]) -> argparse.Namespace:
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
    help += f"{SHOWN} pixels, and several of a prompt, also go one by one to a folder of that name"
    add("--out", type=Path, help=help)
    add("--images", type=_number(int, 1), default=1, metavar="N", help="per prompt")
    of_the_model = "default: as in the LoRA's run, else as the model has it"
    add("--steps", type=_number(int, 1), help=of_the_model)
    add("--guidance", type=_number(float, 0), help=f"CFG scale; 1 = none; {of_the_model}")
    add("--size", type=_number(int, MULTIPLE, MULTIPLE), help=f"pixels; {of_the_model}")
    add("--seed", type=_number(int, 0), default=0, help="of the initial noise")
    add("--dtype", choices=dtypes, help="default: bfloat16, float32 on a CPU")
    return parser.parse_args(argv)


def _number(kind: type[int] | type[float], least: int, multiple: int | None = None) -> Any:
    """A parser of a finite number that is not below the least."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf") or multiple and value % multiple:
            wanted = f"a multiple of {multiple}" if multiple else f"a number from {least} up"
            raise argparse.ArgumentTypeError(f"got {text!r}; want {wanted}")
        return value

    return number


@refusing("doctor")
def doctor(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign doctor`: --reward or --config, with the options of each. `root` is
    the config."""
    text = "Find what is wrong with a run or a reward before training starts."
    parser = argparse.ArgumentParser("flowalign doctor", description=text)
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
    help = "GPUs of the run (default 1)"
    add("--gpus", "--processes", type=int, default=1, dest="gpus", help=help)
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
    """Arguments of `flowalign data`; `action` is the name of a function of prompts/actions.py."""
    parser = argparse.ArgumentParser("flowalign data", description="Prompt sets.")
    commands = parser.add_subparsers(required=True, metavar="reword | fetch | list")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(action=name)
        return made

    made = command("reword", "Say prompts in other words, by a language model (chat completions).")
    made.add_argument("file", help="a prompt set")
    made.add_argument("--url", required=True, help="of the endpoint, such as http://host:8000/v1")
    made.add_argument("--model", required=True, help="its name there")
    made.add_argument("--name", default="reworded", help="of the wording (default: reworded)")
    made.add_argument("--ask", help="what the model is told, with {prompt}")
    made.add_argument("--token-env", metavar="NAME", help="environment variable with a token")
    made.add_argument("--concurrency", type=int, default=8)
    made.add_argument("--out", required=True, help="the .jsonl to write")
    made.add_argument("--force", action="store_true", help="replace a file that differs")

    made = command("fetch", "Get official sets from where they are published.")
    made.add_argument("names", nargs="+", choices=list(SOURCES), metavar="NAME",
                      help=f"one or more of {', '.join(SOURCES)}")  # fmt: skip
    made.add_argument("--out", default="data", help="folder (default: data)")
    made.add_argument("--force", action="store_true", help="replace files that differ")

    command("list", "List the official sets: size, licence, source, checksums.")
    return parser.parse_args(argv)


def fetch(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign fetch`."""
    text = "Download what a config reads: models, adapters, judges and prompt sets."
    parser = argparse.ArgumentParser("flowalign fetch", description=text)
    parser.add_argument("--config", required=True, help="a YAML file of any stage or a recipe")
    parser.add_argument("--variant", help="a YAML file of keys by stage: other hardware")
    parser.add_argument("--check", action="store_true", help="only say what is missing: status 1")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return parser.parse_args(argv)


def vote(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign vote`."""
    text = "Vote on the images of a folder, in a browser. Choices go to FOLDER/pairs.jsonl."
    parser = argparse.ArgumentParser("flowalign vote", description=text)
    parser.add_argument("folder", type=Path, help="what `flowalign sample --images 2` wrote")
    parser.add_argument("--port", type=int, default=8001, help="0: any that is free")
    return parser.parse_args(argv)


def serve_reward(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign serve-reward`, without the limits at their defaults
    (`wire.Limits`)."""
    parser = argparse.ArgumentParser(
        "flowalign serve-reward",
        description="Serve a reward over HTTP, for `name: remote` in a config elsewhere. "
        "The token that callers must show is read from FLOWALIGN_REWARD_TOKEN.",
    )
    parser.add_argument("name", help="a reward's name, or its path as package.module:attribute")
    parser.add_argument("pairs", nargs="*", metavar="key=value", help="options of the reward")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--insecure", action="store_true", help="serve other machines untokened")
    for flag, name, kind, text in (
        ("--max-batch", "images", int, "images a request"),
        ("--max-bytes", "bytes", int, "of a request, and of its images once decoded"),
        ("--max-pixels", "pixels", int, "of an image"),
        ("--max-seconds", "seconds", float, "for a request, waiting included"),
        ("--queue", "queue", int, "requests at once"),
    ):
        unset = argparse.SUPPRESS
        parser.add_argument(flag, dest=name, type=kind, default=unset, help=f"at most: {text}")
    return parser.parse_intermixed_args(argv)  # NAME --port 8000 key=value


def merge(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign merge`."""
    text = (
        "Merge LoRA adapters of one base into one, by adding their weight updates. The folder of "
    )
    text += "--out is the adapter: give it to --lora, lora.init or flowalign.load."
    parser = argparse.ArgumentParser("flowalign merge", description=text)
    parser.add_argument("adapters", nargs="+", help="adapter folders, such as outputs/.../adapter")
    parser.add_argument("--out", required=True, help="the adapter's folder, to be written")
    parser.add_argument("--method", default="concat", help="concat (exact), svd, ties or dare")
    parser.add_argument("--weights", nargs="+", type=float, help="one each; default: 1, the sum")
    parser.add_argument("--rank", type=int, help="of the result; default: the largest given")
    parser.add_argument("--density", type=float, default=0.5, help="what ties and dare keep")
    parser.add_argument("--seed", type=int, default=0, help="of what dare drops")
    parser.add_argument("--model", help="the base, for LoRAs under another program's names")
    return parser.parse_args(argv)


@refusing("watch")
def watch(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of `flowalign watch`: a folder that holds a run."""
    text = (
        "Write the page that shows a run or a recipe as it is now, RUN/report.html. A run writes "
    )
    text += "it by itself at each evaluation and at its end."
    parser = argparse.ArgumentParser("flowalign watch", description=text)
    parser.add_argument("run", type=Path, help="the output folder of a run or a recipe")
    args = parser.parse_args(argv)
    args.run = expanded(args.run)
    run_config(args.run)
    return args
