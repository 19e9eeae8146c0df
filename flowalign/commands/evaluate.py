"""`flowalign eval` evaluates a config, or a model on named benchmarks.

It writes into the config's `output`: results.json, table.md, report.html (one page with tables and
images), images/ (with the scores of every image: `flowalign.eval.store`) and grid.png (some images
of every model). The same command continues a run that was killed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flowalign.commands import CONFIGS, SD35
from flowalign.commands.arguments import add_changes, with_examples
from flowalign.config import BenchmarkConfig, ConfigError, EvalStage, load, parse, read
from flowalign.config.safe_yaml import dump_yaml
from flowalign.config.section import did_you_mean
from flowalign.system.files import replacing
from flowalign.system.table import Table
from flowalign.training.data import PromptError, load_prompts
from flowalign.training.run import lock
from flowalign.training.sources import commands

SUBCOMMANDS = {  # what follows `eval` -> module:function
    "list": "flowalign.commands.evaluate:list_benchmarks",
    "compare": "flowalign.eval.compare:main",
    "table": "flowalign.eval.seeds:main",
    "curves": "flowalign.eval.curves:main",
}
FLAGS = ("model", "lora", "images", "benchmarks", "limit")  # what a config says itself


def parser() -> argparse.ArgumentParser:
    parser = with_examples(
        "flowalign eval",
        "Score a model and its LoRAs, or images that another program made, on benchmarks:\n"
        "those of a config, or those that `flowalign eval list` names.\n"
        "`flowalign eval compare A B` compares two results.",
        "flowalign eval --model tiny --lora ocr=tiny/ocr --out outputs/scores",
        "flowalign eval --config configs/tiny/eval.yaml models.ocr=tiny/ocr",
    )
    add = parser.add_argument
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--config", help="a YAML file: configs/tiny/eval.yaml")
    way.add_argument("--out", type=Path, help="without a config: folder of the results; the config "
        "is kept there")  # fmt: skip
    add("--model", help="tiny (default), a folder or a Hub id")
    some: Any = {"nargs": "+", "action": "extend"}
    add("--lora", metavar="NAME=ADAPTER", help="folders or Hub ids", **some)
    add("--images", metavar="NAME=SOURCE", **some,
        help="folders or files of images with their prompts, of --benchmarks of --model; no model "
        "is loaded. Images larger than tiny's have the judges of the large models")  # fmt: skip
    add("--benchmarks", metavar="NAME", help="default: those of the family's eval.yaml", **some)
    add("--limit", type=int, help="only the first so many prompts of each")
    add_changes(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """An evaluation, or `list`, or `compare A B`.

    Exit status: 0 done, 1 too many images have no score, 2 refused; interrupted, 130 by Ctrl-C, 143
    by SIGTERM, 75 by SIGUSR1.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in SUBCOMMANDS:
        return resolve_name(SUBCOMMANDS[argv[0]])(argv[1:])
    # before the other imports, which take seconds: --help, mistakes
    flags = parser()
    args = flags.parse_args(argv)
    from_file = args.config is not None
    other, way = (FLAGS, "--config") if from_file else (("variant",), "--out")
    if mixed := [f"--{flag}" for flag in other if getattr(args, flag) is not None]:
        flags.error(f"{', '.join(mixed)}: not with {way}. Change the config: key.path=value")
    first = int(os.environ.get("RANK") or 0) == 0
    try:
        if from_file:
            file = args.config
            config = load(file, args.overrides, stage=EvalStage, variant=args.variant)
            if first:
                lock.check_free(config.output)
        else:
            file = str(args.out / "eval.yaml")
            data = raw_config(args)
            config = parse(data, args.overrides, source="the command line", stage=EvalStage)
    except (ConfigError, ValueError) as error:
        print(error if from_file else f"flowalign eval: {error}", file=sys.stderr)
        return 2
    from flowalign.eval.evaluation import run_command

    status = run_command(config, file)
    if not from_file and status != 2 and first:  # after a refusal nothing else is written
        with replacing(args.out / "eval.yaml") as part:
            part.write_text(dump_yaml(config.model_dump(mode="json", exclude_unset=True)))
    return status


