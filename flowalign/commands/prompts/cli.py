"""`flowalign data reword | fetch | list`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from flowalign.commands.prompts import reword as rewording
from flowalign.commands.prompts.fetch import about, write
from flowalign.commands.prompts.fetch import fetch as fetch_set
from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.training.sources import SOURCES


def reword(args: argparse.Namespace) -> int:
    """Say prompts in other words, by a language model that speaks OpenAI's chat completions."""
    rows, file = rewording.reword(args), expanded(Path(args.out))
    write({file: "".join(f"{json.dumps(row)}\n" for row in rows).encode()}, args.force)
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
    commands = parser.add_subparsers(required=True, metavar="reword | fetch | list")

    def command(name: str, run: Callable[..., int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        made.set_defaults(run=run)
        return made

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
