"""Kills runs and continues them: `python benchmarks/kill_test.py --kills 200`.

For small runs of every stage, a recipe and an evaluation, with one process and with two: a run that
nobody disturbs; then runs that are killed with SIGKILL, several times in a row, and continued by
the same command (a training stage with --resume). Each must end with the files of the first, to the
byte, but for what `same_files.EXCEPTIONS` names. Kills fall on every operation on files (see
`killing`), into evaluations, and at random times; of two processes all die, or one does, or the
launcher. Exit status: 0 all equal, 1 not.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import killing
import psutil
import same_files
import torch
import yaml
from killing import OUT, Kill

from flowalign.training.report.progress import quiet
from flowalign.types import Scores

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("red", "blue", "green", "grey")
TRAINED = [f'a {colour} sign that says "{text}"' for colour in WORDS for text in "ABCD"]
HELD_OUT = [f'a {colour} cup that says "{text}"' for colour in WORDS for text in "EF"]
IN_A_ROW = 4  # times that a run is killed before it may end, at most
AT_RANDOM = 0.15  # share of kills at a random time
DELAYED = 0.4  # share of the others that come a little after their operation
EVALUATION = "evaluation"


# Rewards of the runs -----------------------------------------------------------------------------


def redness(images: Any, prompts: Sequence[str], metadata: Any) -> Scores:
    """How much more red than the rest; tells the test that images are being scored."""
    sys.audit(killing.SCORED, prompts[0] in HELD_OUT)
    red, rest = images[:, 0].mean((1, 2)), images[:, 1:].mean((1, 2, 3))
    return Scores.of(red - rest, red=red)


def noisy_redness(images: Any, prompts: Sequence[str], metadata: Any) -> Scores:
    """The same plus noise of the global generators, which a checkpoint must hold."""
    noise = torch.rand(len(images)) + random.random()
    return Scores.of(redness(images, prompts, metadata).value + 1e-2 * noise)


# Scenarios ---------------------------------------------------------------------------------------


def training(kind: str, base: Path, **changes: Any) -> dict[str, Any]:
    """A run of five updates with a checkpoint each, of which two are kept."""
    task = {
        "prompts": str(base / "prompts.txt"), "validation": str(base / "held_out.txt"),
        "reward": {"name": "kill_test:noisy_redness"},
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
    """The base and the two teachers on eight prompts, with all images kept."""
    held_out = {"name": "cups", "prompts": str(base / "held_out.txt")}
    return {
        "stage": "eval", "output": OUT, "model": training("grpo", base)["model"],
        "models": {"base": None, "even": str(base / "even"), "odd": str(base / "odd")},
        "benchmarks": [{**held_out, "reward": {"name": "kill_test:redness"}}],
        "sampling": {"steps": 2, "guidance": 1.0, "batch_size": 2}, "keep_images": True,
    }  # fmt: skip


def recipe(base: Path) -> dict[str, Any]:
    """A teacher, a merge that holds it, a student, and a table."""
    keys = ("output", "model")
    few = {"updates": 2, "checkpoint_every": 1, "keep": 1, "sample_every": 2, "trackers": []}
    stages = {
        "teacher": training("grpo", base, train=few),
        "merged": merge(base) | {"adapters": ["stage:teacher", str(base / "odd")]},
        "student": training("opd", base, train=few, lora={"init": "stage:merged"}),
        "table": evaluation(base) | {"models": {"base": None, "student": "stage:student"}},
    }
    stages = {n: {k: v for k, v in s.items() if k not in keys} for n, s in stages.items()}
    return {"stage": "recipe", "output": OUT, "model": merge(base)["model"], "stages": stages}


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "grpo": lambda base: training("grpo", base),
    "opd": lambda base: training("opd", base),
    "sft": lambda base: training("sft", base),
    "merge": merge,
    "recipe": recipe,
    "eval": evaluation,
}
QUICK = ("grpo_1", "sft_2", "merge_1", "eval_2")
ALONE = ("merge",)  # the work of one process, whoever else is there


def prepare(base: Path) -> None:
    """The model, two adapters and the prompts of all scenarios."""
    sys.path.append(str(ROOT / "tests"))
    import fakes

    fakes.pipeline().save_pretrained(base / "model")
    fakes.teachers(str(base / "model"), base)
    (base / "prompts.txt").write_text("\n".join(TRAINED))
    (base / "held_out.txt").write_text("\n".join(HELD_OUT))


@dataclass(frozen=True)
class Scenario:
    """A kind of run on so many processes, below `base`."""

    base: Path
    kind: str
    processes: int

    @property
    def folder(self) -> Path:
        """Of its config and its runs."""
        return self.base / f"{self.kind}_{self.processes}"

    @property
    def whole(self) -> Path:
        """Where the run that nobody disturbed lies."""
        return self.folder / "whole"

    def argv(self, again: bool) -> list[str]:
        """Its command; again: to continue."""
        resume = ["--resume"] if again and self.kind in ("grpo", "opd", "sft") else []
        command = "eval" if self.kind == "eval" else "train"
        return [command, "--config", "../config.yaml", *resume]


@dataclass(frozen=True)
class Chain:
    """A run that was killed and continued. phases: what it was at at each kill. differing: its
    files that are not those of the undisturbed run; or why it did not end."""

    scenario: Scenario
    phases: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    folder: str = ""


# Running -----------------------------------------------------------------------------------------


def reference(scenario: Scenario) -> tuple[list[dict[str, int]], float]:
    """Run it undisturbed -> how many operations of each phase each rank did, and the seconds."""
    scenario.folder.mkdir(parents=True)
    config = KINDS[scenario.kind](scenario.base)
    (scenario.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    ended = killing.run(scenario.whole, scenario.argv(False), scenario.processes)
    if any(ended.codes):
        log = (scenario.whole / "log.0").read_text()
        raise RuntimeError(f"{scenario.folder}: exit status {ended.codes}:\n{log[-3000:]}")
    return [dict(Counter(phases)) for phases in ended.phases], ended.seconds


def planned(
    rng: random.Random, counts: Sequence[Mapping[str, int]], seconds: float, often: Counter[str]
) -> Kill:
    """The next kill of a scenario, most often in a phase that was hit least. counts: operations of
    each rank by phase. often: hits by phase; it is updated."""
    rank, alone = rng.randrange(len(counts)), len(counts) > 1 and rng.random() < 0.4
    delay = rng.expovariate(30) if rng.random() < DELAYED else 0.0  # seconds; 33 ms on average
    if rng.random() < AT_RANDOM or not counts[rank]:
        return Kill("", delay=rng.uniform(0, seconds), rank=rank, alone=alone)
    least = min(often[phase] for phase in counts[rank])
    phase = rng.choice([phase for phase in counts[rank] if often[phase] == least])
    often[phase] += 1
    return Kill(phase, 1 + rng.randrange(counts[rank][phase]), delay, rank, alone)


def chain(scenario: Scenario, number: int, kills: Sequence[Kill]) -> Chain:
    """Run it anew, with one kill after the other, until it ends; compare."""
    folder, phases = scenario.folder / f"killed_{number}", []
    for again, kill in enumerate([*kills, None]):
        ended = killing.run(folder, scenario.argv(again > 0), scenario.processes, kill)
        if ended.killed and kill and ended.seconds < killing.LIMIT:
            phases.append(ended.phase if kill.phase else "random time")
            continue
        break
    return _ended(scenario, folder, phases, ended.codes)


def launched(scenario: Scenario, number: int, seconds: float, whom: str) -> Chain:
    """The same by the real command (of two processes: by accelerate launch), with one kill some
    seconds after the first file. whom: all processes, the launcher, or one rank."""
    folder = scenario.folder / f"launched_{number}"
    folder.mkdir()
    process, ranks = _command(scenario, folder, again=False), []
    while process.poll() is None and not any(names for *_, names in os.walk(folder / OUT)):
        time.sleep(0.05)
    time.sleep(seconds)
    with suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is not None:  # it was faster
        return _ended(scenario, folder, [], [process.returncode])
    victims = {"launcher": [process], "rank": ranks[-1:], "all": [process, *ranks]}[whom]
    for victim in victims:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            victim.kill()
    process.wait(killing.LIMIT)
    _, outlived = psutil.wait_procs(ranks, timeout=120)  # of a killed launcher
    for rank in outlived:
        rank.kill()
    code = _command(scenario, folder, again=True).wait(killing.LIMIT)
    problems = ["ranks outlived their launcher by two minutes"] if outlived else []
    return _ended(scenario, folder, [f"real command, {whom}"], [code], problems)


def _command(scenario: Scenario, folder: Path, again: bool) -> subprocess.Popen[bytes]:
    name, *rest = scenario.argv(again)
    if scenario.processes == 1:
        command = ["flowalign.commands.cli", name, *rest]
    else:
        ways = ROOT / "configs/accelerate/ddp_2cpu.yaml"
        program = ["-m", "flowalign.eval"] if name == "eval" else [str(ROOT / "train.py")]
        command = ["accelerate.commands.launch", "--config_file", str(ways), *program, *rest]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    with open(folder / "log.0", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, stdout=log, stderr=log,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip


def _ended(
    scenario: Scenario,
    folder: Path,
    phases: list[str],
    codes: list[int],
    problems: Sequence[str] = (),
) -> Chain:
    """Compare a run that is over; its folder is kept if it differs."""
    problems = list(problems)
    if any(codes):
        last = (folder / "log.0").read_text(errors="replace").strip().splitlines()[-1:]
        problems.append(f"exit status {codes}: {last}")
    else:
        problems += same_files.differences(scenario.whole / OUT, folder / OUT)
    if not problems:
        shutil.rmtree(folder)
    return Chain(scenario, phases, problems, str(folder))


# The whole ---------------------------------------------------------------------------------------


def test(
    scenarios: Sequence[Scenario], kills: int, real: int, seed: int, workers: int
) -> Iterator[Chain]:
    """Kill until there were so many kills, evenly over the scenarios; `real` of them by the real
    command. Each chain depends on seed and its number alone."""
    # forked here, before there are threads
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context) as pool:
        counts = dict(zip(scenarios, pool.map(reference, scenarios), strict=True))
        for scenario, (phases, seconds) in counts.items():
            operations = " + ".join(str(sum(each.values())) for each in phases)
            print(f"{scenario.folder.name}: {seconds:.1f} s, {operations} operations", flush=True)
        waiting: set[Future[Chain]] = set()
        often: dict[Scenario, Counter[str]] = {scenario: Counter() for scenario in scenarios}
        order, left = itertools.cycle(scenarios), kills
        for number in itertools.count():
            scenario = next(order)
            rng = random.Random(f"{seed}/{number}")
            if number < real:
                whom = rng.choice(
                    ["launcher", "rank", "all"] if scenario.processes > 1 else ["all"]
                )
                job = pool.submit(
                    launched, scenario, number, rng.uniform(0, 2 * counts[scenario][1] / 3), whom
                )
            else:
                row = rng.randint(1, IN_A_ROW)
                plan = [planned(rng, *counts[scenario], often[scenario]) for _ in range(row)]
                job = pool.submit(chain, scenario, number, plan)
            waiting.add(job)
            while len(waiting) >= workers * 2 or (left <= 0 and waiting):
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for result in done:
                    left -= len(result.result().phases)
                    yield result.result()
            if left <= 0:
                return


def report(chains: Sequence[Chain]) -> str:
    """A row for each scenario."""
    lines = ["| scenario | processes | runs | kills | kills by phase | equal | different |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    groups: dict[tuple[str, int], list[Chain]] = {}
    for each in chains:
        groups.setdefault((each.scenario.kind, each.scenario.processes), []).append(each)
    for (kind, processes), group in [*sorted(groups.items()), (("all", 0), list(chains))]:
        phases = Counter(phase for each in group for phase in each.phases)
        by_phase = ", ".join(f"{phase} {count}" for phase, count in phases.most_common())
        bad = sum(bool(each.differing) for each in group)
        row = [kind, processes or "", len(group), phases.total(), by_phase, len(group) - bad, bad]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", metavar="KIND_PROCESSES", help="such as grpo_2")
    parser.add_argument("--real", type=int, default=12, help="kills of real commands")
    parser.add_argument("--quick", action="store_true", help=f"8 kills of {', '.join(QUICK)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where the runs lie; default: a temporary one")
    args = parser.parse_args(argv)
    base = (args.folder or Path(tempfile.mkdtemp(prefix="kill_test_"))).resolve()
    base.mkdir(parents=True, exist_ok=True)
    quiet()
    torch.set_num_threads(1)  # threads do not survive a fork
    if os.fork() == 0:  # what computes is no process that others are forked from
        prepare(base)
        os._exit(0)
    os.wait()
    first = Scenario(base, "grpo" if args.quick else "recipe", 1)
    reference(first)
    killing.preload(first.whole)
    shutil.rmtree(first.folder)
    names = [(kind, count) for kind in KINDS for count in (1, 2) if kind not in ALONE or count == 1]
    scenarios = [Scenario(base, *name) for name in names]
    if only := args.only or (QUICK if args.quick else []):
        scenarios = [each for each in scenarios if each.folder.name in only]
    kills, real = (min(args.kills, 8), 0) if args.quick else (args.kills, args.real)
    began, chains = time.monotonic(), []
    for each in test(scenarios, kills, real, args.seed, args.workers):
        chains.append(each)
        verdict = "DIFFERENT" if each.differing else "equal"
        print(f"{each.scenario.folder.name}, {', '.join(each.phases)}: {verdict}", flush=True)
        if each.differing:
            print(
                f"{each.folder}, killed at {each.phases}:", *each.differing, sep="\n  ", flush=True
            )
    print(f"\n{report(chains)}\n\nseed {args.seed}, {time.monotonic() - began:.0f} s, {base}")
    return int(any(each.differing for each in chains))


if __name__ == "__main__":
    sys.exit(main())
