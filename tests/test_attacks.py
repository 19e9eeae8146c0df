"""Kills, damage and endurance: small runs of every stage, a recipe and an evaluation, in processes.

A run that nobody disturbs comes first. The same run is then killed by SIGKILL just before (or a
little after) an operation on a file, of two processes all or one, and continued by the same command
(a training stage with --resume); or its files are damaged. It must end with the files of the first,
to the byte, but for `EXCEPTIONS`. An audit hook (PEP 578) sees the operations, so nothing is
mocked; files that C++ or Rust code writes are not seen.

`make test-long` tries a few of each. `ATTACKS=all pytest -m long tests/test_attacks.py` kills at
every operation on every file, and does every harm to every file.
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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import torch
import yaml

from flowalign.commands import cli
from flowalign.system.files import read_lines
from flowalign.types import Scores

pytestmark = pytest.mark.long

ALL = os.environ.get("ATTACKS") == "all"
KILLS = 10**6 if ALL else 6  # of a scenario
IN_A_ROW = 3  # kills of one run, at most
OUT = "out"  # the run's folder, below the one that it is started in
STRUCK = "struck"  # a file beside it: a kill took place
WORDS = ("red", "blue", "green", "grey")
TRAINED = [f'a {colour} sign that says "{text}"' for colour in WORDS for text in "ABCD"]
HELD_OUT = [f'a {colour} cup that says "{text}"' for colour in WORDS for text in "EF"]


# The run that is attacked ------------------------------------------------------------------------

SCORED = "test_attacks.scored"  # raised by the rewards: (whether on held-out prompts)
REMOVAL = ("os.remove", "os.rmdir", "shutil.rmtree")
EVENTS = {"open", "os.rename", "os.mkdir", "os.truncate", SCORED, *REMOVAL}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NUMBER = re.compile(r"[0-9a-f]{12}(?=\.(?:part|old))|\d+")


def redness(images: Any, prompts: Sequence[str], metadata: Any) -> Scores:
    """How much more red than the rest; tells the hook that images are being scored."""
    sys.audit(SCORED, prompts[0] in HELD_OUT)
    red, rest = images[:, 0].mean((1, 2)), images[:, 1:].mean((1, 2, 3))
    return Scores.of(red - rest, red=red)


def noisy_redness(images: Any, prompts: Sequence[str], metadata: Any) -> Scores:
    """The same plus noise of the global generators, which a checkpoint must hold."""
    noise = torch.rand(len(images)) + random.random()
    return Scores.of(redness(images, prompts, metadata).value + 1e-2 * noise)


def measured_redness(images: Any, prompts: Sequence[str], metadata: Any) -> Scores:
    """Adds a line about its own process to usage.jsonl."""
    process = psutil.Process()
    row = {"memory": process.memory_info().rss, "files": process.num_fds()}
    row |= {"threads": process.num_threads(), "children": len(process.children())}
    with open(os.environ["USAGE"], "a") as file:
        file.write(json.dumps(row) + "\n")
    return redness(images, prompts, metadata)


@dataclass(frozen=True)
class Kill:
    """At the nth operation on a place (`place_of`) of a rank, `delay` seconds after it. alone: this
    rank only; else all."""

    place: str
    nth: int = 1
    delay: float = 0.0
    rank: int = 0
    alone: bool = False


def place_of(event: str, args: tuple[Any, ...], folder: Path) -> str:
    """The operation and the file of an audit event, without numbers; "" for what does not write
    below the folder."""
    if event == SCORED:
        return f"scores, held out {args[0]}"
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


def victim(folder: str, order: str, *argv: str) -> int:
    """In a process of its own: `flowalign ARGV` in a folder. Its operations go to trail.RANK."""
    os.chdir(folder)
    rank, kill = os.environ.get("RANK", "0"), Kill(**json.loads(order)) if order else None
    mine, out, count = Path(f"pid.{rank}"), Path(OUT).absolute(), 0
    mine.write_text(str(os.getpid()))
    trail = os.open(f"trail.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def strike() -> None:
        assert kill
        Path(out.parent, STRUCK).touch()
        for file in sorted(out.parent.glob("pid.*"), key=lambda file: file.name == mine.name):
            if file.name == mine.name or not kill.alone:
                with suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in EVENTS or not (place := place_of(event, args, out)):
            return
        os.write(trail, f"{place}\n".encode())
        if kill and kill.place == place and str(kill.rank) == rank:
            count += 1
            if count == kill.nth:
                threading.Timer(kill.delay, strike).start() if kill.delay else strike()

    sys.addaudithook(watch)
    return cli.main(argv)


# Scenarios ---------------------------------------------------------------------------------------


def training(kind: str, base: Path, **changes: Any) -> dict[str, Any]:
    """A run of five updates with a checkpoint each, of which two are kept."""
    task = {
        "prompts": str(base / "prompts.txt"), "validation": str(base / "held_out.txt"),
        "reward": {"name": "test_attacks:noisy_redness"},
    }  # fmt: skip
    config: dict[str, Any] = {
        "stage": kind, "output": OUT, "lora": {"rank": 4, "alpha": 8.0},
        "model": {"id": str(base / "model"), "height": 32, "width": 32, "max_sequence_length": 32},
        "tasks": [{**task, "name": "even"}, {**task, "name": "odd"}],
        "rollout": {"steps": 3, "guidance": 1.0, "prompts": 2, "copies": 2, "batch_size": 4},
        "optimizer": {"lr": 1e-3, "micro_batch": 4}, "ema": {"decay": 0.5, "every": 1},
        "train": {"updates": 5, "checkpoint_every": 1, "keep": 2, "sample_every": 2,
                  "trackers": []},
        "evaluation": {"every": 2, "prompts": 2},
    }  # fmt: skip
    if kind != "grpo":
        config["teachers"] = {name: {"adapter": str(base / name)} for name in ("even", "odd")}
    if kind == "opd":
        config["student"] = {"weighting": "kl", "states": {"select": "all"}}
    return config | changes


def merge(base: Path) -> dict[str, Any]:
    """The two teachers."""
    model = training("grpo", base)["model"]
    adapters = [str(base / "even"), str(base / "odd")]
    return {"stage": "merge", "output": f"{OUT}/merge", "model": model, "adapters": adapters}


def evaluation(base: Path) -> dict[str, Any]:
    """The base and the two teachers on eight prompts, with all images and texts kept."""
    held_out = {"name": "cups", "prompts": str(base / "held_out.txt")}
    return {
        "stage": "eval", "output": OUT,
        "model": training("grpo", base)["model"] | {"text_cache": "texts"},
        "models": {"base": None, "even": str(base / "even"), "odd": str(base / "odd")},
        "benchmarks": [{**held_out, "reward": {"name": "test_attacks:redness"}}],
        "sampling": {"steps": 2, "guidance": 1.0, "batch_size": 2}, "keep_images": True,
    }  # fmt: skip


def recipe(base: Path) -> dict[str, Any]:
    """A teacher, a merge that holds it, a student, and a table."""
    few = {"updates": 2, "checkpoint_every": 1, "keep": 1, "sample_every": 2, "trackers": []}
    stages = {
        "teacher": training("grpo", base, train=few),
        "merged": merge(base) | {"adapters": ["stage:teacher", str(base / "odd")]},
        "student": training("opd", base, train=few, lora={"init": "stage:merged"}),
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

    def run(
        self, folder: Path, again: bool, kill: Kill | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Its command in a folder; again: to continue."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("pid.*"), folder / STRUCK):
            old.unlink(missing_ok=True)
        resume = ["--resume"] if again and self.kind in ("grpo", "opd", "sft") else []
        command = "eval" if self.kind == "eval" else "train"
        order = json.dumps(vars(kill)) if kill else ""
        words = [__file__, folder, order, command, "--config", "../config.yaml", *resume]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.processes == 1:
            return forked.run(*words, env=environment)
        return forked.launch(*words, processes=self.processes)

    def prepare(self) -> list[list[str]]:
        """Run it undisturbed, once -> the places of each rank, in order."""
        if not self.whole.exists():
            self.whole.mkdir(parents=True)
            config = yaml.safe_dump(CONFIGS[self.kind](self.base), sort_keys=False)
            (self.whole.parent / "config.yaml").write_text(config)
            done = self.run(self.whole, again=False)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        ranks = range(self.processes)
        return [(self.whole / f"trail.{rank}").read_text().splitlines() for rank in ranks]

    def differences(self, folder: Path) -> list[str]:
        """What a run has else than the undisturbed one."""
        return list(differences(self.whole / OUT, folder / OUT))


@pytest.fixture(scope="module")
def base(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters and the prompts of all scenarios."""
    import fakes

    folder = tmp_path_factory.mktemp("attacks")
    shutil.copytree(random_model, folder / "model")
    fakes.teachers(str(folder / "model"), folder)
    (folder / "prompts.txt").write_text("\n".join(TRAINED))
    (folder / "held_out.txt").write_text("\n".join(HELD_OUT))
    return folder


