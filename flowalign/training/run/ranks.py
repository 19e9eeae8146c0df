"""How the ranks of a run notice that one of them, or their launcher, is gone or hangs.

A thread of every rank writes once a second into the store of the process group which phase its rank
is in, and reads the others. A rank is dead if its process is gone, which the ranks of its machine
see. A rank hangs where others have waited for it for the time that the config allows. torch counts
the collective operations that a process has begun, so the rank that others wait for is one that has
begun fewer, or one that says nothing any more. The first verdict that a rank writes into the store
counts for all.

torch alone names no rank: over gloo a dead rank is a closed connection, over NCCL it is a wait
until the timeout and an abort (TORCH_NCCL_ASYNC_ERROR_HANDLING in torch's docs).
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

BEAT = 1.0  # seconds between two looks
PATIENCE = 5.0  # seconds to learn which rank is to blame for a collective operation that failed
# Seconds that the main thread has to end by itself once a rank is lost. gloo raises soon after, and
# status.json then says why; NCCL does not raise.
GRACE = 15.0
MARGIN = 5.0  # seconds that the process group waits longer than the watch, which names the rank
AGAIN = "To continue, give the same command again, for training with --resume."
LOST = "flowalign/lost"  # in the store: the rank that is to blame, and why the run ends


class LostRank(RuntimeError):
    """The run ends because of another rank: which, in which phase, what to do."""


@dataclass
class Note:
    """What a rank says of itself. collectives: how many operations it has begun. beats: how often
    it has said something. left: it has ended its work."""

    rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    phase: str = "its start"
    collectives: int = 0
    beats: int = 0
    left: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    def is_gone(self) -> bool:
        """Whether its process, on this machine, has ended."""
        if self.host != socket.gethostname():
            return False
        try:
            return psutil.Process(self.process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


@contextmanager
def phase(name: str, update: int | None = None) -> Iterator[None]:
    """Around a part of a run: what other ranks say of this one if it is lost there. A collective
    operation that fails raises LostRank. The name stays until the next one."""
    watch().enter(name if update is None else f"{name} (update {update})")
    try:
        yield
    except RuntimeError as error:
        if lost := watch().explain(error):
            raise lost from error
        raise


@functools.cache
def watch() -> Watch:
    """The watch of this process. There is one, as there is one process group."""
    return Watch()


class Watch:
    """Ends this process if another rank is lost, or the launcher. Does nothing before `begin`, and
    nothing in a process that is alone and has no launcher: its shell may end before it."""

    def __init__(self) -> None:
        self.note = Note()
        self.lost: tuple[int, str] | None = None  # the rank that is to blame, why the run ends
        self._launcher: int | None = None
        self._timeout: float | None = None
        self._store: TCPStore | None = None
        self._notes: list[Note] = []  # of all ranks, as last read
        self._late: list[float] = []  # seconds for which others have waited for each
        self._looked = time.monotonic()
        self._thread: threading.Thread | None = None
        self._wake, self._left, self._concluded = (threading.Event() for _ in range(3))

    def begin(self, timeout: float | None) -> None:
        """Start, right after the process group is made; all ranks must call it. timeout: seconds
        that a rank may keep others waiting; None = for ever."""
        if self._thread:
            return
        world, self._timeout = 1, timeout
        if torch.distributed.is_initialized():
            world, self.note.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun and of accelerate launch
            self._launcher = os.getppid()
        if world == 1 and self._launcher is None:
            return
        if world > 1:
            self._store = _connection()
            self._store.compare_set(LOST, "", "")
            self._write()
            self._store.wait([_key(rank) for rank in range(world)])
            self._notes = [Note(rank) for rank in range(world)]
            self._late = [0.0] * world
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Say which phase this rank is in."""
        self.note.phase = phase
        self._wake.set()  # now: it may not live until the next beat

    def explain(self, error: BaseException) -> LostRank | None:
        """The error about another rank that this one follows from; None if it does not."""
        if not self._store or isinstance(error, LostRank) or not _is_collective(error):
            return None
        if self._concluded.wait(PATIENCE) and self.lost:
            return LostRank(self.lost[1])
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        return LostRank(f"another rank is gone or hangs, and it is not known which: {first}")

    def tell(self, text: str) -> None:
        """Print why the run ends, on one rank."""
        first_is_lost = self.lost is not None and self.lost[0] == 0
        if self.note.rank == (1 if first_is_lost else 0):
            with suppress(OSError, ValueError):  # a terminal that is gone
                print(f"stopped: {text}", file=sys.stderr, flush=True)

    def leave(self, code: int = 0, why: str = "") -> None:
        """Tell the others that this rank ends in order, and whether with an error."""
        with suppress(RuntimeError):  # the store is gone
            if code and self._store and not self.lost:
                text = f"{self.note} stopped in {self.note.phase}: {why[:2000]}"
                self._publish(self.note.rank, text)
            self.note.left = True
            self._left.set()
            self._wake.set()
            if self._store:
                self._write()
            for _ in range(5 if self._store and self.note.rank == 0 else 0):
                if all(note.left for note in self._read()):  # it may serve the store: it stays
                    break  # until all have read this
                time.sleep(BEAT)
        if code == 0:  # this process may make another group, which has its own watch
            watch.cache_clear()

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._left.is_set() and not self.lost:
                self._look_for_launcher()  # first: its end also ends ranks, and the store
                if self._store:
                    self._look()
                self._wake.wait(BEAT)
                self._wake.clear()
        except RuntimeError:  # of the store, which rank 0 or the launcher serves
            time.sleep(BEAT / 2)
            self._look_for_launcher()
            if not self._notes[0].left:
                self.lost = 0, _death(self._notes[0])
        if self.lost:  # the main thread ends by itself, where it can
            self._concluded.set()
            if not self._left.wait(GRACE):
                self._exit()

    def _look(self) -> None:
        """Is a rank gone, or does it hang?"""
        self._write()
        before, self._notes = self._notes, self._read()
        ahead = max(note.collectives for note in self._notes)
        # a machine that sleeps, or a job that is suspended, does not count
        passed, self._looked = min(time.monotonic() - self._looked, BEAT), time.monotonic()
        for old, note in zip(before, self._notes, strict=True):
            waited = old.collectives == note.collectives < ahead
            waited |= old.beats == note.beats and not note.left  # stopped within an operation
            self._late[note.rank] = self._late[note.rank] + passed if waited else 0.0
            if not note.left and note.is_gone():
                self._publish(note.rank, _death(note))
            elif self._timeout is not None and self._late[note.rank] > self._timeout:
                text = (
                    f"{note} hangs in {note.phase}: the others have waited {self._timeout:g} s for "
                    "it, as long as train.timeout_seconds allows (or timeout_seconds of an "
                    f"evaluation). Allow more if it was at work. {AGAIN}"
                )
                self._publish(note.rank, text)

    def _look_for_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            text = f"the launcher (process {self._launcher}) is gone, and the run ends with it."
            self.lost = -1, f"{text} {AGAIN}"
            self._exit()

    def _exit(self) -> None:
        """The end, whatever the main thread waits for. What is on disk is complete at any
        moment."""
        assert self.lost
        self.tell(self.lost[1])
        os._exit(1)

    # The store -----------------------------------------------------------------------------------

    def _write(self) -> None:
        assert self._store
        if not self.note.left:  # nothing of torch is called while the process group ends
            with suppress(RuntimeError, ValueError, AttributeError):  # no group, or no numbers
                group: Any = c10d._get_default_group()  # Any: torch's stubs lack the method
                self.note.collectives = group._get_sequence_number_for_group()
        self.note.beats += 1
        self._store.set(_key(self.note.rank), json.dumps(asdict(self.note)))

    def _read(self) -> list[Note]:
        """The notes of all ranks; `lost` where one has given its verdict."""
        assert self._store
        *notes, lost = self._store.multi_get([*(_key(note.rank) for note in self._notes), LOST])
        self.lost = self.lost or (json.loads(lost) if lost else None)
        return [Note(**json.loads(note)) for note in notes]

    def _publish(self, rank: int, text: str) -> None:
        """A verdict, for all ranks, which read it; the first one counts."""
        assert self._store
        self._store.compare_set(LOST, "", json.dumps([rank, text]))


def _key(rank: int) -> str:
    return f"flowalign/{rank}"


def _death(note: Note) -> str:
    return (
        f"{note} died in {note.phase}: its process ended without a word. SIGKILL does that, also "
        f"from the kernel when memory is short: `dmesg` may tell. {AGAIN}"
    )


def _connection() -> TCPStore:
    """A connection to the process group's store, for the thread: the group's own is blocked while
    it waits for a key."""
    store: Any = c10d._get_default_store()  # Any: torch's stubs lack its attributes
    while not isinstance(store, TCPStore):
        store = store.underlying_store
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def _is_collective(error: BaseException) -> bool:
    """Whether a collective operation raised it; torch has no type for gloo's errors."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )
