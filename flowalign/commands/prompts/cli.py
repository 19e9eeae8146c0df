"""`flowalign data generate | reword | fetch | list`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flowalign data", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(required=True, metavar="generate | reword | fetch | list")

    def command(name: str, run: Callable[..., int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        made.set_defaults(run=run)
        return made

    made = command("generate", generate)
    made.add_argument("kind", choices=list(GENERATED))
    made.add_argument("--count", type=int, help="prompts (default: 50000 geneval, 20000 ocr)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", help="default: data/geneval_train.jsonl, data/ocr_train.txt; the "
                                    "validation set lies next to it, as x_val")  # fmt: skip
    made.add_argument("--force", action="store_true", help="replace a file that differs")

    made = command("reword", reword)
    made.add_argument("file", help="a prompt set")
    made.add_argument("--url", required=True, help="of the endpoint, such as http://host:8000/v1")
    made.add_argument("--model", required=True, help="its name there")
    made.add_argument("--name", default="reworded", help="of the wording (default: reworded)")
    made.add_argument("--ask", default=rewording.ASK, help="what the model is told, with {prompt}")
    made.add_argument("--token-env", metavar="NAME", help="environment variable with a token")
    made.add_argument("--concurrency", type=int, default=8)
    made.add_argument("--out", required=True, help="the .jsonl to write")
    made.add_argument("--force", action="store_true", help="replace a file that differs")

    made = command("fetch", fetch)
    made.add_argument("names", nargs="+", choices=list(SOURCES), metavar="NAME",
                      help=f"one or more of {', '.join(SOURCES)}")  # fmt: skip
    made.add_argument("--out", default="data", help="folder (default: data)")
    made.add_argument("--force", action="store_true", help="replace files that differ")

    command("list", show)
    return parser


@refusing("data")
def main(argv: Sequence[str]) -> int:
    """The command line; 0 = done, 2 = it could not be done."""
    args = _parser().parse_args(argv)
    return args.run(args)