# Kills -------------------------------------------------------------------------------------------


def planned(trails: Sequence[Sequence[str]], rng: random.Random) -> list[Kill]:
    """One kill at each place of each rank, at any of its operations there."""
    found = [(rank, place) for rank, trail in enumerate(trails) for place in dict.fromkeys(trail)]
    rng.shuffle(found)
    kills = []
    for rank, place in found[:KILLS]:
        delay = rng.expovariate(30) if rng.random() < 0.4 else 0.0  # seconds; 33 ms on average
        nth = 1 + rng.randrange(trails[rank].count(place))
        kills.append(Kill(place, nth, delay, rank, len(trails) > 1 and rng.random() < 0.4))
    return kills


@pytest.mark.parametrize(
    ("kind", "processes"),
    [(kind, count) for kind in CONFIGS for count in (1, 2) if (kind, count) != ("merge", 2)],
)
def test_a_killed_run_ends_as_the_undisturbed_one(base: Path, kind: str, processes: int) -> None:
    scenario = Scenario(base, kind, processes)
    rng, killed, problems = random.Random(f"{kind}_{processes}"), 0, []
    kills = planned(scenario.prepare(), rng)
    while kills:
        row = rng.randint(1, IN_A_ROW)
        row, kills = kills[:row], kills[row:]
        folder = scenario.whole.parent / f"killed_{len(kills)}"
        for again, kill in enumerate([*row, None]):
            done = scenario.run(folder, again > 0, kill)
            if not (folder / STRUCK).exists():
                break
            killed += 1
        found = [done.stderr[-500:]] if done.returncode else scenario.differences(folder)
        problems += [f"{[kill.place for kill in row]}: {line}" for line in found]
    print(f"{kind}_{processes}: {killed} kills")
    assert killed and not problems, "\n".join(problems)


