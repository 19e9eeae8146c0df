"""The `flowalign` command, which runs one of COMMANDS."""

from __future__ import annotations

import argparse
import difflib
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from os.path import expanduser
from pathlib import Path

from flowalign import __version__
from flowalign.system import exit
from flowalign.system.files import expanded

COMMANDS = {
    "init": ("flowalign.commands.init:main", "Write a config, with the meaning of its keys."),
    "train": (
        "flowalign.commands.train:main",
        "Train from a config, as `accelerate launch train.py`.",
    ),
    "watch": ("flowalign.commands.cli:watch", "Write the page that shows a run, as it is now."),
    "eval": ("flowalign.commands.evaluate:main", "Score models on held-out prompts."),
    "sample": (
        "flowalign.commands.sample:main",
        "Sample images with a model and an optional LoRA.",
    ),
    "vote": ("flowalign.commands.vote:main", "Choose the better of two images, for `stage: dpo`."),
    "merge": ("flowalign.commands.cli:merge", "Merge LoRA adapters of one base into one."),
    "data": ("flowalign.commands.prompts.cli:main", "Prompt sets: generate, fetch, list."),
    "fetch": ("flowalign.commands.fetch:main", "Download what a config reads."),
    "doctor": ("flowalign.commands.doctor:main", "Examine a config or a reward before a run."),
    "serve-reward": (
        "flowalign.rewards.service.server:main",
        "Serve a reward over HTTP, for runs that name it as `remote`.",
    ),
    "demo": (
        "flowalign.commands.train:demo",
        "Distil three tiny teachers into one student, in minutes.",
    ),
}
"""Name -> (module:function from arguments to exit status, what it does)."""
REMOVED = {"push": "Upload an adapter with `hf upload OWNER/NAME RUN/adapter`."}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Its exit status; 2 for what is refused, 130 after Ctrl-C. argv: None = those
    of this process, which then ends."""
    of_process, argv = argv is None, sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: flowalign COMMAND ...\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:14}{text}")
        print("\n`flowalign COMMAND --help` tells more, `flowalign --version` what is installed.")
        return 0
    # --out=~/x, too, which shells leave as it is
    name, *rest = [re.sub(r"(?<![^=])~[\w.-]*(?=/)", lambda m: expanduser(m[0]), w) for w in argv]
    if name == "--version":
        print(version())
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        hint = f" {REMOVED[name]}" if name in REMOVED else hint
        text = f"no command {name!r}.{hint} Possible: {', '.join(COMMANDS)}."
        print(f"flowalign: {text}", file=sys.stderr)
        return 2
    status = exit.run(name, COMMANDS[name][0], rest)
    if of_process:
        exit.end_process(status)
    return status


def version() -> str:
    """The versions that matter, and where this package lies."""
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "diffusers"))
    place, python = Path(__file__).parents[1], platform.python_version()
    return f"flowalign {__version__} ({place}), {libraries}, Python {python}"


@exit.refusing("watch")
def watch(argv: Sequence[str]) -> int:
    """Write the page that shows a run or a recipe as it is now, RUN/report.html. A run writes it by
    itself at each evaluation and at its end."""
    parser = argparse.ArgumentParser("flowalign watch", description=watch.__doc__)
    parser.add_argument("run", type=Path, help="the output folder of a run or a recipe")
    run = parser.parse_args(argv).run
    from flowalign.training.report import page

    print(f"{page.write(expanded(run))}: open it in a browser")
    return 0


@exit.refusing("merge")
def merge(argv: Sequence[str]) -> int:
    """Merge LoRA adapters of one base into one, by adding their weight updates. The folder of --out
    is the adapter: give it to --lora, lora.init or flowalign.load."""
    parser = argparse.ArgumentParser("flowalign merge", description=merge.__doc__)
    parser.add_argument("adapters", nargs="+", help="adapter folders, such as outputs/.../adapter")
    parser.add_argument("--out", required=True, help="the adapter's folder, to be written")
    parser.add_argument("--method", default="concat", help="concat (exact), svd, ties or dare")
    parser.add_argument("--weights", nargs="+", type=float, help="one each; default: 1, the sum")
    parser.add_argument("--rank", type=int, help="of the result; default: the largest given")
    parser.add_argument("--density", type=float, default=0.5, help="what ties and dare keep")
    parser.add_argument("--seed", type=int, default=0, help="of what dare drops")
    depth = "scales of the first and the last block (LiNeS)"
    parser.add_argument("--lines", nargs=2, type=float, metavar=("SHALLOW", "DEEP"), help=depth)
    parser.add_argument("--model", help="the base, for LoRAs under another program's names")
    args = vars(parser.parse_args(argv))
    from flowalign.training.report.progress import quiet

    quiet()
    from flowalign.teachers import merge as merging
    from flowalign.training.report import results

    report = merging.merge(args.pop("adapters"), out := args.pop("out"), **args)
    print(report if report.worst > 1e-6 else report.summary)  # layers, where one has an error
    print(results.merged(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
