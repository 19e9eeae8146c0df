"""`flowalign data generate | fetch | list | check`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from flowalign import rewards
from flowalign.commands.prompts import geneval, held_out, ocr
from flowalign.commands.prompts.fetch import fetch as fetch_set
from flowalign.commands.prompts.fetch import write
from flowalign.commands.prompts.geneval import same_picture
from flowalign.commands.prompts.held_out import digest
from flowalign.rewards.ocr import target_of
from flowalign.system.escape import harmless
from flowalign.system.exit import refusing
from flowalign.system.files import expanded
from flowalign.training.data import load_prompts
from flowalign.training.sources import GENERATED, SOURCES, validation_file
from flowalign.types import PromptBatch


def generate(args: argparse.Namespace) -> int:
    """Write training and validation prompts of our own, without the official test prompts."""
    count, out = GENERATED[args.kind]
    lines_of = {"geneval": _geneval, "ocr": _ocr}[args.kind]
    excluded = [prompt for name in args.exclude for prompt in load_prompts(name, "").prompts]
    training, validation, summary = lines_of(args.count or count, args, excluded)
    path = expanded(Path(args.out or out))
    validation_path = validation_file(path)
    files = {path: training, validation_path: validation}
    contents = {file: "".join(f"{x}\n" for x in lines).encode() for file, lines in files.items()}
    write(contents, args.force)
    print(f"{summary}\n{path}\n{validation_path}: {len(validation)} others to validate with")
    return 0


Sets = tuple[list[str], list[str], str]  # lines of the training and the validation set, a summary


def _geneval(count: int, args: argparse.Namespace, excluded: Sequence[str]) -> Sets:
    avoided = held_out.GENEVAL.union(map(digest, excluded))
    validation = geneval.validation(args.seed, avoided)
    avoided |= {digest(row["prompt"]) for row in validation}
    rows = geneval.generate(count, args.seed, avoided)
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
        fetch_set(SOURCES[name], args.out, force=args.force)
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
    """Tell what rewards refuse in sets, and which of their prompts are in other sets, too."""
    others = {name: set(map(digest, load_prompts(name, "other").prompts)) for name in args.against}
    for name in args.reward:
        rewards.check(name, {})
    sound = True
    for name in args.sets:
        batch = load_prompts(name, "checked")
        print(f"{name}: {len(batch)} prompts, {len(set(batch.prompts))} different")
        for text in _faults(batch, args.reward, others):
            print(harmless(f"fault  {text}"))
            sound = False
    return 0 if sound else 1


def _faults(
    batch: PromptBatch, names: Sequence[str], others: Mapping[str, Set[str]]
) -> Iterator[str]:
    """others {set: digests of its prompts}."""
    for name in names:
        try:
            rewards.check_prompts(name, {}, batch.prompts, batch.metadata)
        except ValueError as error:
            yield f"reward {name}: {error}"
    rows = zip(batch.prompts, batch.metadata, strict=True)
    several = [p for p, metadata in rows if p.count('"') > 2 and "target" not in metadata]
    if several and "ocr" in names:
        text = "have more than two straight double quotes, of which only the first two count, such"
        yield f"{len(several)} prompts {text} as {several[0]!r}; give `target` in the metadata"
    for name, digests in others.items():
        same = [p for p in batch.prompts if not digests.isdisjoint(map(digest, same_picture(p)))]
        if same:
            text = f"are also in {name}, the order of two objects aside, such as"
            yield f"{len(same)} prompts {text} {same[0]!r}"


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
    made.add_argument("--force", action="store_true", help="replace a file that differs")

    made = command("fetch", fetch)
    made.add_argument("names", nargs="+", choices=list(SOURCES), metavar="NAME",
                      help=f"one or more of {', '.join(SOURCES)}")  # fmt: skip
    made.add_argument("--out", default="data", help="folder (default: data)")
    made.add_argument("--force", action="store_true", help="replace files that differ")

    command("list", show)

    made = command("check", check)
    help = "a .txt, .jsonl or .csv, a folder, or tiny/NAME"
    made.add_argument("sets", nargs="+", metavar="SET", help=help)
    made.add_argument("--reward", nargs="+", default=[], metavar="NAME")
    made.add_argument("--against", nargs="+", default=[], metavar="SET", help="such as a test set")
    return parser


@refusing("data")
def main(argv: Sequence[str]) -> int:
    """The command line; 0 = done, 1 = `check` found a fault, 2 = it could not be done."""
    args = _parser().parse_args(argv)
    return args.run(args)