# Damage ------------------------------------------------------------------------------------------

Harm = Callable[[Path], object]


def flip(where: float, path: Path) -> None:
    """One bit, at this share of the file."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


HARMS: dict[str, Harm] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "bit in the head": functools.partial(flip, 0.0),
    "bit in the middle": functools.partial(flip, 0.5),
    "bit in the tail": functools.partial(flip, 1.0),
}
KILLED = ("cut", "emptied", "deleted")  # what a kill can leave
LAST, BEFORE = "checkpoints/update_000005", "checkpoints/update_000004"
# What a run writes after its last update: it is not there yet when a run is killed before.
FINAL = ("metrics.png", "before_after.png", "report.html", "adapter/README.md")


def harms(names: Sequence[str], kinds: Sequence[str], keep: int = 1) -> Iterator[tuple[str, str]]:
    """(file, harm): all, or one harm a file, and every keep-th file."""
    for number, name in enumerate(names):
        if ALL:
            yield from ((name, kind) for kind in kinds)
        elif number % keep == 0:
            yield name, kinds[number % len(kinds)]


class Damaged:
    """Copies of an undisturbed run that are damaged and continued; gathers what is not right."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.problems, self.count = scenario, [], 0
        scenario.prepare()
        self.out = scenario.whole / OUT

    def tried(
        self, what: str, damage: Callable[[Path], object], named: str = "", code: int = 0,
        left: tuple[str, ...] = ("?",),
    ) -> None:  # fmt: skip
        """damage: of the folder. named: what the command must say. left: what the damage added and
        nobody removes."""
        self.count += 1
        folder = self.scenario.whole.parent / f"damaged_{self.count}"
        shutil.copytree(self.scenario.whole, folder)
        for name in FINAL if self.scenario.kind != "recipe" else ():
            (folder / OUT / name).unlink(missing_ok=True)
        damage(folder)
        done = self.scenario.run(folder, again=True)
        said = done.stdout + done.stderr
        wrong = [f"exit status {done.returncode}"] if done.returncode != code else []
        wrong += ["traceback"] if "Traceback" in said else []
        lines = [line for line in said.splitlines() if "WARNING" in line or "--resume:" in line]
        wrong += ["not named"] if not any(named in line for line in ["", *lines]) else []
        if not code and not wrong:
            found = self.scenario.differences(folder)
            wrong += [line for line in found if not line.startswith(left)]
        if not wrong:
            shutil.rmtree(folder)
        self.problems += [f"{what}: {line}" for line in wrong]


def of_file(name: str, harm: str) -> Callable[[Path], object]:
    """A harm to a file of a run."""
    return lambda folder: HARMS[harm](folder / OUT / name)


def names_below(folder: Path, of: Path) -> list[str]:
    """Of all files in a folder, relative to `of`."""
    return sorted(p.relative_to(of).as_posix() for p in folder.rglob("*") if p.is_file())


def test_damage_to_a_checkpoint_is_named_and_mended(base: Path) -> None:
    damaged = Damaged(Scenario(base, "grpo"))
    out = damaged.out
    names = names_below(out / LAST, out)
    for name, harm in harms(names, list(HARMS)):
        damaged.tried(f"{name} {harm}", of_file(name, harm), named=Path(name).name)
    older = [n for n in names if (out / n.replace(LAST, BEFORE)).exists()]
    for name in older if ALL else older[:2]:
        before = name.replace(LAST, BEFORE)
        if (out / before).read_bytes() != (out / name).read_bytes():

            def swap(folder: Path, name: str = name, before: str = before) -> None:
                shutil.copyfile(folder / OUT / before, folder / OUT / name)

            damaged.tried(f"{name} older", swap, named=Path(name).name)
    assert not damaged.problems, "\n".join(damaged.problems)


def test_damage_to_the_folders_of_checkpoints(base: Path) -> None:
    damaged = Damaged(Scenario(base, "grpo"))

    def half(folder: Path) -> None:
        for name in ("manifest.json", "states.pt", "progress.json"):
            (folder / OUT / LAST / name).unlink()

    def empty(folder: Path) -> None:
        shutil.rmtree(folder / OUT / LAST)
        (folder / OUT / LAST).mkdir()

    def older(folder: Path) -> None:
        shutil.rmtree(folder / OUT / LAST)
        shutil.copytree(folder / OUT / BEFORE, folder / OUT / LAST)

    def beside(folder: Path) -> None:
        shutil.copytree(folder / OUT / LAST, folder / OUT / f"{LAST}.bak")
        (folder / OUT / "checkpoints" / "update_000007").touch()

    def everywhere(folder: Path) -> None:
        for states in (folder / OUT / "checkpoints").glob("*/states.pt"):
            states.write_bytes(b"")

    for damage in (half, empty, older):
        damaged.tried(damage.__name__, damage, named=Path(LAST).name)
    left = (f"{LAST}.bak", "checkpoints/update_000007")
    damaged.tried("beside", beside, left=left)
    damaged.tried("everywhere", everywhere, named="states.pt", code=2)
    assert not damaged.problems, "\n".join(damaged.problems)


