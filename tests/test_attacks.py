"""Kills and endurance: small runs of every stage, a recipe and an evaluation, in processes.

A run that nobody disturbs comes first. The same run is then killed by SIGKILL just before an
operation on a file, in one of its processes, and continued by the same command (a training stage
with --resume). It must end with the files of the first, to the byte, but for what `plain` leaves
out. An audit hook (PEP 578) sees the operations, so nothing is mocked; files that C++ or Rust code
writes are not seen.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
import forked
import psutil
import pytest

from flowalign.commands import cli
from flowalign.config import parse
from flowalign.config.safe_yaml import dump_yaml, load_yaml
from flowalign.system.files import read_lines
from flowalign.types import Scores

pytestmark = pytest.mark.long

KILLED_RUNS = 3  # of a scenario
KILLS = 2  # of a run, at most
OUT = "out"  # the run's folder, below the one that it is started in


# The run that is attacked ------------------------------------------------------------------------

REMOVAL = ("os.remove", "os.rmdir", "shutil.rmtree")
EVENTS = {"open", "os.rename", "os.mkdir", "os.truncate", *REMOVAL}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NUMBER = re.compile(r"[0-9a-f]{12}(?=\.(?:part|old))|\d+")


def measured_redness(images: Any, prompts: Sequence[str], metadata: Any) -> Scores:
    """Adds a line about its own process to usage.jsonl."""
    process = psutil.Process()
    row = {"memory": process.memory_info().rss, "files": process.num_fds()}
    row |= {"threads": process.num_threads(), "children": len(process.children())}
    with open("usage.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    return fakes.redness(images, prompts, metadata)


def place_of(event: str, args: tuple[Any, ...], folder: Path) -> str:
    """The operation and the file of an audit event, without numbers; "" for what does not write
    below the folder."""
    path, *rest = args
    if event == "open" and not (isinstance(rest[1], int) and rest[1] & WRITING):
        return ""
    if not isinstance(path, str | bytes | os.PathLike):
        return ""
    path, beside = os.fsdecode(path), rest[-1] if event in REMOVAL else None
    if isinstance(beside, int) and beside >= 0:  # relative to an open folder
        path = os.path.join(os.readlink(f"/proc/self/fd/{beside}"), path)
    below = os.path.relpath(os.path.abspath(path), folder)
    return "" if below.startswith("..") else f"{event} {NUMBER.sub('#', below)}"


def victim(folder: str, fatal: str, *argv: str) -> int:
    """In a process of its own: `flowalign ARGV` in a folder. Its operations go to trail.RANK.
    Before the one that `fatal` names, as RANK:NUMBER, it is killed."""
    os.chdir(folder)
    rank, out, count = os.environ.get("RANK", "0"), Path(OUT).absolute(), 0
    trail = os.open(f"trail.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and (place := place_of(event, args, out)):
            if fatal == f"{rank}:{count}":
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            os.write(trail, f"{place}\n".encode())

    sys.addaudithook(watch)
    return cli.main(argv)


# Scenarios ---------------------------------------------------------------------------------------


UPDATES = ["train.checkpoint_every=1", "train.keep=2", "train.sample_every=2", "rollout.steps=3",
           "rollout.group_size=2", "evaluation={every: 2, prompts: 2}",
           "alarm={every: 2}"]  # fmt: skip
NOISY = {"name": "fakes:noisy_redness"}  # it draws from the global generators


def training(kind: str, base: Path, *overrides: str) -> dict[str, Any]:
    """A run of five updates with a checkpoint each, of which two are kept."""
    given = ["train.updates=5", *UPDATES, *overrides]
    make = fakes.settings if kind == "grpo" else functools.partial(fakes.distillation, stage=kind)
    config = make(str(base / "model"), base / "run").model_dump(mode="json")
    for task in config["tasks"]:
        task |= {"validation": str(base / "prompts.txt"), "reward": NOISY}
    return parse(config | {"output": OUT}, given).model_dump(mode="json")


def merge(base: Path) -> dict[str, Any]:
    """The two teachers."""
    model = training("grpo", base)["model"]
    adapters = [str(base / "even"), str(base / "odd")]
    return {"stage": "merge", "output": f"{OUT}/merge", "model": model, "adapters": adapters}


def evaluation(base: Path) -> dict[str, Any]:
    """The base and the two teachers on eight prompts, with all images and texts kept."""
    models = {"base": None, "even": str(base / "even"), "odd": str(base / "odd")}
    path = fakes.evaluation(
        str(base / "model"), base, fakes.PROMPTS, models=models, keep_images=True, output=OUT
    )
    config = load_yaml(path.read_text())
    config["model"]["text_cache"] = "texts"
    return config


def recipe(base: Path) -> dict[str, Any]:
    """A teacher, a merge that holds it, a student, and a table."""
    few = ["train.updates=2", "train.keep=1"]
    stages = {
        "teacher": training("grpo", base, *few),
        "merged": merge(base) | {"adapters": ["stage:teacher", str(base / "odd")]},
        "student": training("opd", base, *few) | {"lora": {"init": "stage:merged"}},
        "table": evaluation(base) | {"models": {"base": None, "student": "stage:student"}},
    }
    for stage in stages.values():
        del stage["output"], stage["model"]
    return {"stage": "recipe", "output": OUT, "model": merge(base)["model"], "stages": stages}


CONFIGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{kind: functools.partial(training, kind) for kind in ("grpo", "opd", "sft")},
    "merge": merge, "eval": evaluation, "recipe": recipe,
}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A kind of run on so many processes, below `base`."""

    base: Path
    kind: str
    processes: int = 1

    @property
    def whole(self) -> Path:
        """Where the run that nobody disturbs lies."""
        return self.base / f"{self.kind}_{self.processes}" / "whole"

    def run(self, folder: Path, again: bool, fatal: str = "") -> subprocess.CompletedProcess[str]:
        """Its command in a folder; again: to continue."""
        folder.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if again and self.kind in ("grpo", "opd", "sft") else []
        command = "eval" if self.kind == "eval" else "train"
        words = [__file__, folder, fatal, command, "--config", "../config.yaml", *resume]
        if self.processes == 1:
            return forked.run(*words, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return forked.launch(*words, processes=self.processes)

    def prepare(self) -> list[list[str]]:
        """Run it undisturbed, once -> the places of each rank, in order."""
        if not self.whole.exists():
            self.whole.mkdir(parents=True)
            config = dump_yaml(CONFIGS[self.kind](self.base))
            (self.whole.parent / "config.yaml").write_text(config)
            done = self.run(self.whole, again=False)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        ranks = range(self.processes)
        return [(self.whole / f"trail.{rank}").read_text().splitlines() for rank in ranks]


@pytest.fixture(scope="module")
def base(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two adapters."""
    folder = tmp_path_factory.mktemp("attacks")
    shutil.copytree(random_model, folder / "model")
    fakes.teachers(str(folder / "model"), folder)
    return folder


# Kills -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "processes"),
    [(kind, count) for kind in CONFIGS for count in (1, 2) if (kind, count) != ("merge", 2)],
)
def test_a_killed_run_ends_as_the_undisturbed_one(base: Path, kind: str, processes: int) -> None:
    scenario, rng = Scenario(base, kind, processes), random.Random(f"{kind}_{processes}")
    trails = scenario.prepare()

    def chosen() -> str:
        """An operation on a file, each file with the same chance."""
        rank, place = rng.choice(sorted({(r, p) for r, ps in enumerate(trails) for p in ps}))
        return f"{rank}:{rng.choice([n for n, other in enumerate(trails[rank]) if other == place])}"

    for number in range(KILLED_RUNS):
        folder = scenario.whole.parent / f"killed_{number}"
        orders = [*(chosen() for _ in range(KILLS)), ""]
        codes = []
        for again, fatal in enumerate(orders):
            done = scenario.run(folder, again > 0, fatal)
            codes.append(done.returncode)
            if not done.returncode:  # a continued run may end before that operation
                break
        assert codes[0] and not codes[-1], f"{orders}: {codes}: {done.stderr[-3000:]}"
        found = list(differences(scenario.whole / OUT, folder / OUT))
        assert not found, f"{orders}: {found}"


# What grows --------------------------------------------------------------------------------------


def test_nothing_grows(base: Path, tmp_path: Path) -> None:
    """Open files, threads and children of the last quarter are those of the second; memory grows by
    less than 5 %."""
    given = ["train.updates=400", "train.trackers=[tensorboard]"]
    config = training("grpo", base, *given, "tasks.0.reward.name=test_attacks:measured_redness")
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    words = [__file__, tmp_path, "", "train", "--config", "config.yaml"]
    done = forked.run(*words, env={**os.environ, "OMP_NUM_THREADS": "1"}, seconds=7200)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_lines(tmp_path / "usage.jsonl")
    early, late = rows[len(rows) // 4 : len(rows) // 2], rows[-len(rows) // 4 :]
    for what in rows[0]:
        before, after = (statistics.median(row[what] for row in some) for some in (early, late))
        assert after <= before * (1.05 if what == "memory" else 1), what


# Two runs, compared ------------------------------------------------------------------------------

TIMES = re.compile("seconds/.*|images_per_second")  # how fast the machine was
PASSING = re.compile(  # what passes, in the page of a run
    rb"written [\d: -]+\.|<dt>images per second</dt><dd>[^<]*</dd>"
    rb"|<h2>Warnings</h2>.*?</table></div>", re.DOTALL,
)  # fmt: skip


def differences(expected: Path, found: Path) -> Iterator[str]:
    """A line for each file that differs, or is in one folder only."""
    names = {p.relative_to(f).as_posix() for f in (expected, found) for p in f.rglob("*")}
    for name in sorted(names):
        a, b = expected / name, found / name
        if re.fullmatch(r"rows\.\d+\.jsonl", a.name):  # a continued evaluation shares the rest anew
            rows = ([*map(Path.read_text, sorted(p.parent.glob("rows.*.jsonl")))] for p in (a, b))
            one, other = (sorted("".join(texts).splitlines()) for texts in rows)
        elif a.exists() != b.exists():
            yield f"{name}: {'missing' if a.exists() else 'too much'}"
            continue
        elif a.is_dir():
            continue
        elif a.name == "warnings.jsonl":  # updates that were repeated warn again
            one, other = ({row["text"] for row in read_lines(path)} for path in (a, b))
            other &= one
        else:
            one, other = plain(a), plain(b)
        if one != other:
            yield f"{name}: differs"


def plain(path: Path) -> object:
    """What a file holds, without what need not be equal."""
    content = path.read_bytes()
    if path.name == "metrics.jsonl":  # repr: NaN equals itself
        rows = read_lines(path)
        return [repr({k: v for k, v in row.items() if not TIMES.fullmatch(k)}) for row in rows]
    if path.name in ("manifest.json", "done.json"):  # the digests of itself, and of such files
        row = json.loads(content)
        own = ("metrics.jsonl", "manifest.json")
        row["files"] = {k: None if k.endswith(own) else v for k, v in row["files"].items()}
        return {k: v for k, v in row.items() if k != "sha256"}
    if path.name == "README.md":  # the command that it cites: with --resume, or without
        return re.sub(rb"\n +(?:flowalign|accelerate launch) [^\n]*", b"", content)
    return PASSING.sub(b"", content) if path.name == "report.html" else content


if __name__ == "__main__":
    sys.exit(victim(*sys.argv[1:]))
