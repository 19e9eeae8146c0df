"""Runs of flowalign that are forked from a process that has imported it, and killed on demand.

A fork saves the ten seconds that the imports take, so that hundreds of runs fit into minutes. The
forked process does what the command does: it calls `flowalign.commands.cli.main`. An audit hook of
Python (PEP 578) sees each of its operations on the file system and kills the process just before
the one that is asked for: so every state between two of them is reached, and nothing is replaced by
a mock. Files that C++ or Rust code writes are not seen; kills some time after an operation reach
those.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flowalign.commands import cli

OUT = "out"  # the run's folder, below the one that it is started in
MODULES = "modules"  # a file beside it: what a run has imported
LIMIT = 600  # seconds after which a run hangs
GRACE = 30  # seconds between SIGTERM and SIGKILL for the others when a rank has died, as torchrun's
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SCORED = "kill_test.scored"  # raised by the rewards of kill_test: (whether on held-out prompts)
REMOVAL = ("os.remove", "os.rmdir", "shutil.rmtree")
EVENTS = {"open", "os.rename", "os.mkdir", "os.truncate", SCORED, *REMOVAL}
PART = re.compile(r"\.(.+)\.[0-9a-f]{12}\.part")  # what `files.replacing` writes to
CHECKPOINT = re.compile(r"update_\d+$")


@dataclass(frozen=True)
class Kill:
    """When to kill: at the nth operation of a phase (counted in one process), `delay` seconds
    after it; or, where phase is "", `delay` seconds after the start. rank: whose operations are
    counted. alone: kill this rank only; else all at once."""

    phase: str
    nth: int = 1
    delay: float = 0.0
    rank: int = 0
    alone: bool = False


@dataclass(frozen=True)
class Ended:
    """codes: exit status of each rank, negative for a signal. phase: that of the last operation.
    phases: those of all operations of each rank, in order."""

    codes: list[int]
    killed: bool
    phase: str
    phases: list[list[str]]
    seconds: float


def phase_of(event: str, path: str, folder: Path, moved: set[str]) -> str:
    """What a run is at when it does an operation on `path`, which lies below its `folder`.

    moved: folders that took an old checkpoint; it is updated.
    """
    raw = path.split("/")
    names = [PART.sub(r"\1", name) for name in raw]
    if "checkpoints" in names:
        place = raw[: raw.index("checkpoints") + 2]
        if CHECKPOINT.fullmatch(place[-1]) and event in ("os.rename", *REMOVAL):
            moved.add(path)
            return "rotation"
        inside = folder.joinpath(*raw[: raw.index("checkpoints") + 1])
        known = inside.is_dir() and any(CHECKPOINT.fullmatch(name) for name in os.listdir(inside))
        if moved and event in REMOVAL:
            return "rotation"
        return "save" if known else "first save"
    if "adapter" in names and names[-1] != "README.md":
        return "adapter"
    if names[-1].startswith("held_out_"):
        return "evaluation"
    if "images" in names:
        return "images and rows"
    if names[-1] in ("done.json", "config.yaml", "report.md", ".lock", ".lock.json"):
        return "between stages"
    if names[-1] in ("metrics.jsonl", "warnings.jsonl") or "samples" in names:
        return "log and samples"
    return "last files"


class Watch:
    """The audit hook of one process: writes a line for each operation to `trail`, and kills."""

    def __init__(self, folder: Path, kill: Kill | None, trail: int, alarm: int) -> None:
        self.folder, self.kill, self.trail, self.alarm = folder, kill, trail, alarm
        self.count, self.moved = 0, set[str]()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or not (phase := self._phase(event, args)):
            return
        os.write(self.trail, f"{phase}\n".encode())
        if self.kill and phase == self.kill.phase:
            self.count += 1
            if self.count == self.kill.nth:
                self._strike(self.kill)

    def _phase(self, event: str, args: tuple[Any, ...]) -> str:
        if event == SCORED:
            return "evaluation" if args[0] else "rollout"
        path, *rest = args
        if event == "open" and not (isinstance(rest[1], int) and rest[1] & WRITING):
            return ""
        if not isinstance(path, str | bytes | os.PathLike):
            return ""
        path = os.fsdecode(path)
        beside = rest[-1] if event in REMOVAL else None
        if isinstance(beside, int) and beside >= 0:  # relative to an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{beside}"), path)
        below = os.path.relpath(os.path.abspath(path), self.folder)
        return "" if below.startswith("..") else phase_of(event, below, self.folder, self.moved)

    def _strike(self, kill: Kill) -> None:
        if kill.delay:
            os.write(self.alarm, b"!")  # the parent counts the delay and kills
        else:
            os.kill(os.getpid() if kill.alone else 0, signal.SIGKILL)  # 0: the whole group


def run(folder: Path, argv: Sequence[str], processes: int = 1, kill: Kill | None = None) -> Ended:
    """`flowalign ARGV` in a folder, on so many processes; it may be killed as told.

    Call it in a process with a single thread. Its output is in folder/log.RANK.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read, write = os.pipe()
    os.set_blocking(read, False)
    port, began, pids = _free_port(), time.monotonic(), []
    trails = [folder / f"trail.{rank}" for rank in range(processes)]
    for rank, trail in enumerate(trails):
        trail.unlink(missing_ok=True)
        aimed = kill if kill and kill.rank == rank and kill.phase else None
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.setpgid(0, pids[0] if pids else 0)
            _become(folder, argv, aimed, write, _variables(rank, processes, port))
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    os.close(write)
    codes, killed = _wait(pids, read, kill, began)
    os.close(read)
    phases = [trail.read_text().splitlines() if trail.exists() else [] for trail in trails]
    own = phases[kill.rank if kill else 0]
    return Ended(codes, killed, own[-1] if own else "start", phases, time.monotonic() - began)


