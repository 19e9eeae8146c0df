"""Does a reward work here, what does it score, what does it cost?

It scores scenes of the tiny world with their own prompts and with other prompts, noise and plain
grey. What breaks a training run is a fault: scores that depend on the batch, or never differ.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowalign import rewards
from flowalign.backbone.tiny.scenes import rendered
from flowalign.commands.doctor import findings
from flowalign.commands.doctor.findings import Finding, ok
from flowalign.rewards.scoring import score
from flowalign.training.data import load_prompts
from flowalign.types import PromptBatch, Reward, Scores

PROBES = ("tiny/geneval_test", "tiny/ocr_test", "tiny/preference_test")
COPIES = 4  # of a prompt, for a reward that compares them
TOLERANCE = 1e-4  # relative: float32 sums in another order


class UnsuitedError(ValueError):
    """No built-in prompts have what a reward needs, such as a metadata key."""


@dataclass
class Health:
    """Findings in order; by kind of probe, the valid scores and how many images failed; seconds of
    an image."""

    findings: list[Finding] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    cost: float = 0.0

    def say(self, level: str, text: str) -> None:
        self.findings.append(Finding(level, text))

    @property
    def healthy(self) -> bool:
        return findings.healthy(self.findings)


def diagnose(name: str, options: Mapping[str, Any], count: int, size: int | None) -> Health:
    """Build a reward and examine it on `count` scenes, enlarged to `size` pixels if given.

    Raises ValueError for a name or options that do not work, UnsuitedError where no built-in
    prompts suit it, and whatever its constructor raises.
    """
    rewards.check(name, options)
    batch = suited(name, options, count)
    before, began = memory(), time.perf_counter()
    reward = rewards.build_on(None, name, options)
    seconds = time.perf_counter() - began
    copies = COPIES if reward.groupwise else 1
    scenes = rendered(batch.metadata, seed=0, each=copies)
    if size is not None:
        shape = (size, size)
        scenes = torch.nn.functional.interpolate(scenes, shape, mode="bicubic").clamp(0, 1)
    batch = batch.select([row for row in range(len(batch)) for _ in range(copies)])
    health = examine(reward, batch, scenes, copies)
    used = ", ".join(f"{v - before[k]:.0f} MiB of {k}" for k, v in memory().items())
    health.findings.insert(0, ok(f"built in {seconds:.1f} s; all in all {used}"))
    return health


def suited(name: str, options: Mapping[str, Any], count: int) -> PromptBatch:
    """Prompts of the tiny world that the reward can score; UnsuitedError where there are none."""
    problem = None
    for source in PROBES:
        batch = load_prompts(source, "doctor")
        batch = batch.select(range(0, len(batch), max(1, len(batch) // count))[:count])
        try:
            rewards.check_prompts(name, options, batch.prompts, batch.metadata)
        except ValueError as error:
            problem = error
        else:
            return batch
    raise UnsuitedError(f"the built-in prompts do not suit reward {name!r}: {problem}")


def memory() -> dict[str, float]:
    """Peak MiB so far: of this process, and of the GPU where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, else KiB
    peak = {"RAM": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if torch.cuda.is_available():
        peak["GPU"] = torch.cuda.max_memory_allocated() / 2**20
    return peak


def examine(reward: Reward, batch: PromptBatch, scenes: Tensor, copies: int = 1) -> Health:
    """Score the probes, and score them again in ways that must not matter.

    scenes [B,3,H,W] in [0,1] of the B rows of batch, `copies` of each prompt after each other.
    """
    health = Health()
    noise = torch.rand(scenes.shape, generator=torch.Generator().manual_seed(0))
    probes = {
        "its prompt": scenes,
        "other prompt": scenes.roll(copies, 0),
        "noise": noise,
        "grey": torch.full_like(scenes, 0.5),
    }

    def ask(images: Tensor, rows: Sequence[int]) -> Scores:
        asked = batch.select(rows)
        return score(reward, images, asked.prompts, asked.metadata)

    rows = list(range(len(scenes)))
    ask(scenes[:copies], rows[:copies])  # what is loaded or compiled on first use is not timed
    began = time.perf_counter()
    answers = {kind: ask(images, rows) for kind, images in probes.items()}
    health.cost = (time.perf_counter() - began) / (len(probes) * len(rows))
    for kind, scores in answers.items():
        health.scores[kind] = scores.value[scores.valid].tolist()
        health.failures[kind] = int((~scores.valid).sum())
    health.say("ok", f"{1000 * health.cost:.1f} ms an image in batches of {len(rows)}")
    _spread(health, answers)

    first = answers["its prompt"]
    ways: dict[str, Callable[[], Tensor]] = {
        "asked again": lambda: ask(scenes, rows).value,
        "in reverse order": lambda: ask(scenes.flip(0), rows[::-1]).value.flip(0),
    }
    if copies == 1:
        ways["one by one"] = lambda: torch.cat([ask(scenes[[r]], [r]).value for r in rows])
    for way, call in ways.items():
        began = time.perf_counter()
        gap = (call() - first.value)[first.valid].abs()
        cost = 1000 * (time.perf_counter() - began) / len(rows)
        worst = float(gap.max()) if len(gap) else 0.0
        scale = float(first.value[first.valid].abs().max()) if len(gap) else 1.0
        same = worst <= TOLERANCE * max(scale, TOLERANCE)
        timed = f" ({cost:.1f} ms an image)" if way == "one by one" else ""
        health.say("ok" if same else "fault", f"{way}: differs by at most {worst:.2g}{timed}")
    return health


def _spread(health: Health, answers: Mapping[str, Scores]) -> None:
    """Are there scores, do they differ, and does the prompt matter?"""
    failed, count = sum(health.failures.values()), sum(len(a.value) for a in answers.values())
    if failed:
        reason = next(text for a in answers.values() for text in a.failures.values())
        level = "fault" if failed == count or health.failures["its prompt"] else "note"
        health.say(level, f"failed on {failed} of {count} images: {reason}")
    values = [value for scores in health.scores.values() for value in scores]
    if values and max(values) - min(values) <= TOLERANCE * max(map(abs, values)):
        text = f"constant: every image scores {values[0]:.4g}, so that nothing can be learned"
        health.say("fault", text)
    right, wrong = health.scores["its prompt"], health.scores["other prompt"]
    if right and wrong:
        gap = sum(right) / len(right) - sum(wrong) / len(wrong)
        text = f"a scene scores {gap:+.4g} more with its own prompt than with another one"
        health.say("ok" if gap > 0 else "note", text)


def show(name: str, health: Health) -> None:
    """Print the scores by kind of probe, then the findings."""
    table = Table("scenes with", "min", "median", "max", "failed", title=f"reward {name}")
    for kind, values in health.scores.items():
        quantiles = torch.tensor(values).quantile(torch.tensor([0.0, 0.5, 1.0])) if values else ()
        cells = [f"{float(value):.4g}" for value in quantiles] or ["-"] * 3  # - = all failed
        table.add_row(kind, *cells, str(health.failures[kind]))
    Console(highlight=False).print(table)
    findings.show(health.findings)
