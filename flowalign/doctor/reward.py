"""Does a reward work here, what does it say, what does it cost?

It scores the tiny world's scenes, with their own prompts and with other ones, beside noise and
plain grey, and looks for what breaks a training run: scores that depend on the batch, or that
never differ.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowalign import rewards
from flowalign.doctor import findings
from flowalign.doctor.findings import Finding
from flowalign.rewards.scoring import score
from flowalign.types import PromptBatch, Reward, Scores

PROBES = ("tiny/geneval_test", "tiny/ocr_test", "tiny/preference_test")
COPIES = 4  # of a prompt, for a reward that compares them
TOLERANCE = 1e-4  # relative: float32 sums in another order


@dataclass
class Health:
    """Findings in order, and for each kind of probe its valid scores and how many failed."""

    findings: list[Finding] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    def say(self, level: str, text: str) -> None:
        self.findings.append(Finding(level, text))

    @property
    def healthy(self) -> bool:
        return findings.healthy(self.findings)


def suited(name: str, options: Mapping[str, Any], count: int) -> PromptBatch:
    """Prompts of the tiny world that the reward can judge; ValueError where there are none."""
    from flowalign.data import load_prompts

    refused = ""
    for source in PROBES:
        batch = load_prompts(source, "doctor")
        batch = batch.select(range(0, len(batch), max(1, len(batch) // count))[:count])
        try:
            rewards.check_prompts(name, options, batch.prompts, batch.metadata)
        except ValueError as error:
            refused = str(error)
        else:
            return batch
    raise ValueError(f"the built-in prompts do not suit reward {name!r}: {refused}")


def examine(reward: Reward, batch: PromptBatch, scenes: Tensor, copies: int = 1) -> Health:
    """Score the probes in every way that must not matter; scenes [B,3,H,W] in [0,1] of the B rows,
    `copies` of each prompt one after the other."""
    health = Health()
    noise = torch.rand(scenes.shape, generator=torch.Generator().manual_seed(0))
    shown = {
        "its prompt": scenes,
        "other prompt": scenes.roll(copies, 0),
        "noise": noise,
        "grey": torch.full_like(scenes, 0.5),
    }

    def ask(images: Tensor, rows: Sequence[int] | None = None) -> Scores:
        mine = batch if rows is None else batch.select(rows)
        return score(reward, images, mine.prompts, mine.metadata)

    ask(scenes[:copies], range(copies))  # what is loaded or compiled on first use is not timed
    began = time.perf_counter()
    found = {kind: ask(images) for kind, images in shown.items()}
    seconds = (time.perf_counter() - began) / (len(shown) * len(scenes))
    for kind, scores in found.items():
        health.scores[kind] = scores.value[scores.valid].tolist()
        health.failures[kind] = int((~scores.valid).sum())
    health.say("ok", f"{1000 * seconds:.1f} ms an image in batches of {len(scenes)}")
    _spread(health, found)
    _invariance(health, ask, scenes, found["its prompt"], alone=copies == 1)
    return health


def _spread(health: Health, found: Mapping[str, Scores]) -> None:
    """Are there scores, do they differ, and does the prompt matter?"""
    failed, count = sum(health.failures.values()), sum(len(f.value) for f in found.values())
    reasons = [text for scores in found.values() for text in scores.failures.values()]
    if failed:
        level = "fault" if failed == count or health.failures["its prompt"] else "note"
        health.say(level, f"failed on {failed} of {count} images: {reasons[0]}")
    values = [value for each in health.scores.values() for value in each]
    if values and max(values) - min(values) <= TOLERANCE * max(map(abs, values)):
        health.say("fault", f"constant: every image has {values[0]:.4g}, so nothing can be learnt")
    right, wrong = health.scores["its prompt"], health.scores["other prompt"]
    if right and wrong:
        gap = sum(right) / len(right) - sum(wrong) / len(wrong)
        text = f"a scene of its own prompt is worth {gap:+.4g} more than one of another"
        health.say("ok" if gap > 0 else "note", text)


def _invariance(
    health: Health,
    ask: Callable[..., Scores],
    scenes: Tensor,
    whole: Scores,
    alone: bool,
) -> None:
    """The same scores again, image by image, and in another order?"""
    rows = list(range(len(scenes)))
    ways: dict[str, Callable[[], Tensor]] = {
        "asked again": lambda: ask(scenes).value,
        "in reverse order": lambda: ask(scenes.flip(0), rows[::-1]).value.flip(0),
    }
    if alone:
        ways["one by one"] = lambda: torch.cat([ask(scenes[[r]], [r]).value for r in rows])
    for way, call in ways.items():
        began = time.perf_counter()
        gap = (call() - whole.value)[whole.valid].abs()
        seconds = time.perf_counter() - began
        worst = float(gap.max()) if len(gap) else 0.0
        scale = float(whole.value[whole.valid].abs().max()) if len(gap) else 1.0
        same = worst <= TOLERANCE * max(scale, TOLERANCE)
        cost = f" ({1000 * seconds / len(rows):.1f} ms an image)" if way == "one by one" else ""
        health.say("ok" if same else "fault", f"{way}: differs by at most {worst:.2g}{cost}")


def memory() -> dict[str, float]:
    """Peak MiB so far: of this process, and of the GPU where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, else KiB
    found = {"RAM": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def diagnose(name: str, options: Mapping[str, Any], count: int, size: int | None) -> Health:
    """Build a reward and examine it. Raises ValueError for a name or options that do not work,
    and whatever its constructor raises."""
    from flowalign.tiny.scenes import rendered

    rewards.check(name, options)
    batch = suited(name, options, count)
    before, began = memory(), time.perf_counter()
    reward = rewards.build(name, **options)
    seconds = time.perf_counter() - began
    copies = COPIES if getattr(reward, "groupwise", False) else 1
    scenes = rendered(batch.metadata, seed=0, each=copies)
    if size is not None:
        shape = (size, size)
        scenes = torch.nn.functional.interpolate(scenes, shape, mode="bicubic").clamp(0, 1)
    batch = batch.select([row for row in range(len(batch)) for _ in range(copies)])
    health = examine(reward, batch, scenes, copies)
    used = ", ".join(f"{v - before[k]:.0f} MiB of {k}" for k, v in memory().items())
    health.findings.insert(0, Finding("ok", f"built in {seconds:.1f} s; all in all {used}"))
    return health


def show(name: str, health: Health) -> None:
    """Print the scores by kind of probe, then the findings."""
    from rich.console import Console
    from rich.table import Table

    table = Table("scenes with", "min", "median", "max", "failed", title=f"reward {name}")
    for kind, values in health.scores.items():
        low, middle, high = (
            (f"{float(torch.tensor(values).quantile(q)):.4g}" for q in (0.0, 0.5, 1.0))
            if values
            else ("-", "-", "-")
        )
        table.add_row(kind, low, middle, high, str(health.failures[kind]))
    Console(highlight=False).print(table)
    findings.show(health.findings)
