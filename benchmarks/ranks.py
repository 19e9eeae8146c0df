"""What ends a run of several processes, and how soon: `python benchmarks/ranks.py`.

Small GRPO runs of a random SD3 model on the CPU, over gloo. In each run one rank gets into trouble
at update 2: it is killed, raises, stops (SIGSTOP), sleeps, is slow, or its launcher is killed.
Prints a Markdown table. Seconds count from the trouble to the end of the last process.
`--processes 2 4` and `--cases dead hung` choose; a run takes half a minute, mostly imports.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
TIMEOUT = 20  # train.timeout_seconds
LIMIT = 300.0  # seconds for a whole run


@dataclass(frozen=True)
class Case:
    """how: as `test_ranks.Troubled` has it; rank: whose trouble; restarts: None = no launcher."""

    text: str
    how: str
    rank: int
    restarts: int | None


CASES = {
    "dead": Case("SIGKILL of the last rank, no launcher", "kill", -1, None),
    "dead_first": Case("SIGKILL of rank 0, no launcher", "kill", 0, None),
    "dead_launched": Case("SIGKILL of the last rank, accelerate launch", "kill", -1, 0),
    "exception": Case("an exception on the last rank, no launcher", "nothing", -1, None),
    "hung": Case(f"SIGSTOP of the last rank, limit {TIMEOUT} s, no launcher", "stop", -1, None),
    "hung_launched": Case(f"a reward of rank 0 sleeps, limit {TIMEOUT} s, accelerate launch",
                          "sleep", 0, 0),
    "slow": Case(f"a reward that takes 8 s on the last rank, limit {TIMEOUT} s", "slow", -1, 0),
    "launcher": Case("SIGKILL of accelerate launch", "orphan", -1, 0),
    "restart": Case("SIGKILL of the last rank, --max_restarts 2", "kill", -1, 2),
}  # fmt: skip


def started(case: Case, count: int, config: Path) -> list[subprocess.Popen[str]]:
    """The launcher, or all ranks where there is none."""
    import test_ranks

    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    known = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
             "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    script = ROOT / "train.py"
    if case.how == "nothing":  # with the reward
        script = config.with_name("train.py")
        script.write_text(test_ranks.CRASH)
    train = [str(script), "--config", str(config)]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1",
              "--num_processes", str(count), "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", "0", "--max_restarts", str(case.restarts)]  # fmt: skip
    groups: list[tuple[list[str], dict[str, str]]] = [([*launch, *train], {})]
    if case.restarts is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(free.getsockname()[1])}  # fmt: skip
        groups = [(train, world | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(count)]
    said = open(config.parent / "said", "a")  # noqa: SIM115, the processes keep it
    return [
        subprocess.Popen([sys.executable, *argv], env=os.environ | known | own, stdout=said,
                         stderr=said, text=True)
        for argv, own in groups
    ]  # fmt: skip


def measured(case: Case, count: int, model: str, folder: Path) -> str:
    """A row of the table."""
    import test_ranks

    rank = case.rank % count
    limits = [f"train.timeout_seconds={TIMEOUT}"]
    config = test_ranks.config(folder, model, case.how, *limits, rank=rank)
    processes = started(case, count, config)
    family: set[psutil.Process] = {psutil.Process(process.pid) for process in processes}
    trouble, end = 0.0, time.monotonic() + LIMIT
    while time.monotonic() < end:
        for process in list(family):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                family |= set(process.children(recursive=True))
        if not trouble and not (folder / "fatal").exists():
            trouble = time.monotonic()
        for process in processes:
            process.poll()
        if not any(map(works, family)):
            break
        time.sleep(0.1)
    seconds = time.monotonic() - trouble
    codes = [
        str(process.wait()) if not stopped(process.pid) else "stopped" for process in processes
    ]
    for process in filter(psutil.Process.is_running, family):
        process.kill()
    for process in processes:
        process.wait()
    lines = (folder / "said").read_text().splitlines()
    ends = [line for line in lines if line.startswith("stopped: ")]
    traces = sum("pair.cc" in line or "unbound_buffer.cc" in line for line in lines)
    text = ends[0].removeprefix("stopped: ").split(". ")[0] if ends else "none"
    return (
        f"| {case.text} | {count} | {seconds:.0f} | {', '.join(codes)} | "
        f"{len(ends)}: {text} | {traces} |"
    )


def works(process: psutil.Process) -> bool:
    """Whether it is there, and not stopped."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def stopped(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    args = parser.parse_args(argv)
    import fakes

    heads = ("trouble at update 2", "processes", "seconds to the end", "exit codes",
             "errors: the first", "texts of gloo")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        fakes.pipeline().save_pretrained(Path(name) / "model")
        for key in args.cases:
            for count in args.processes:
                folder = Path(name) / f"{key}_{count}"
                print(measured(CASES[key], count, f"{name}/model", folder), flush=True)


if __name__ == "__main__":
    main()