def preload(folder: Path) -> None:
    """Import what the run in a folder has imported, so that those that are forked need not."""
    for name in (folder / MODULES).read_text().splitlines():
        with suppress(Exception):  # not all can be imported by their names
            importlib.import_module(name)


def _become(
    folder: Path, argv: Sequence[str], kill: Kill | None, alarm: int, variables: dict[str, str]
) -> NoReturn:
    """In the forked process: be the command, and end with its exit status."""
    code, rank = 1, variables.get("RANK", "0")
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(folder)
        os.environ |= variables
        sys.argv = ["flowalign", *argv]
        log, trail = (os.open(f"{name}.{rank}", APPEND) for name in ("log", "trail"))
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.addaudithook(Watch(folder / OUT, kill, trail, alarm))
        code = cli.main(argv)
        Path(MODULES).write_text("\n".join(sys.modules))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """What accelerate launch tells a rank; {} for a process that is alone."""
    if processes == 1:
        return {}
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


def _wait(pids: list[int], alarm: int, kill: Kill | None, began: float) -> tuple[list[int], bool]:
    """Until all have ended; kills when it is time -> exit statuses, whether it or the run's hook
    killed. When a rank has died, the others are ended as torchrun does it."""
    codes: dict[int, int] = {}
    at = began + kill.delay if kill and not kill.phase else None
    deadline, harder = began + LIMIT, None
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if kill and kill.phase and kill.delay and at is None and _rung(alarm):
            at = now + kill.delay
        left = [pid for pid in pids if pid not in codes]
        if kill and at is not None and now >= at:
            at = float("inf")
            _signal([pids[kill.rank]] if kill.alone else left, signal.SIGKILL)
        if left and any(codes.values()) and harder is None:
            _signal(left, signal.SIGTERM)
            harder = now + GRACE
        if harder is not None and now > harder or now > deadline:
            _signal(left, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in pids], -signal.SIGKILL in codes.values()


def _rung(alarm: int) -> bool:
    try:
        return bool(os.read(alarm, 1))
    except BlockingIOError:
        return False


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
