"""The `flowalign` command, which runs one of COMMANDS."""

from __future__ import annotations

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

COMMANDS = {
    "init": ("flowalign.commands.init:main", "Write a config, with the meaning of its keys."),
    "train": (
        "flowalign.commands.train:main",
        "Train from a config, as `accelerate launch train.py`.",
    ),
    "watch": (
        "flowalign.report.page:main",
        "Write the page that shows a run, as it is now.",
    ),
    "eval": ("flowalign.commands.evaluate:main", "Score models on held-out prompts."),
    "sample": (
        "flowalign.commands.sample:main",
        "Sample images with a model and an optional LoRA.",
    ),
    "vote": ("flowalign.commands.vote:main", "Choose the better of two images, for `stage: dpo`."),
    "merge": ("flowalign.teachers.merge:main", "Merge LoRA adapters of one base into one."),
    "data": ("flowalign.commands.prompts.actions:main", "Prompt sets: fetch, reword, list."),
    "fetch": ("flowalign.commands.fetch:main", "Download what a config reads."),
    "doctor": (
        "flowalign.commands.doctor.command:main",
        "Examine a config or a reward before a run.",
    ),
    "serve-reward": (
        "flowalign.rewards.service.server:main",
        "Serve a reward over HTTP, for runs that name it as `remote`.",
    ),
    "demo": (
        "flowalign.commands.train:demo",
        "Distil three tiny teachers into one student, in minutes.",
    ),
}
"""Name -> (module:function from arguments to exit status, what it does). If a function of
`commands.arguments` reads the arguments first, the command takes its result."""
ARGUMENTS = {
    name: f"flowalign.commands.arguments:{name.replace('-', '_')}"
    for name in (
        "init",
        "watch",
        "sample",
        "vote",
        "merge",
        "data",
        "fetch",
        "doctor",
        "serve-reward",
    )
}
REMOVED = {"push": "Upload an adapter with `hf upload OWNER/NAME RUN/adapter`."}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 if it is refused, 130 after Ctrl-C. argv: None =
    the arguments of this process, which then ends."""
    of_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
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
    targets = [*filter(None, [ARGUMENTS.get(name)]), COMMANDS[name][0]]
    status = exit.run(name, rest, *targets)
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
