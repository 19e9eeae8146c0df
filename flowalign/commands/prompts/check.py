"""`flowalign data check`: what is in a prompt set, and what would go wrong with it in training?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flowalign import rewards
from flowalign.commands.prompts.geneval import same_picture
from flowalign.commands.prompts.held_out import digest
from flowalign.rewards.ocr import normalize, target_of
from flowalign.types import PromptBatch

EXAMPLES = 3  # shown of each kind
CHARACTERS = 4.0  # of English text a token, about, for CLIP and T5


@dataclass
class Findings:
    """Lines to be read, and those among them that would harm a training run or a test."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def ok(self, text: str) -> None:
        self.lines.append(f"   ok  {text}")

    def note(self, text: str) -> None:  # may be intended
        self.lines.append(f" note  {text}")

    def fault(self, text: str) -> None:
        self.lines.append(f"fault  {text}")
        self.faults.append(text)


def examine(
    batch: PromptBatch,
    names: Mapping[str, Mapping[str, Any]],
    against: Mapping[str, PromptBatch],
    tokens: int | None = None,
    count: Callable[[str], int] | None = None,
) -> Findings:
    """Look at a set of prompts.

    names: reward -> its options; a fault if it refuses prompts. against: other sets, say the test
    set of a training set; a fault if both ask for the same. tokens: what a text encoder reads of a
    prompt; count: tokens of a text, None = estimated at 4 characters each.
    Raises ValueError for a reward that does not exist or does not take its options.
    """
    findings = Findings()
    _lengths(findings, batch, tokens, count)
    for name, options in names.items():
        rewards.check(name, options)
        _reward(findings, batch, name, options)
        if name == "ocr":
            _quotes(findings, batch)
    for name, other in against.items():
        _overlap(findings, batch, name, other)
    return findings


def _lengths(
    findings: Findings, batch: PromptBatch, tokens: int | None, count: Callable[[str], int] | None
) -> None:
    different = Counter(batch.prompts)
    findings.ok(f"{len(batch)} prompts, {len(different)} different")
    repeated = [(prompt, n) for prompt, n in different.most_common(EXAMPLES) if n > 1]
    if repeated:
        shown = "; ".join(f"{n} times {prompt!r}" for prompt, n in repeated)
        findings.note(f"repeated (each is drawn once an epoch, so repeats are weights): {shown}")
    lengths = sorted(map(len, batch.prompts))
    middle = lengths[len(lengths) // 2]
    findings.ok(f"characters: {lengths[0]} to {lengths[-1]}, median {middle}")
    if tokens is None:
        return
    measure = count or (lambda text: round(len(text) / CHARACTERS))
    long = [prompt for prompt in different if measure(prompt) > tokens]
    how = "" if count else f", estimated at {CHARACTERS:g} characters each"
    if long:
        findings.fault(
            f"{len(long)} prompts have more than {tokens} tokens{how}, of which the rest is not "
            f"read, such as {long[0]!r}",
        )
    else:
        findings.ok(f"none has more than {tokens} tokens{how}")


def _reward(findings: Findings, batch: PromptBatch, name: str, options: Mapping[str, Any]) -> None:
    refused: list[str] = []
    for row, (prompt, metadata) in enumerate(zip(batch.prompts, batch.metadata, strict=True), 1):
        try:
            rewards.check_prompts(name, options, [prompt], [metadata])
        except ValueError as error:
            refused.append(f"prompt {row}: {str(error).removeprefix('number 1 of 1: ')}")
    if refused:
        shown = "\n         ".join(["", *refused[:EXAMPLES]])
        findings.fault(f"reward {name} refuses {len(refused)} of {len(batch)} prompts:{shown}")
    else:
        findings.ok(f"reward {name} takes all {len(batch)} prompts")


def _quotes(findings: Findings, batch: PromptBatch) -> None:
    """More than one pair of quotes is no error, but the first two may be the wrong ones."""
    rows = zip(batch.prompts, batch.metadata, strict=True)
    several = [p for p, metadata in rows if p.count('"') > 2 and "target" not in metadata]
    several = [p for p in several if normalize(p.split('"')[1])]  # else the reward refuses it
    if several:
        findings.fault(
            f"{len(several)} prompts have more than two straight double quotes, of which only the "
            f"first two count, such as {several[0]!r} with the target {target_of(several[0])!r}. "
            "Reword them, or give `target` in the metadata (.jsonl)",
        )
    targets = _targets(batch)
    if targets:
        lengths = sorted(map(len, targets))
        findings.ok(
            f"targets: {lengths[0]} to {lengths[-1]} characters, median "
            f"{lengths[len(lengths) // 2]}, {len(set(targets))} different",
        )


def _targets(batch: PromptBatch) -> list[str]:
    """The target texts of the prompts that have one."""
    targets = []
    for prompt, metadata in zip(batch.prompts, batch.metadata, strict=True):
        with suppress(ValueError):
            target = metadata.get("target")
            targets.append(target if isinstance(target, str) and target else target_of(prompt))
    return targets


def _overlap(findings: Findings, batch: PromptBatch, name: str, other: PromptBatch) -> None:
    """What two sets share: prompts (or GenEval's with the objects swapped), target texts."""
    known = set(map(digest, other.prompts))
    same = [p for p in batch.prompts if not known.isdisjoint(map(digest, same_picture(p)))]
    if same:
        findings.fault(
            f"{len(same)} prompts are also in {name}, the order of two objects aside, such as "
            f"{same[0]!r}",
        )
    else:
        findings.ok(f"shares no prompt with {name}")
    known = set(map(digest, _targets(other)))
    texts = [text for text in _targets(batch) if digest(text) in known]
    if texts:
        findings.note(
            f"{len(texts)} target texts are also in {name}, in other prompts perhaps, such as "
            f"{texts[0]!r}",
        )
