"""Does a reward work here, what does it score, what does it cost?

It scores scenes of the tiny world with their own prompts and with other prompts, noise and plain
grey. What breaks a training run is a fault: scores that depend on the batch, or never differ.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from torch import Tensor

from flowalign import rewards
from flowalign.backbone.tiny.scenes import rendered
from flowalign.commands.doctor.findings import Finding, fault, note, ok
from flowalign.rewards.scoring import score
from flowalign.system.images import image_files, read_image, stacked
from flowalign.training.data import load_prompts
from flowalign.types import Metadata, PromptBatch, Scores

PROBES = ("tiny/geneval_test", "tiny/ocr_test", "tiny/preference_test")
COPIES = 4  # of a prompt, for a reward that compares them
SIDE = 512  # pixels of pictures
TOLERANCE = 1e-4  # relative: float32 sums in another order


class UnsuitedError(ValueError):
    """No built-in prompts have what a reward needs, such as a metadata key."""


def diagnose(
    name: str,
    options: Mapping[str, Any],
    count: int,
    size: int | None,
    sources: Sequence[str] = PROBES,
    folders: Sequence[Path] = (),
) -> tuple[list[Finding], float]:
    """Build a reward and examine it on `count` scenes, enlarged to `size` pixels if given: the
    findings, and its seconds for an image. sources: prompt sets; the first that it can score
    counts. folders: of pictures, of which it scores as many, to see what it tells apart.

    Raises ValueError for a name or options that do not work and for a folder without pictures,
    UnsuitedError where no prompts suit it, and whatever its constructor raises.
    """
    rewards.check(name, options)
    batches = suited(name, options, count, sources)
    pictures = {str(folder): _pictures(folder, count, size or SIDE) for folder in folders}
    reward = rewards.build_on(None, name, options)
    copies = COPIES if reward.groupwise else 1

    def ask(images: Tensor, rows: Sequence[int]) -> Scores:
        asked = batch.select(rows)
        return score(reward, images, asked.prompts, asked.metadata)

    for batch in batches:  # what is loaded or compiled on first use is not timed
        batch = batch.select([row for row in range(len(batch)) for _ in range(copies)])
        scenes, rows = _scenes(batch.metadata, size), list(range(len(batch)))
        if bool(ask(scenes[:copies], rows[:copies]).valid.any()):
            break
    probes = {
        "its prompt": scenes,
        "another prompt": scenes.roll(copies, 0),
        "noise": torch.rand(scenes.shape, generator=torch.Generator().manual_seed(0)),
        "grey": torch.full_like(scenes, 0.5),
    }
    began = time.perf_counter()
    answers = {kind: ask(images, rows) for kind, images in probes.items()}
    cost = (time.perf_counter() - began) / (len(probes) * len(rows))
    speed = f"{1000 * cost:.1f} ms an image in batches of {len(rows)}; {_memory()} in all"
    findings = [ok(speed), *_ranges(answers)]
    for folder, images in pictures.items():
        values = ask(images, [row % len(rows) for row in range(len(images))])
        findings += _range(f"pictures of {folder}", values.value[values.valid])
    ways: dict[str, Callable[[], Tensor]] = {
        "asked again": lambda: ask(scenes, rows).value,
        "in reverse order": lambda: ask(scenes.flip(0), rows[::-1]).value.flip(0),
    }
    if copies == 1:
        ways["one by one"] = lambda: torch.cat([ask(scenes[[r]], [r]).value for r in rows])
    first = answers["its prompt"]
    if not bool(first.valid.any()):
        return findings, cost
    for way, call in ways.items():
        gaps = (call() - first.value)[first.valid].abs().tolist()
        scale = max(first.value[first.valid].abs().tolist(), default=1.0)
        worst = max(gaps, default=0.0)
        same = worst <= TOLERANCE * max(scale, TOLERANCE)
        findings.append((ok if same else fault)(f"{way}: differs by at most {worst:.2g}"))
    return findings, cost


def suited(
    name: str, options: Mapping[str, Any], count: int, sources: Sequence[str]
) -> list[PromptBatch]:
    """Those of these prompt sets that the reward says it can score; UnsuitedError for none."""
    batches, problem = [], None
    for source in sources:
        batch = load_prompts(source, "doctor")
        batch = batch.select(range(0, len(batch), max(1, len(batch) // count))[:count])
        try:
            rewards.check_prompts(name, options, batch.prompts, batch.metadata)
        except ValueError as error:
            problem = error
        else:
            batches.append(batch)
    if not batches:
        listed = ", ".join(sources)
        raise UnsuitedError(f"the prompts of {listed} do not suit reward {name!r}: {problem}")
    return batches


def _scenes(rows: Metadata, size: int | None) -> Tensor:
    """[B,3,H,W]: the scenes of these rows; any of the tiny world where the rows describe none."""
    try:
        scenes = rendered(rows, seed=0)
    except ValueError:
        others = load_prompts(PROBES[0], "doctor").metadata
        scenes = rendered([others[row % len(others)] for row in range(len(rows))], seed=0)
    if size is not None:
        shape = (size, size)
        scenes = torch.nn.functional.interpolate(scenes, shape, mode="bicubic").clamp(0, 1)
    return scenes


def _pictures(folder: Path, count: int, side: int) -> Tensor:
    """[B,3,side,side]: the middle of the first pictures of a folder."""
    files = image_files(folder)[:count]
    if not files:
        raise ValueError(f"--images: there are no images in a folder {folder}.")
    return stacked([ImageOps.fit(read_image(file), (side, side)) for file in files])


def _range(what: str, values: Tensor) -> list[Finding]:
    """What the valid scores of some images are; none without any."""
    if not len(values):
        return []
    low, middle, high = values.float().cpu().quantile(torch.tensor([0.0, 0.5, 1.0])).tolist()
    return [ok(f"{what}: {low:.4g} to {high:.4g}, median {middle:.4g}")]


def _memory() -> str:
    """Peak MiB so far: of this process, and of the GPU where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, else KiB
    text = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB of RAM"
    if torch.cuda.is_available():
        text += f" and {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB of the GPU"
    return text


def _ranges(answers: Mapping[str, Scores]) -> Iterator[Finding]:
    """The scores of each kind of probe. Are there any, do they differ, does the prompt matter?"""
    failed = {kind: int((~scores.valid).sum()) for kind, scores in answers.items()}
    valid = {kind: s.value[s.valid].float().cpu() for kind, s in answers.items()}
    for kind, values in valid.items():
        yield from _range(f"scenes with {kind}", values)
    if any(failed.values()):
        reason = next(text for scores in answers.values() for text in scores.failures.values())
        count = sum(len(scores.value) for scores in answers.values())
        level = "fault" if failed["its prompt"] else "note"
        yield Finding(level, f"failed on {sum(failed.values())} of {count} images: {reason}")
    values = torch.cat(list(valid.values())).tolist()
    if values and max(values) - min(values) <= TOLERANCE * max(map(abs, values)):
        yield fault(f"constant: every image scores {values[0]:.4g}, so nothing can be learned")
    if len(valid["its prompt"]) and len(valid["another prompt"]):
        gap = float(valid["its prompt"].mean() - valid["another prompt"].mean())
        text = f"a scene scores {gap:+.4g} more with its own prompt than with another one"
        yield (ok if gap > 0 else note)(text)
    medians = {kind: float(values.median()) for kind, values in valid.items() if len(values)}
    for kind in ("noise", "grey"):
        if medians.get(kind, -math.inf) > medians.get("its prompt", math.inf):
            yield note(f"{kind} scores more than scenes: alone, this reward may be hacked so")
