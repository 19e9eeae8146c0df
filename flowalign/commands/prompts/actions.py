"""`flowalign data reword | fetch | list`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flowalign.commands.prompts import reword as rewording
from flowalign.commands.prompts.fetch import describe_set, fetch_set, write_files
from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.training.sources import SOURCES


def reword(args: argparse.Namespace) -> int:
    """Rephrase prompts with a language model that speaks OpenAI's chat completions."""
    rows = rewording.reword(args)
    file = expanded(Path(args.out))
    write_files({file: "".join(f"{json.dumps(row)}\n" for row in rows).encode()}, args.force)
    print(f"{file}: {len(rows)} prompts; in other words they are {file}#{args.name}")
    return 0


def fetch(args: argparse.Namespace) -> int:
    """Get official sets from where they are published, with licence and checksum."""
    for number, name in enumerate(args.names):
        print(("\n" if number else "") + f"{name}: ", end="")
        fetch_set(SOURCES[name], args.out, force=args.force)
    return 0


def show(args: argparse.Namespace) -> int:
    """List the official sets: size, licence, source, checksums."""
    for name, source in SOURCES.items():
        print(f"{name}: {describe_set(source)}")
    return 0


@refusing("data")
def main(args: argparse.Namespace) -> int:
    """Exit status; 0 = done, 2 = it could not be done."""
    actions = {"reword": reword, "fetch": fetch, "list": show}
    return actions[args.action](args)
