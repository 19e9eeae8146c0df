"""What the folder of a run holds, and whether a run may start there or go on.

Nothing here needs a model: manifests and hashes tell, so a run is refused in a moment. Only folders
named update_NNNNNN whose manifest agrees with their files count as checkpoints.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowalign.backbone.adapters import file_digest
from flowalign.config import ConfigError, TrainingStage
from flowalign.config.loading import load, parse
from flowalign.system import manifest
from flowalign.system.files import read_lines, replacing
from flowalign.system.manifest import Damaged
from flowalign.training import metrics
from flowalign.training.report.status import WARNINGS, read_status

CHECKPOINTS = "checkpoints"  # below the folder of a run
LOG = "metrics.jsonl"  # of a run; each checkpoint has a copy
SAMPLES = "samples"
SAMPLE = re.compile(r"[a-z_]+_(\d{6,})\.\w+")  # update_000020.png, held_out_000020.json
NAME = re.compile(r"update_(\d{6,})")
# what a resumed run may change, such as train.updates
FREE = {"train", "evaluation", "alarm", "output"}
DELETE = "Delete the folder to start again, or choose another `output`."


def name_of(update: int) -> str:
    """The name of a checkpoint. Six digits: names sort as numbers."""
    return f"update_{update:06d}"


def update_of(folder: Path) -> int:
    """The number in the name of a checkpoint; -1 for a folder that is not named as one."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def checkpoints(run: Path) -> list[Path]:
    """The folders of a run that are named as checkpoints, sound or not, oldest first."""
    folders = [path for path in (run / CHECKPOINTS).glob("update_*") if update_of(path) >= 0]
    return sorted((path for path in folders if path.is_dir()), key=update_of)


def identity(config: TrainingStage) -> dict[str, Any]:
    """What a checkpoint of this run says of itself: its config, the version of flowalign, and the
    digests of the adapters that it reads, by their key in the config."""
    from flowalign import __version__

    return {
        "config": config.model_dump(mode="json"),
        "version": __version__,
        "inputs": {key: file_digest(source) for key, source in config.inputs.items()},
    }


@dataclass(frozen=True)
class Resumable:
    """The newest checkpoint that a run can go on from. folder: None = there is none. about: what it
    says of itself. skipped: {newer folder: why it cannot be used}. other: the keys of the config
    that differ, where a checkpoint is sound and of another config."""

    folder: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[Path, str] = field(default_factory=dict)
    other: tuple[str, ...] = ()


def newest(run: Path, config: TrainingStage) -> Resumable:
    """Look for it from the newest folder to the oldest, every byte of each."""
    skipped: dict[Path, str] = {}
    other: list[str] = []
    for folder in reversed(checkpoints(run)):
        try:
            about = manifest.check_manifest(folder).about
        except Damaged as error:
            skipped[folder] = str(error)
            if not (folder / manifest.MANIFEST).exists() and any(folder.iterdir()):
                skipped[folder] += " (cut short, or written by an earlier version of flowalign)"
            continue
        changed = _changed(config, about.get("config"))
        if about.get("update") != update_of(folder):
            skipped[folder] = f"it is a copy of update {about.get('update')}"
        elif changed:
            skipped[folder] = f"it is of another config ({', '.join(changed)})"
            other = other or changed
        else:
            return Resumable(folder, about, skipped)
    return Resumable(skipped=skipped, other=tuple(other))


def _changed(config: TrainingStage, saved: object) -> list[str]:
    """The sections of a saved config in which the run's differs, but for those in FREE."""
    free = {key: value for key, value in config.model_dump(mode="json").items() if key in FREE}
    try:
        old = parse({**saved, **free} if isinstance(saved, dict) else saved, source="checkpoint")
    except ConfigError:
        return ["unreadable"]
    old, new = old.model_dump(exclude=FREE), config.model_dump(exclude=FREE)
    return sorted(key for key in new.keys() | old if new.get(key) != old.get(key))


# Whether a run may start, or go on ---------------------------------------------------------------


def problems(
    config: TrainingStage,
    processes: int,
    *,
    resume: bool,
    any_world: bool = False,
    pending: Collection[str] = (),
) -> Iterator[str]:
    """What the output folder says against this run. resume: whether it is to go on there.
    any_world: with any number of processes. pending: adapters that an earlier stage of a recipe
    will write."""
    run = Path(config.output)
    if not checkpoints(run):
        yield from _unfinished(run, config, resume)
    elif not resume:
        yield (
            f"output: {run} holds the checkpoints of a run. Continue it with --resume, "
            "choose another `output`, or delete the folder."
        )
    else:
        saved = newest(run, config)
        yield from conflicts(config, saved, processes, any_world=any_world, pending=pending)


