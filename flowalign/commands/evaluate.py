"""`flowalign eval`: from a config, or from a model and the names of benchmarks."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.eval import run

CONFIGURED = "--config"  # or --config=FILE


def parser() -> argparse.ArgumentParser:
    """The command line of an evaluation without a config."""
    parser = argparse.ArgumentParser(
        "flowalign eval",
        description="Score a model and its LoRAs, or images that another program made, on "
        "benchmarks. `flowalign eval list` names them, `flowalign eval --config FILE` runs a "
        "config, `flowalign eval compare A B` compares two results.",
    )
    add = parser.add_argument
    add("--model", default="tiny", help="tiny (default), a folder or a Hub id")
    add("--lora", nargs="+", default=[], metavar="NAME=ADAPTER", help="folders or Hub ids")
    add("--images", nargs="+", default=[], metavar="NAME=SOURCE",
        help="folders or files of images with their prompts; no model is loaded, and --model says "
        "whose benchmarks are meant")  # fmt: skip
    add("--benchmarks", nargs="+", metavar="NAME",
        help="default: those of the family's eval.yaml, or those that --images has")  # fmt: skip
    add("--limit", type=int, help="only the first so many prompts of each")
    add("--out", type=Path, required=True, help="folder of the results; the config is kept there")
    add("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit status as that of `flowalign.eval.run.main`."""
    if argv[:1] == ["compare"] or any(word.partition("=")[0] == CONFIGURED for word in argv):
        return run.main(argv)
    if argv[:1] == ["list"]:
        return show(argv[1:])
    args = parser().parse_args(argv)  # before the imports, which take seconds: --help, mistakes
    from flowalign.config import ConfigError, EvalStage, parse
    from flowalign.config.safe_yaml import dump_yaml
    from flowalign.eval.evaluation import run_command
    from flowalign.system.files import replacing

    file = args.out / "eval.yaml"
    try:
        data = settings(args)
        config = parse(data, args.overrides, source="the command line", stage=EvalStage)
    except (ConfigError, ValueError) as error:
        print(f"flowalign eval: {error}", file=sys.stderr)
        return 2
    status = run_command(config, str(file))
    if status != 2 and int(os.environ.get("RANK") or 0) == 0:  # where nothing else is written
        with replacing(file) as part:
            part.write_text(dump_yaml(config.model_dump(mode="json", exclude_unset=True)))
    return status


def settings(args: Namespace) -> dict[str, Any]:
    """The raw config: the evaluation of the model's family, its benchmarks by name. Raises
    ValueError for a name that it has not."""
    from flowalign.commands.init import Draft, named_sources
    from flowalign.config.section import did_you_mean
    from flowalign.eval.images import find_images
    from flowalign.training.sources import commands

    draft = Draft("eval", args.model, args.out, teachers=args.lora)
    data: dict[str, Any] = {**draft.data(), "output": str(args.out)}
    shipped = {benchmark["name"]: benchmark for benchmark in data["benchmarks"]}
    known = shipped | more_benchmarks(args.model)
    if unknown := [name for name in args.benchmarks or () if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"--benchmarks: no {unknown[0]!r}.{hint} There are {', '.join(known)}.")
    chosen = [known[name] for name in args.benchmarks or shipped]
    if args.images:
        named = [
            t if "=" in t else f"{re.sub('[^0-9A-Za-z_-]', '_', Path(t).stem)}={t}"
            for t in args.images
        ]
        sources = named_sources(named)
        given = {name: {"images": source} for name, source in sources.items()}
        data["models"] = (data["models"] if args.lora else {}) | given
        there = {prompt for source in sources.values() for prompt in find_images(source)}
        fits = {benchmark["name"]: _asks_for(benchmark, there) for benchmark in chosen}
        own = args.benchmarks and any(".prompts=" in text for text in args.overrides)
        if not any(fits.values()) and not own:
            fetch = [c for b in chosen if fits[b["name"]] is None for c in commands(b["prompts"])]
            missing = f" Not fetched: run {' and '.join(dict.fromkeys(fetch))}." if fetch else ""
            raise ValueError(
                f"--images: none of their prompts is in {', '.join(fits)}, the benchmarks of "
                f"{args.model}.{missing} Give --model ID of the family that they are for, or the "
                "file of your prompts: --benchmarks NAME benchmarks.0.prompts=FILE."
            )
        if not args.benchmarks:
            chosen = [benchmark for benchmark in chosen if fits[benchmark["name"]]]
    if args.limit is not None or args.images:
        data.pop("fidelity", None)  # a distance between sets, which needs all images
        chosen = [benchmark | {"limit": args.limit} for benchmark in chosen]
    return data | {"benchmarks": chosen}


def _asks_for(benchmark: Mapping[str, Any], prompts: Collection[str]) -> bool | None:
    """Whether some of its prompts are among these; None = they are not fetched."""
    from flowalign.training.data import PromptError, load_prompts

    try:
        return any(p in prompts for p in load_prompts(benchmark["prompts"], "").prompts)
    except (PromptError, OSError):
        return None


def more_benchmarks(model: str) -> dict[str, dict[str, Any]]:
    """Those that no eval.yaml has, since their judges are large or their texts long."""
    from flowalign.commands.init import CONFIGS, SD35
    from flowalign.config import read

    folder = CONFIGS / "tiny" if model == "tiny" else SD35
    listed = read(folder / "_benchmarks.yaml")["benchmarks"]
    return {benchmark["name"]: benchmark for benchmark in listed}


def show(argv: Sequence[str]) -> int:
    """Print the benchmarks of a model's family."""
    parser = argparse.ArgumentParser("flowalign eval list", description=show.__doc__)
    parser.add_argument("--model", default="tiny", help="tiny (default), a folder or a Hub id")
    model = parser.parse_args(argv).model
    from flowalign import rewards
    from flowalign.commands.init import SD35, family_folder
    from flowalign.config import read
    from flowalign.system.escape import table
    from flowalign.training.data import PromptError, load_prompts
    from flowalign.training.sources import commands

    rows = []
    folder = family_folder(model)
    if folder is None:
        text = f"the family of {model} is not known here; these are Stable Diffusion 3.5's"
        print(f"flowalign eval list: note: {text}", file=sys.stderr)
    shipped = read((folder or SD35) / "eval.yaml")["benchmarks"]
    for benchmark in [*shipped, *more_benchmarks(model).values()]:
        try:
            number = str(len(load_prompts(benchmark["prompts"], "")))
        except (PromptError, OSError):
            number = "run " + (" or ".join(commands(benchmark["prompts"])) or "missing")
        judges, licences, sizes = [], [], {}
        for reward in benchmark.get("rewards", {"": benchmark.get("reward")}).values():
            name, options = reward["name"], reward.get("options", {})
            judges.append(" ".join([name, *(f"{key}={value}" for key, value in options.items())]))
            judge = rewards.declared(name, imports=False)
            files = judge.files(**options)
            sizes |= {name: math.nan} if files is None else files
            licences += [judge.licence, judge.choices.get(judge.chosen(**options), "")]
        total = sum(sizes.values())
        download = "?" if math.isnan(total) else f"{total:.2g} GB" if sizes else "-"
        terms = "; ".join(dict.fromkeys(filter(None, licences))) or "see its page"
        about = [number, str(benchmark.get("images", 1)), ", ".join(judges), download, terms]
        rows.append([benchmark["name"], benchmark["prompts"], *about])
    heads = ["benchmark", "prompts", "number", "images a prompt", "judge", "download", "licence"]
    print("\n".join(table(heads, rows)))
    return 0
