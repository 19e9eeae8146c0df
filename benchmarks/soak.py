"""Trains without a pause and measures what grows: `python benchmarks/soak.py --minutes 60`.

Three processes run side by side on the tiny model. `recipes`: one process that runs a recipe of all
stages (grpo, sft, merge, opd, eval) over and over. `long`: one run whose end never comes, with
evaluations, samples, checkpoints and a tracker, and with a reward that the third process, `server`,
serves over HTTP. Every few seconds a line for each goes to FOLDER/samples.jsonl: memory, open
files, threads, children, and bytes on the disk.

The slopes are of least squares over means of a twelfth of the time each, without the first quarter,
in which caches fill. `--report` prints them again, also while it runs. Exit status: 0 no process
ended by itself and nothing grows beyond noise by 1 % an hour or more, 1 not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from flowalign.system.files import read_lines

MODEL = {"id": "tiny", "height": 64, "width": 64, "max_sequence_length": 16}
GENEVAL = {"name": "geneval", "options": {"detector": "tiny", "reward": "official"}}
TASK = {"name": "geneval", "prompts": "tiny/geneval_train", "validation": "tiny/geneval_val"}
EVERY = 5.0  # seconds between two samples
WARM = 0.25  # share of the time that is left out
BLOCKS = 12  # means of the rest
SURE = 3.0  # standard errors within which a slope is noise
SMALL = 0.01  # of the mean: a change an hour that is real, perhaps, and no matter
GROWS = "GROWS"
# What a run adds a line to at each update, by design.
GROWING = ("metrics.jsonl", "tensorboard")
UNITS = {
    "memory": ("MB", 2.0**20), "files": ("", 1), "threads": ("", 1), "children": ("", 1),
    "disk": ("MB", 2.0**20), "logs": ("MB", 2.0**20),
}  # fmt: skip
"""{what is sampled: (unit, its size)}. logs: the bytes of GROWING; disk: all others."""


# What runs ---------------------------------------------------------------------------------------


def training(stage: str, task: Mapping[str, Any], updates: int, **keys: Any) -> dict[str, Any]:
    """A small run of a stage."""
    return {
        "stage": stage, "model": MODEL, "tasks": [dict(task)], "lora": {"rank": 4, "alpha": 8},
        "rollout": {"steps": 4, "guidance": 1.0, "prompts": 2, "copies": 4, "batch_size": 8},
        "optimizer": {"lr": 1e-4, "micro_batch": 8}, "ema": {"decay": 0.9, "every": 1},
        "train": {"updates": updates, "checkpoint_every": 2, "keep": 2, "sample_every": 2,
                  "keep_samples": 5, "trackers": ["tensorboard"]},
        "evaluation": {"every": 2, "prompts": 8}, **keys,
    }  # fmt: skip


def recipe(folder: Path) -> dict[str, Any]:
    """All stages, each with a reward that scores beside the sampling."""
    task, taught = {**TASK, "reward": GENEVAL}, {"teachers": {"geneval": {"adapter": "stage:a"}}}
    pick = {"name": "pick", "prompts": "tiny/preference_test", "limit": 8,
            "reward": {"name": "pickscore", "options": {"model": "tiny"}}}  # fmt: skip
    models = {"base": None, "a": "stage:a", "d": "stage:d"}
    stages = {
        "a": training("grpo", task, 4),
        "b": training("sft", task, 4, **taught),
        "c": {"stage": "merge", "adapters": ["stage:a", "stage:b"]},
        "d": training("opd", task, 4, **taught | {"lora": {"init": "stage:c"}}),
        "e": {"stage": "eval", "models": models, "benchmarks": [pick], "keep_images": True,
              "sampling": {"steps": 4, "guidance": 1.0}},
    }  # fmt: skip
    for keys in stages.values():
        keys.pop("model", None)
    return {"stage": "recipe", "output": str(folder / "run"), "model": MODEL, "stages": stages}


def long_run(folder: Path, url: str) -> dict[str, Any]:
    """A run that does not end, with a remote reward."""
    remote = {"name": "remote", "options": {"urls": url}}
    return training("grpo", {**TASK, "reward": remote}, 10**6, output=str(folder / "run"))


def work(folder: Path) -> int:
    """In a process of its own: run the config in a folder, and a recipe again and again."""
    from flowalign.commands.train import main

    config = yaml.safe_load((folder / "config.yaml").read_text())
    for number in itertools.count(1):
        if status := main(["--config", str(folder / "config.yaml")]):
            return status
        print(f"soak: {number} done", flush=True)
        shutil.rmtree(config["output"])
    return 0


def started(base: Path) -> dict[str, psutil.Popen]:
    """The processes by name, each with a folder of its name below `base`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    serve = [
        "flowalign.commands.cli",
        "serve-reward",
        "geneval",
        "--port",
        str(port),
        "detector=tiny",
    ]
    processes = {"server": _start(base / "server", ["-m", *serve])}
    for name in ("recipes", "long"):
        folder = base / name
        url = f"http://127.0.0.1:{port}"
        config = recipe(folder) if name == "recipes" else long_run(folder, url)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        processes[name] = _start(folder, [__file__, "--work", str(folder)])
        while name == "recipes" and not _listens(port):
            time.sleep(0.2)
    return processes


