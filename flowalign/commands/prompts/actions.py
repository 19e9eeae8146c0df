"""`flowalign data generate | reword | fetch | list`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from flowalign.commands.prompts import geneval, held_out, ocr
from flowalign.commands.prompts import reword as rewording
from flowalign.commands.prompts.fetch import about, write
from flowalign.commands.prompts.fetch import fetch as fetch_set
from flowalign.commands.prompts.held_out import digest
from flowalign.rewards.ocr import target_of
from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.training.sources import GENERATED, SOURCES, validation_file


def generate(args: argparse.Namespace) -> int:
    """Write training and validation prompts of our own, without the official test prompts."""
    usual, out = GENERATED[args.kind]
    count = usual if args.count is None else args.count
    if count < 1:
        raise ValueError(f"--count: got {count}; want 1 or more.")
    if args.kind == "ocr":  # a text is held out, in whatever scene
        module, test, unique, noun = ocr, held_out.OCR, target_of, "texts"
    else:
        module, test, unique, noun = geneval, held_out.GENEVAL, itemgetter("prompt"), "ones"
    validation: list[Any] = module.validation(args.seed)
    aside = set(map(digest, map(unique, validation)))
    rows: list[Any] = module.generate(count, args.seed, test | aside)
    path = expanded(Path(args.out or out))
    files = {path: rows, validation_file(path): validation}
    write({file: b"".join(map(_line, lines)) for file, lines in files.items()}, args.force)
    print(f"{len(rows)} prompts, {len(set(map(unique, rows)))} different {noun}")
    print(f"{path}\n{validation_file(path)}: {len(validation)} others to validate with")
    return 0


def _line(row: str | Mapping[str, Any]) -> bytes:
    return f"{row if isinstance(row, str) else json.dumps(row)}\n".encode()


def reword(args: argparse.Namespace) -> int:
    """Say prompts in other words, by a language model that speaks OpenAI's chat completions."""
    rows, file = rewording.reword(args), expanded(Path(args.out))
    write({file: b"".join(map(_line, rows))}, args.force)
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
        print(f"{name}: {about(source)}")
    return 0


@refusing("data")
def main(args: argparse.Namespace) -> int:
    """Exit status; 0 = done, 2 = it could not be done."""
    actions = {"generate": generate, "reword": reword, "fetch": fetch, "list": show}
    return actions[args.action](args)
