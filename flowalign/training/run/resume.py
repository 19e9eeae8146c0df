"""The state of a run's folder, and whether a run may start there or resume.

No model is needed: manifests and hashes suffice, so a run is refused within a moment. Only folders
named update_NNNNNN whose manifest matches their files count as checkpoints.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign import __version__
from flowalign.backbone.adapters import file_digest
from flowalign.config import ConfigError, Stage, TrainingStage
from flowalign.config.loading import parse
from flowalign.rewards import RewardSpec
from flowalign.system import manifest
from flowalign.system.files import read_lines, replacing
from flowalign.system.folder import RunFolder
from flowalign.system.manifest import Damaged
from flowalign.training import metrics
from flowalign.types import Problem

SAMPLE_NAME = re.compile(r"[a-z_]+_(\d{6,})\.\w+")  # update_000020.png, held_out_000020.json
CHECKPOINT_NAME = re.compile(r"update_(\d{6,})")
# what a resumed run may change, such as train.updates
FREE = {"train", "evaluation", "alarm", "output"}
DELETE = "Delete the folder to start again, or choose another `output`."


def update_of(folder: Path) -> int:
    """The number in the name of a checkpoint; -1 for a folder that is not named as one."""
    match = CHECKPOINT_NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def checkpoints(run: Path) -> list[Path]:
    """The folders of a run that are named as checkpoints, sound or not, oldest first."""
    folders = [path for path in RunFolder(run).checkpoints.glob("update_*") if update_of(path) >= 0]
    return sorted((path for path in folders if path.is_dir()), key=update_of)


def identity(config: TrainingStage) -> dict[str, Any]:
    """The identity of a run that its checkpoints record: config, version of flowalign, and the
    digests of its adapters and of its rewards' code, by config key."""
    return {
        "config": config.model_dump(mode="json"),
        "version": __version__,
        "inputs": {key: file_digest(source) for key, source in config.inputs.items()},
        "rewards": rewards_code(config),
    }


def rewards_code(config: Stage) -> dict[str, dict[str, str]]:
    """{config key: `RewardSpec.code_digests`} for the rewards of training and evaluation, and for a
    custom advantage."""
    keys = {f"{j.place}.{k}": reward for j in config.judged for k, reward in j.rewards.items()}
    codes = {}
    for key, reward in keys.items():
        if key.startswith(("tasks.", "benchmarks.")):
            codes[key] = RewardSpec(reward.name, reward.options).code_digests
    if config.credited and ":" in (path := config.credited.advantage):
        codes[f"{config.stage}.advantage"] = RewardSpec(path).code_digests
    return codes


def changed_rewards(config: Stage, about: Mapping[str, Any]) -> list[Problem]:
    """The rewards whose code differs from a manifest, with the names of what changed. [] for an
    older manifest, which has no digests."""
    problems = []
    then = about.get("rewards", {})
    for key, now in rewards_code(config).items():
        was = then.get(key, now)
        if changed := sorted(name for name in now.keys() | was if now.get(name) != was.get(name)):
            problems.append(Problem(key, f"the code of {', '.join(changed)} has changed"))
    return problems


@dataclass(frozen=True)
class Resumable:
    """The newest checkpoint that a run can resume from. about: its manifest's record. skipped:
    {newer folder: why it cannot be used}."""

    folder: Path
    about: Mapping[str, Any]
    skipped: Mapping[Path, str]


def newest(run: Path, config: TrainingStage) -> Resumable | None:
    """The newest usable checkpoint, with every byte verified; None if there are no checkpoints.
    Raises ConfigError if none can be used."""
    skipped: dict[Path, str] = {}
    other: list[str] = []  # keys of the config that differ in a sound one
    for folder in reversed(checkpoints(run)):
        try:
            about = manifest.check_manifest(folder).about
        except Damaged as error:
            skipped[folder] = str(error)
            continue
        changed = changed_keys(config, about.get("config"))
        if about.get("update") != update_of(folder):
            skipped[folder] = f"it is a copy of update {about.get('update')}"
        elif changed:
            skipped[folder] = f"it is of another config ({', '.join(changed)})"
            other = other or changed
        else:
            return Resumable(folder, about, skipped)
    if other:
        text = (
            f"the run that is there has another config: {', '.join(other)}. A resumed run keeps it "
            "(but for train and evaluation); undo the change or choose another `output`."
        )
        raise ConfigError([Problem("--resume", text)])
    if skipped:
        listed = "; ".join(f"{path}: {reason}" for path, reason in skipped.items())
        text = f"no checkpoint can be used ({listed}). Put a sound one back. {DELETE}"
        raise ConfigError([Problem("--resume", text)])
    return None


def changed_keys(config: TrainingStage, saved: object) -> list[str]:
    """The keys in which a saved config differs from the run's, except those of FREE sections, with
    both values."""
    free = {key: value for key, value in config.model_dump(mode="json").items() if key in FREE}
    try:
        old = parse({**saved, **free} if isinstance(saved, dict) else saved, source="checkpoint")
    except ConfigError:
        return ["unreadable"]
    old, new = old.model_dump(exclude=FREE), config.model_dump(exclude=FREE)
    return sorted(differences(old, new))


def differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """The keys at which two nested values differ, each with its old and new value."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old.keys() | new:
            place = f"{key}.{name}" if key else str(name)
            yield from differences(old.get(name), new.get(name), place)
    elif old != new:
        yield f"{key} (was {old!r}, is {new!r})"


# What a run has written of itself ----------------------------------------------------------------


def truncate_to(run: Path, checkpoint: Path, update: int, evaluated: int) -> None:
    """Set log, samples and warnings back to this checkpoint. update, evaluated: the rollouts done,
    and those done at the last evaluation that counted. Later evaluations are repeated."""
    folder = RunFolder(run)
    for path in folder.samples.glob("*"):
        if (match := SAMPLE_NAME.fullmatch(path.name)) and int(match[1]) > update:
            path.unlink()
    if folder.warnings.exists():
        warned = read_lines(folder.warnings)
        _write_lines(folder.warnings, [row for row in warned if row.get("update", 0) <= update])
    rows = [
        row
        for row in read_lines(RunFolder(checkpoint).log)
        if row.get(metrics.UPDATE, 0) <= evaluated
        or not any(name.startswith(metrics.EVAL) for name in row)
    ]
    _write_lines(folder.log, rows)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    with replacing(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def clear_run(run: Path) -> None:
    """Remove the files of a run that ended before its first checkpoint, so that it can start again.
    The log is removed last, because it identifies the rest if this is interrupted."""
    folder = RunFolder(run)
    shutil.rmtree(folder.samples, ignore_errors=True)
    shutil.rmtree(folder.adapter, ignore_errors=True)
    folder.warnings.unlink(missing_ok=True)
    folder.log.unlink(missing_ok=True)