def raw_config(args: argparse.Namespace) -> dict[str, Any]:
    """The raw config: the evaluation of the model's family, with the benchmarks of these names.
    Raises ValueError for an unknown name."""
    from flowalign.commands.init import Draft, named_sources

    model = args.model or "tiny"
    data = Draft("eval", model, args.out, teachers=args.lora or []).data()
    data["output"] = str(args.out)
    shipped = {benchmark["name"]: benchmark for benchmark in data["benchmarks"]}
    known = shipped | more_benchmarks(model)
    if unknown := [name for name in args.benchmarks or () if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"--benchmarks: no {unknown[0]!r}.{hint} There are {', '.join(known)}.")
    if args.images and not args.benchmarks:
        raise ValueError(
            f"--images: name the benchmarks whose prompts they have: --benchmarks {' '.join(known)}"
        )
    chosen = [known[name] for name in args.benchmarks or shipped]
    if args.images:
        named = [
            t if "=" in t else f"{re.sub('[^0-9A-Za-z_-]', '_', Path(t).stem)}={t}"
            for t in args.images
        ]
        sources = {name: {"images": source} for name, source in named_sources(named).items()}
        data["models"] = (data["models"] if args.lora else {}) | sources
        if not args.model and any(_is_larger(s["images"], data["model"]) for s in sources.values()):
            large = [*read(SD35 / "eval.yaml")["benchmarks"], *more_benchmarks("").values()]
            judges = {b["name"]: {k: b[k] for k in b if k in ("reward", "rewards")} for b in large}
            chosen = [benchmark | judges[benchmark["name"]] for benchmark in chosen]
    if args.limit is not None or args.images:
        data.pop("fidelity", None)  # a distance between sets, which needs all images
        chosen = [benchmark | {"limit": args.limit} for benchmark in chosen]
    return data | {"benchmarks": chosen}


def _is_larger(source: str, model: Mapping[str, Any]) -> bool:
    """Whether a source's first image is larger than the model's. Bad ones are refused later."""
    from flowalign.eval.images import find_images
    from flowalign.system.images import read_image

    with suppress(ValueError, OSError):
        files = next(iter(find_images(source).values()))
        return max(read_image(files[0]).size) > max(model["height"], model["width"])
    return False


def more_benchmarks(model: str) -> dict[str, dict[str, Any]]:
    """Benchmarks that are in no eval.yaml, because their judges are large or their texts long."""
    folder = CONFIGS / "tiny" if model == "tiny" else SD35
    listed = read(folder / "_benchmarks.yaml")["benchmarks"]
    return {benchmark["name"]: benchmark for benchmark in listed}


def list_benchmarks(argv: Sequence[str]) -> int:
    """Print the benchmarks of a model's family."""
    parser = argparse.ArgumentParser("flowalign eval list", description=list_benchmarks.__doc__)
    parser.add_argument("--model", default="tiny", help="tiny (default), a folder or a Hub id")
    model = parser.parse_args(argv).model
    folder = CONFIGS / "tiny"
    if model != "tiny":
        from flowalign.commands.init import family_folder

        folder = family_folder(model)
    if folder is None:
        text = f"the family of {model} is not known here; these are Stable Diffusion 3.5's"
        print(f"flowalign eval list: note: {text}", file=sys.stderr)
    shipped = read((folder or SD35) / "eval.yaml")["benchmarks"]
    rows = []
    for raw in [*shipped, *more_benchmarks(model).values()]:
        benchmark = BenchmarkConfig(**raw)
        source = raw["prompts"]
        try:
            number = str(len(load_prompts(source, "")))
        except (PromptError, OSError):
            number = "run " + (" or ".join(commands(source)) or "missing")
        judges = ", ".join(judge.name for judge in benchmark.judges.values())
        rows.append([benchmark.name, source, number, str(benchmark.images), judges])
    heads = ["benchmark", "prompts", "number", "images a prompt", "judge"]
    print(Table(heads, rows).markdown())
    return 0