def test_damage_to_the_adapter_and_the_log_is_mended(base: Path) -> None:
    damaged = Damaged(Scenario(base, "grpo"))
    out = damaged.out
    names = [name for name in names_below(out / "adapter", out) if "README" not in name]
    for name, harm in harms([*names, "metrics.jsonl"], list(HARMS)):
        damaged.tried(f"{name} {harm}", of_file(name, harm))
    damaged.tried("adapter deleted", lambda folder: shutil.rmtree(folder / OUT / "adapter"))
    assert not damaged.problems, "\n".join(damaged.problems)


def test_damage_to_the_stages_of_a_recipe_is_named_and_mended(base: Path) -> None:
    damaged = Damaged(Scenario(base, "recipe"))
    out = damaged.out
    stages = ("teacher", "merged", "student", "table")
    files = [
        f"{stage}/{name}" for stage in stages
        for name in sorted(json.loads((out / stage / "done.json").read_text())["files"])
    ]  # fmt: skip
    for name, harm in harms(files, list(HARMS), keep=5):
        damaged.tried(f"{name} {harm}", of_file(name, harm), named=Path(name).name)
    kinds = [kind for kind in HARMS if kind != "deleted"]
    for name, harm in harms([f"{stage}/done.json" for stage in stages], kinds):
        damaged.tried(f"{name} {harm}", of_file(name, harm), named="done.json")
    assert not damaged.problems, "\n".join(damaged.problems)


