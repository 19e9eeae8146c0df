"""The `flowalign` command, which runs one of COMMANDS."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from os.path import expanduser
from pathlib import Path

from flowalign import __version__
from flowalign.system import exit

COMMANDS = {
    "init": (
        "Write a config, with the meaning of its keys.",
        "flowalign.commands.arguments:init",
        "flowalign.commands.init:main",
    ),
    "train": (
        "Train from a config, as `accelerate launch train.py`.",
        "flowalign.commands.train:main",
    ),
    "watch": (
        "Write the page that shows a run, as it is now.",
        "flowalign.commands.arguments:watch",
        "flowalign.report.page:main",
    ),
    "eval": (
        "Score models on held-out prompts.",
        "flowalign.commands.evaluate:main",
    ),
    "sample": (
        "Sample images with a model and an optional LoRA.",
        "flowalign.commands.arguments:sample_arguments",
        "flowalign.commands.sample:main",
    ),
    "vote": (
        "Choose the better of two images, for `stage: dpo`.",
        "flowalign.commands.arguments:vote",
        "flowalign.commands.vote:main",
    ),
    "merge": (
        "Merge LoRA adapters of one base into one.",
        "flowalign.commands.arguments:merge_arguments",
        "flowalign.teachers.merge:main",
    ),
    "data": (
        "Official prompt sets: fetch, list.",
        "flowalign.commands.arguments:data",
        "flowalign.commands.prompts.fetch:main",
    ),
    "fetch": (
        "Download what a config reads.",
        "flowalign.commands.arguments:fetch",
        "flowalign.commands.fetch:main",
    ),
    "doctor": (
        "Examine a config or a reward before a run.",
        "flowalign.commands.arguments:doctor",
        "flowalign.commands.doctor.command:main",
    ),
    "serve-reward": (
        "Serve a reward over HTTP, for runs that name it as `remote`.",
        "flowalign.commands.arguments:serve_reward",
        "flowalign.rewards.service.server:main",
    ),
}
"""Name -> (what it does, module:function from arguments to exit status). Where the module imports
torch, a function of `commands.arguments` comes first, and the next takes what it returns."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 if it is refused, 130 after Ctrl-C. argv: None =
    the arguments of this process, which then ends."""
    of_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: flowalign COMMAND ...\n")
        for name, (text, *_) in COMMANDS.items():
            print(f"  {name:14}{text}")
        print("\n`flowalign COMMAND --help` tells more, `flowalign --version` what is installed.")
        return 0
    # --out=~/x, too, which shells leave as it is
    name, *rest = [re.sub(r"(?<![^=])~[\w.-]*(?=/)", lambda m: expanduser(m[0]), w) for w in argv]
    if name == "--version":
        print(version())
        return 0
    if name not in COMMANDS:
        from flowalign.config.section import did_you_mean

        text = f"no command {name!r}.{did_you_mean(name, COMMANDS)} Possible: {', '.join(COMMANDS)}"
        print(f"flowalign: {text}.", file=sys.stderr)
        return 2
    status = exit.run_command(name, rest, *COMMANDS[name][1:])
    if of_process:
        exit.end_process(status)
    return status


def version() -> str:
    """The versions of the main packages, and the path of this one."""
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "diffusers"))
    place = Path(__file__).parents[1]
    python = platform.python_version()
    return f"flowalign {__version__} ({place}), {libraries}, Python {python}"


if __name__ == "__main__":
    sys.exit(main())