def conflicts(
    config: TrainingStage,
    saved: Resumable,
    processes: int,
    *,
    any_world: bool,
    pending: Collection[str] = (),
) -> Iterator[str]:
    """What keeps a run from going on from a saved checkpoint."""
    if saved.folder is None:
        yield refusal(Path(config.output), saved)
        return
    for key, source in config.inputs.items():
        now = None if source in pending else file_digest(source)  # None: others complain
        if now is not None and now != saved.about["inputs"].get(key):
            yield (
                f"{key}: {source!r} has changed since {saved.folder} was written. Put the "
                "adapter of that time back, or choose another `output` to start with this one."
            )
    if not any_world and (text := another_world(saved, processes)):
        yield (
            f"--resume: {text} Start as many processes as before, or accept that with "
            "--allow-world-change."
        )


def warnings(saved: Resumable, identity: Mapping[str, Any]) -> Iterator[str]:
    """What a run says as it goes on. identity: of the run, with its number of processes."""
    assert saved.folder
    for path, reason in saved.skipped.items():
        yield f"--resume: {path} is not used: {reason}. The run continues from {saved.folder.name}."
    if text := another_world(saved, identity["processes"]):
        yield f"--allow-world-change: {text}"
    if (before := saved.about["version"]) != identity["version"]:
        yield (
            f"--resume: {saved.folder} was written by flowalign {before}, and this is "
            f"{identity['version']}: the numbers may differ from those of one version."
        )


def refusal(run: Path, saved: Resumable) -> str:
    """Why no checkpoint of a run can be used."""
    if saved.other:
        return (
            f"--resume: {', '.join(saved.other)} differ from the run in {run}. A resumed run keeps "
            "its config (but for train and evaluation); undo the change or choose another `output`."
        )
    listed = "; ".join(f"{path.name}: {reason}" for path, reason in saved.skipped.items())
    return (
        f"--resume: no checkpoint in {run / CHECKPOINTS} can be used ({listed}). Put a sound copy "
        f"of one back. {DELETE}"
    )


def another_world(saved: Resumable, processes: int) -> str:
    """What is no longer exact if so many processes go on from a checkpoint; "" if as many wrote
    it."""
    before = saved.about["processes"]
    if before == processes:
        return ""
    return (
        f"{saved.folder} was written by a run of {before} process(es), and there are {processes} "
        "now: prompts and noise stay the same, but gradients are summed in another order, so that "
        "the last digits differ, and rewards that draw random numbers draw others."
    )


def _unfinished(run: Path, config: TrainingStage, resume: bool) -> Iterator[str]:
    """Of a folder without checkpoints: a log that is not that of a run of this config which ended
    before its first checkpoint."""
    log, key = run / LOG, "--resume" if resume else "output"
    updates = [n for row in read_lines(log) if isinstance(n := row.get(metrics.UPDATE), int)]
    if not updates:
        if (run / "adapter").exists():
            yield f"{key}: {run / 'adapter'} is there, and no log of its run. {DELETE}"
        return
    try:
        old = load(run / "config.yaml")
    except (ConfigError, OSError, ValueError):
        yield (
            f"{key}: {log} is the log of a run, and no config.yaml beside it tells of which. "
            f"{DELETE}"
        )
        return
    if changed := _changed(config, old.model_dump(mode="json")):
        yield (
            f"{key}: {', '.join(changed)} differ from {run / 'config.yaml'}, whose log and adapter "
            f"are there. {DELETE}"
        )
    elif max(updates) > old.train.checkpoint_every or _finished(run):
        yield (
            f"{key}: {log} goes to update {max(updates)}, and there is no checkpoint. Put them "
            f"back if they were deleted. {DELETE}"
        )


def _finished(run: Path) -> bool:
    status = read_status(run)
    return status is not None and status.state == "finished"


def why_no_checkpoint(run: Path) -> str:
    """Why --resume starts from the first update, "" if there is a checkpoint."""
    if checkpoints(run):
        return ""
    return f"--resume: no checkpoint in {run / CHECKPOINTS}. The run starts from its first update."


# What a run has written of itself ----------------------------------------------------------------


def truncate_to(run: Path, checkpoint: Path, update: int, evaluated: int) -> None:
    """Make log, samples and warnings those of a run that has just written this checkpoint. update,
    evaluated: rollouts done, and done at the last evaluation that counted; a later one is taken
    again."""
    for path in (run / SAMPLES).glob("*"):
        if (match := SAMPLE.fullmatch(path.name)) and int(match[1]) > update:
            path.unlink()
    warned = [row for row in read_lines(run / WARNINGS) if row.get("update", 0) <= update]
    if (run / WARNINGS).exists():
        _write_lines(run / WARNINGS, warned)
    rows = read_lines(checkpoint / LOG)
    _write_lines(run / LOG, [row for row in rows if not _comes_again(row, evaluated)])


def _comes_again(row: Mapping[str, Any], evaluated: int) -> bool:
    """Whether a line of the log is of an evaluation that is taken again."""
    later = row.get(metrics.UPDATE, 0) > evaluated
    return later and any(name.startswith(metrics.EVAL) for name in row)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    with replacing(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def clear_run(run: Path) -> None:
    """Remove what a run left that ended before its first checkpoint, so that it starts again. The
    log goes last: it tells whose the rest is, should this be killed."""
    for name in (SAMPLES, "adapter"):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in (WARNINGS, LOG):
        (run / name).unlink(missing_ok=True)
