"""`flowalign data generate | fetch | list | check`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from flowalign.commands.findings import healthy
from flowalign.commands.prompts import geneval, held_out, ocr
from flowalign.commands.prompts.check import examine
from flowalign.commands.prompts.fetch import fetch as fetch_set
from flowalign.commands.prompts.held_out import digest
from flowalign.rewards.ocr import target_of
from flowalign.system.escape import harmless
from flowalign.system.exit import refusing
from flowalign.system.files import expanded, replacing
from flowalign.training.data import load_prompts
from flowalign.training.sources import GENERATED, SOURCES, validation_file


def generate(args: argparse.Namespace) -> int:
    """Write training and validation prompts of our own, without the official test prompts."""
    count, out = GENERATED[args.kind]
    lines_of = {"geneval": _geneval, "ocr": _ocr}[args.kind]
    excluded = [prompt for name in args.exclude for prompt in load_prompts(name, "").prompts]
    training, validation, summary = lines_of(args.count or count, args, excluded)
    path = expanded(Path(args.out or out))
    validation_path = validation_file(path)
    contents = {
        file: "".join(f"{line}\n" for line in lines).encode()
        for file, lines in ((validation_path, validation), (path, training))
    }
    for file, content in contents.items():
        if file.is_file() and file.read_bytes() != content and not args.force:
            raise ValueError(
                f"{file} is there and holds something else. Give another --out, or replace it "
                "with --force."
            )
    for file, content in contents.items():
        with replacing(file) as part:
            part.write_bytes(content)
    print(f"{summary}\n{path}\n{validation_path}: {len(validation)} others to validate with")
    return 0


Sets = tuple[list[str], list[str], str]  # lines of the training and the validation set, a summary


def _geneval(count: int, args: argparse.Namespace, excluded: Sequence[str]) -> Sets:
    avoided = held_out.GENEVAL.union(map(digest, excluded))
    validation = geneval.validation(args.seed, avoided)
    avoided |= {digest(row["prompt"]) for row in validation}
    rows = geneval.generate(count, args.seed, avoided, repeats=not args.unique)
    tags = Counter(row["tag"] for row in rows)
    different = Counter(tag for tag, _ in {(row["tag"], row["prompt"]) for row in rows})
    summary = [f"{len(rows)} prompts, {sum(different.values())} different"]
    for tag, number in tags.most_common():
        repeated = "" if different[tag] == number else ": all there are, repeated evenly"
        summary.append(f"  {tag:12} {number:6}, {different[tag]} different{repeated}")
    return [json.dumps(r) for r in rows], [json.dumps(r) for r in validation], "\n".join(summary)


def _ocr(count: int, args: argparse.Namespace, excluded: Sequence[str]) -> Sets:
    texts = [target_of(prompt) for prompt in excluded if prompt.count('"') >= 2]
    avoided = held_out.OCR.union(map(digest, [*excluded, *texts]))
    validation = ocr.validation(args.seed, avoided)
    avoided |= {digest(target_of(prompt)) for prompt in validation}
    prompts = ocr.generate(count, args.seed, avoided)
    different = len(set(map(target_of, prompts)))
    summary = f"{len(prompts)} prompts, all different, with {different} different texts"
    return prompts, validation, summary


def fetch(args: argparse.Namespace) -> int:
    """Get official sets from where they are published, with licence and checksum."""
    for number, name in enumerate(args.names):
        print(("\n" if number else "") + f"{name}: ", end="")
        fetch_set(SOURCES[name], args.out, force=args.force, unverified=args.unverified)
    return 0


def show(args: argparse.Namespace) -> int:
    """List the official sets: size, licence, source, checksums."""
    for name, source in SOURCES.items():
        print(f"{name}: {source.prompts}")
        print(f"    {source.page}\n    licence: {source.licence}")
        if source.note:
            print(f"    NOTE: {source.note}")
        for file in source.files:
            checksum = f"{file.checksum} ({file.known})" if file.checksum else "no checksum known"
            print(f"    {file.name}: {checksum}")
    return 0


def check(args: argparse.Namespace) -> int:
    """Tell what rewards refuse in sets, their repeats, lengths, and overlap with other sets."""
    count: Callable[[str], int] | None = None
    if args.tokenizer:
        if not args.tokens:
            raise ValueError("--tokenizer counts for --tokens N; give both.")
        from transformers import AutoTokenizer  # slow to import, and only of use here

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        # special tokens included
        count = lambda text: len(tokenizer(text, truncation=False, verbose=False)["input_ids"])  # noqa: E731

    sets = {source: load_prompts(source, "checked") for source in args.sets}
    against = {source: load_prompts(source, "other") for source in args.against}
    options, sound = {name: {} for name in args.reward}, True
    for source, batch in sets.items():
        if len(sets) > 1:
            print(source)
        findings = list(examine(batch, options, against, args.tokens, count))
        for finding in findings:
            print(harmless(f"{finding.level:>5}  {finding.text}"))
        sound &= healthy(findings)
    return 0 if sound else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flowalign data", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(required=True, metavar="generate | fetch | list | check")

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
    made.add_argument("--exclude", nargs="+", default=[], metavar="SET", help="more to keep out")
    made.add_argument("--unique", action="store_true", help="geneval: refuse to repeat prompts")
    made.add_argument("--force", action="store_true", help="replace a file that differs")

    made = command("fetch", fetch)
    made.add_argument("names", nargs="+", choices=list(SOURCES), metavar="NAME",
                      help=f"one or more of {', '.join(SOURCES)}")  # fmt: skip
    made.add_argument("--out", default="data", help="folder (default: data)")
    made.add_argument("--force", action="store_true", help="replace files that differ")
    made.add_argument("--unverified", action="store_true", help="keep what has another checksum")

    command("list", show)

    made = command("check", check)
    help = "a .txt, .jsonl or .csv, a folder, or tiny/NAME"
    made.add_argument("sets", nargs="+", metavar="SET", help=help)
    made.add_argument("--reward", nargs="+", default=[], metavar="NAME")
    made.add_argument("--against", nargs="+", default=[], metavar="SET", help="such as a test set")
    made.add_argument("--tokens", type=int, help="what a text encoder reads: 77 CLIP, 128 T5")
    made.add_argument("--tokenizer", help="that counts them: a folder or hub id; else estimated")
    return parser


@refusing("data")
def main(argv: Sequence[str]) -> int:
    """The command line; 0 = done, 1 = `check` found faults, 2 = it could not be done."""
    args = _parser().parse_args(argv)
    return args.run(args)