def test_what_a_kill_leaves_of_an_evaluation_is_made_again(base: Path) -> None:
    """One file of each kind: an image, rows of scores, what every run writes anew, and texts."""
    damaged = Damaged(Scenario(base, "eval"))
    out, whole = damaged.out, damaged.scenario.whole
    kinds = {re.sub(r"\d+", "#", Path(name).name): name for name in names_below(out, out)}
    for name, harm in harms([n for n in kinds.values() if "settings" not in n], KILLED):
        damaged.tried(f"{name} {harm}", of_file(name, harm))
    texts = names_below(whole / "texts", whole)
    for name, harm in harms(texts, KILLED, keep=max(1, len(texts) // 2)):

        def damage(folder: Path, name: str = name, harm: str = harm) -> None:
            HARMS[harm](folder / name)
            shutil.rmtree(folder / OUT)  # else nobody would read the cache

        damaged.tried(f"{name} {harm}", damage)
    assert not damaged.problems, "\n".join(damaged.problems)


# What grows --------------------------------------------------------------------------------------


def endless(base: Path, kind: str, times: int) -> dict[str, Any]:
    """A run of so many updates, or a recipe that is run so many times."""
    config = CONFIGS[kind](base)
    for stage in config.get("stages", {"": config}).values():
        for task in stage.get("tasks", []):
            task["reward"] = {"name": "test_attacks:measured_redness"}
    if kind == "grpo":
        config["train"] |= {"updates": times, "trackers": ["tensorboard"], "keep_samples": 5}
    return config


@pytest.mark.parametrize(("kind", "times"), [("grpo", 400), ("recipe", 12)])
def test_nothing_grows(base: Path, tmp_path: Path, kind: str, times: int) -> None:
    """Open files, threads and children of the last quarter are those of the second; memory grows by
    less than 5 %."""
    times *= 10 if ALL else 1
    path, usage = tmp_path / "config.yaml", tmp_path / "usage.jsonl"
    path.write_text(yaml.safe_dump(endless(base, kind, times)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "USAGE": str(usage)}
    rounds = times if kind == "recipe" else 1
    words = [__file__, "again", rounds, "train", "--config", path]
    done = forked.run(*words, env=environment, cwd=tmp_path, seconds=7200)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_lines(usage)
    early, late = rows[len(rows) // 4 : len(rows) // 2], rows[-len(rows) // 4 :]

    def middle(some: Sequence[Mapping[str, float]], what: str) -> float:
        return statistics.median(row[what] for row in some)

    change = {what: middle(late, what) - middle(early, what) for what in rows[0]}
    print(f"{kind}, {len(rows)} rows: {change}")
    assert max(change["files"], change["threads"], change["children"]) <= 0, change
    assert change["memory"] < 0.05 * middle(early, "memory"), change


def again(rounds: int, *argv: str) -> int:
    """In a process of its own: a command so many times, each in an empty output."""
    for _ in range(rounds):
        if code := cli.main(argv):
            return code
        shutil.rmtree(OUT)
    return 0


# Two runs, compared ------------------------------------------------------------------------------

TIMES = {"seconds/rollout", "seconds/score", "seconds/update", "seconds/image_drift",
         "images_per_second"}  # fmt: skip
EXCEPTIONS = {
    "metrics.jsonl": f"without {', '.join(sorted(TIMES))}: how fast the machine was",
    "manifest.json, done.json": "without its own digest, and those of such metrics.jsonl and "
    "manifests in its folder",
    "README.md": "without the command that it cites: the run was continued with --resume",
    "report.html": "without the time, the speed and the warnings, which have their own file",
    "warnings.jsonl": "each warning of the uninterrupted run is there; updates that were repeated "
    "warn again, and a resumed run says so",
    "rows.*.jsonl": "the rows of all processes together, in any order: a continued evaluation "
    "shares the rest of the images anew",
}
"""{file: what of it need not be equal, and why}. All other files are equal to the byte."""
PASSING = re.compile(  # what passes, in the page of a run
    rb"written [\d: -]+\.|<dt>images per second</dt><dd>[^<]*</dd>"
    rb"|<h2>Warnings</h2>.*?</table></div>", re.DOTALL,
)  # fmt: skip


def differences(expected: Path, found: Path) -> Iterator[str]:
    """A line for each file that differs, or is in one folder only."""
    names = {p.relative_to(f).as_posix() for f in (expected, found) for p in f.rglob("*")}
    for name in sorted(names):
        a, b = expected / name, found / name
        if re.fullmatch(r"rows\.\d+\.jsonl", a.name):  # compared together
            rows = ([*map(Path.read_text, sorted(p.parent.glob("rows.*.jsonl")))] for p in (a, b))
            one, other = (sorted("".join(texts).splitlines()) for texts in rows)
        elif a.exists() != b.exists():
            yield f"{name}: {'missing' if a.exists() else 'too much'}"
            continue
        elif a.is_dir():
            continue
        elif a.name == "warnings.jsonl":
            one, other = ({row["text"] for row in read_lines(path)} for path in (a, b))
            other &= one
        else:
            one, other = plain(a), plain(b)
        if one != other:
            yield f"{name}: differs"


def plain(path: Path) -> object:
    """What a file holds, without its exceptions."""
    content = path.read_bytes()
    if path.name == "metrics.jsonl":  # repr: NaN equals itself
        return [repr({k: v for k, v in row.items() if k not in TIMES}) for row in read_lines(path)]
    if path.name in ("manifest.json", "done.json"):
        row = json.loads(content)
        own = ("metrics.jsonl", "manifest.json")
        row["files"] = {k: None if k.endswith(own) else v for k, v in row["files"].items()}
        return {k: v for k, v in row.items() if k != "sha256"}
    if path.name == "README.md":
        return re.sub(rb"\n +(?:flowalign|accelerate launch) [^\n]*", b"", content)
    return PASSING.sub(b"", content) if path.name == "report.html" else content


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    sys.exit(again(int(rest[0]), *rest[1:]) if name == "again" else victim(name, *rest))
