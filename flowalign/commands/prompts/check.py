"""`flowalign data check`: what is in a prompt set, and what would go wrong with it in training?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from flowalign import rewards
from flowalign.commands.findings import Finding, fault, note, ok
from flowalign.commands.prompts.geneval import same_picture
from flowalign.commands.prompts.held_out import digest
from flowalign.rewards.ocr import normalize, target_of
from flowalign.training.data import marks
from flowalign.types import PromptBatch

EXAMPLES = 3  # shown of each kind
CHARACTERS = 4.0  # of English text a token, about, for CLIP and T5


def examine(
    batch: PromptBatch,
    names: Mapping[str, Mapping[str, Any]],
    against: Mapping[str, PromptBatch],
    tokens: int | None = None,
    count: Callable[[str], int] | None = None,
) -> Iterator[Finding]:
    """Look at a set of prompts.

    names: reward -> its options; a fault if it refuses prompts. against: other sets, say the test
    set of a training set; a fault if both ask for the same. tokens: what a text encoder reads of a
    prompt; count: tokens of a text, None = estimated at 4 characters each.
    Raises ValueError for a reward that does not exist or does not take its options.
    """
    for name, options in names.items():
        rewards.check(name, options)
    different = Counter(batch.prompts)
    yield ok(f"{len(batch)} prompts, {len(different)} different")
    repeated = [(prompt, n) for prompt, n in different.most_common(EXAMPLES) if n > 1]
    if repeated:
        shown = "; ".join(f"{n} times {prompt!r}" for prompt, n in repeated)
        yield note(f"repeated (each is drawn once an epoch, so repeats are weights): {shown}")
    yield ok(f"characters: {_range(batch.prompts)}")
    yield from map(fault, marks(batch.prompts))
    if tokens is not None:
        measure = count or (lambda text: round(len(text) / CHARACTERS))
        long = [prompt for prompt in different if measure(prompt) > tokens]
        how = "" if count else f", estimated at {CHARACTERS:g} characters each"
        if long:
            yield fault(
                f"{len(long)} prompts have more than {tokens} tokens{how}, of which the rest is "
                f"not read, such as {long[0]!r}"
            )
        else:
            yield ok(f"none has more than {tokens} tokens{how}")
    for name, options in names.items():
        yield _refused(batch, name, options)
        if name == "ocr":
            yield from _quotes(batch)
    for name, other in against.items():
        yield from _overlap(batch, name, other)


def _range(texts: list[str]) -> str:
    """The lengths of some texts."""
    lengths = sorted(map(len, texts))
    return f"{lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}"


def _refused(batch: PromptBatch, name: str, options: Mapping[str, Any]) -> Finding:
    """Which prompts a reward refuses, and why."""
    refused: list[str] = []
    for row, (prompt, metadata) in enumerate(zip(batch.prompts, batch.metadata, strict=True), 1):
        try:
            rewards.check_prompts(name, options, [prompt], [metadata])
        except ValueError as error:
            refused.append(f"prompt {row}: {str(error).removeprefix('number 1 of 1: ')}")
    if not refused:
        return ok(f"reward {name} takes all {len(batch)} prompts")
    shown = "\n         ".join(["", *refused[:EXAMPLES]])
    return fault(f"reward {name} refuses {len(refused)} of {len(batch)} prompts:{shown}")


def _quotes(batch: PromptBatch) -> Iterator[Finding]:
    """More than one pair of quotes is no error, but the first two may be the wrong ones."""
    rows = zip(batch.prompts, batch.metadata, strict=True)
    several = [p for p, metadata in rows if p.count('"') > 2 and "target" not in metadata]
    several = [p for p in several if normalize(p.split('"')[1])]  # else the reward refuses it
    if several:
        yield fault(
            f"{len(several)} prompts have more than two straight double quotes, of which only the "
            f"first two count, such as {several[0]!r} with the target {target_of(several[0])!r}. "
            "Reword them, or give `target` in the metadata (.jsonl)"
        )
    if targets := _targets(batch):
        lengths, separator, median = _range(targets).partition(", ")
        different = len(set(targets))
        yield ok(f"targets: {lengths} characters{separator}{median}, {different} different")


def _targets(batch: PromptBatch) -> list[str]:
    """The target texts of the prompts that have one."""
    targets = []
    for prompt, metadata in zip(batch.prompts, batch.metadata, strict=True):
        with suppress(ValueError):
            target = metadata.get("target")
            targets.append(target if isinstance(target, str) and target else target_of(prompt))
    return targets


def _overlap(batch: PromptBatch, name: str, other: PromptBatch) -> Iterator[Finding]:
    """What two sets share: prompts (or GenEval's with the objects swapped), target texts."""
    prompts, targets = set(map(digest, other.prompts)), set(map(digest, _targets(other)))
    same = [p for p in batch.prompts if not prompts.isdisjoint(map(digest, same_picture(p)))]
    if same:
        yield fault(
            f"{len(same)} prompts are also in {name}, the order of two objects aside, such as "
            f"{same[0]!r}"
        )
    else:
        yield ok(f"shares no prompt with {name}")
    if texts := [text for text in _targets(batch) if digest(text) in targets]:
        yield note(
            f"{len(texts)} target texts are also in {name}, in other prompts perhaps, such as "
            f"{texts[0]!r}"
        )