def _start(folder: Path, argv: Sequence[str]) -> psutil.Popen:
    shutil.rmtree(folder / "run", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log", "ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return psutil.Popen(
            [sys.executable, *argv], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


# Samples -----------------------------------------------------------------------------------------


def sample(name: str, process: psutil.Popen, folder: Path) -> dict[str, Any]:
    """A line of samples.jsonl."""
    disk = {False: 0, True: 0}
    for parent, _, names in os.walk(folder / "run"):
        for path in (Path(parent, name) for name in names):
            with suppress(OSError):  # it has just been removed
                growing = not set(GROWING).isdisjoint(path.parts)
                disk[growing] += path.lstat().st_size
    with process.oneshot():
        return {
            "time": time.time(),
            "name": name,
            "memory": process.memory_info().rss,
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "children": len(process.children(recursive=True)),
            "disk": disk[False],
            "logs": disk[True],
        }


def soak(base: Path, minutes: float) -> dict[str, int | None]:
    """Let the processes run, and sample them -> {name: exit status of those that ended}."""
    (base / "samples.jsonl").unlink(missing_ok=True)
    processes = started(base)
    over = time.monotonic() + 60 * minutes
    try:
        with open(base / "samples.jsonl", "a") as file:
            while time.monotonic() < over and all(p.poll() is None for p in processes.values()):
                for name, process in processes.items():
                    with suppress(psutil.Error):
                        file.write(json.dumps(sample(name, process, base / name)) + "\n")
                file.flush()
                time.sleep(EVERY)
        return {name: process.poll() for name, process in processes.items()}
    finally:
        for process in processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# Slopes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """Change an hour, with its standard error."""

    name: str
    what: str
    mean: float
    slope: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether it is within noise."""
        return abs(self.slope) <= SURE * self.error or self.slope == 0

    def row(self) -> str:
        """Of the table."""
        unit, size = UNITS[self.what]
        mean, slope, error = (f"{v / size:.4g}" for v in (self.mean, self.slope, self.error))
        what = f"{self.what} ({unit})" if unit else self.what
        return f"| {self.name} | {what} | {mean} | {slope} | {error} | {self.verdict} |"

    @property
    def verdict(self) -> str:
        """What the slope means."""
        if self.what == "logs":
            return "by design"
        if self.flat:
            return "within noise"
        if abs(self.slope) < SMALL * self.mean:
            return f"under {SMALL:.0%} an hour"
        return GROWS if self.slope > 0 else "falls"


def slopes(rows: Sequence[Mapping[str, Any]]) -> Iterator[Slope]:
    """Of each process and each thing that is sampled."""
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        own = own[int(WARM * len(own)) :]
        size = len(own) // BLOCKS
        if not size:
            continue
        blocks = [own[i * size : (i + 1) * size] for i in range(BLOCKS)]
        hours = [statistics.fmean(row["time"] for row in block) / 3600 for block in blocks]
        for what in UNITS:
            means = [statistics.fmean(row[what] for row in block) for block in blocks]
            yield Slope(name, what, statistics.fmean(means), *_line(hours, means))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of least squares, and its standard error."""
    slope, start = statistics.linear_regression(x, y)
    rest = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    return slope, math.sqrt(rest / (len(x) - 2) / spread)


def report(base: Path) -> bool:
    """Print the table -> whether nothing is seen to grow that should not."""
    rows = read_lines(base / "samples.jsonl")
    found = list(slopes(rows))
    if not found:
        print(f"{len(rows)} samples in {base}: too few for a slope")
        return True
    minutes = (rows[-1]["time"] - rows[0]["time"]) / 60
    recipes = (base / "recipes" / "log").read_text(errors="replace").count("soak: ")
    updates = [row["update"] for row in read_lines(base / "long" / "run" / "metrics.jsonl")]
    print(f"\n{minutes:.0f} min: {recipes} recipes; {max(updates, default=0)} updates of one run\n")
    print("| process | what | mean | slope an hour | standard error | |\n|---|---|---|---|---|---|")
    for slope in found:
        print(slope.row())
    return not any(slope.verdict == GROWS for slope in found)


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="default: a temporary one, which is named")
    parser.add_argument("--report", action="store_true", help="of what is in the folder, only")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work)
    base = (args.folder or Path(tempfile.mkdtemp(prefix="soak_"))).resolve()
    base.mkdir(parents=True, exist_ok=True)
    ended: dict[str, int | None] = {}
    if not args.report:
        print(f"{base}: samples.jsonl grows; `--report --folder {base}` tells", flush=True)
        ended = soak(base, args.minutes)
        for name, status in ended.items():
            if status is not None:
                log = (base / name / "log").read_text(errors="replace")
                print(f"{name} ended by itself with status {status}:\n{log[-2000:]}")
    return int(not report(base) or any(status is not None for status in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
