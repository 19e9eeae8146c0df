"""How the ranks of a run notice that one of them, or their launcher, is gone or hangs.

A thread of every rank writes once a second into the store of the process group which phase its rank
is in, and reads the others. A rank is dead if its process is gone, which the ranks of its machine
see. A rank hangs where others have waited for it for the time that the config allows. torch counts
the collective operations that a process has begun, so the rank that others wait for is one that has
begun fewer. The first verdict that a rank writes into the store counts for all.

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
from typing import Any, NamedTuple

import psutil
import torch
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

BEAT = 1.0  # seconds between two looks
PATIENCE = 5.0  # seconds to learn which rank is to blame for a collective operation that failed
# Seconds that the main thread has to end by itself once a rank is lost. gloo raises soon after, and
# status.json then says why; NCCL does not raise. All ranks may meet the error of one that stopped.
GRACE = 15.0
MARGIN = 5.0  # seconds that the process group waits longer than the watch, which names the rank
AGAIN = "To continue, give the same command again, for training with --resume."


class LostRank(RuntimeError):
    """The run ends because of another rank: which, in which phase, what to do."""


class Verdict(NamedTuple):
    """Why the run ends, and the rank that is to blame."""

    text: str
    rank: int


@dataclass
class Sign:
    """What a rank says of itself. collectives: how many operations it has begun. left: it has ended
    its work. late: seconds for which others wait for it, as the reader counts them."""

    rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    phase: str = "its start"
    collectives: int = 0
    left: bool = False
    late: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    def death(self) -> Verdict:
        text = (
            f"{self} died in {self.phase}: its process ended without a word. SIGKILL does that, "
            f"also from the kernel when memory is short: `dmesg` may tell. {AGAIN}"
        )
        return Verdict(text, self.rank)

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
        self.sign = Sign()
        self.verdict: Verdict | None = None
        self._launcher: int | None = None
        self._timeout: float | None = None
        self._store: TCPStore | None = None
        self._keys: list[str] = []  # of the ranks in the store
        self._signs: list[Sign] = []  # as last read
        self._thread: threading.Thread | None = None
        self._wake, self._concluded, self._told = (threading.Event() for _ in range(3))

    # In the main thread --------------------------------------------------------------------------

    def begin(self, timeout: float | None) -> None:
        """Start, right after the process group is made; all ranks must call it. timeout: seconds
        that a rank may keep others waiting; None = for ever."""
        if self._thread:
            return
        world, self._timeout = 1, timeout
        if torch.distributed.is_initialized():
            world, self.sign.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun and of accelerate launch
            self._launcher = os.getppid()
        if world == 1 and self._launcher is None:
            return
        if world > 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._keys = [f"flowalign/{attempt}/{name}" for name in [*range(world), "verdict"]]
            self._store = _connection()
            self._store.compare_set(self._keys[-1], "", "")
            self._write()
            self._store.wait(self._keys)
            self._signs, _ = self._read()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Say which phase this rank is in."""
        self.sign.phase = phase
        self._wake.set()  # now: it may not live until the next beat

    def explain(self, error: BaseException) -> LostRank | None:
        """The error about another rank that this one follows from; None if it does not."""
        if not self._store or isinstance(error, LostRank) or not _is_collective(error):
            return None
        if self._concluded.wait(PATIENCE) and self.verdict:
            return LostRank(self.verdict.text)
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        return LostRank(f"another rank is gone or hangs, and it is not known which: {first}")

    def tell(self, text: str) -> None:
        """Print why the run ends, on one rank of each machine."""
        local = int(os.environ.get("LOCAL_RANK") or self.sign.rank)
        first_is_lost = self.verdict and self.verdict.rank == self.sign.rank - local
        if local == (1 if first_is_lost else 0) and not self._told.is_set():
            self._told.set()
            with suppress(OSError, ValueError):  # a terminal that is gone
                print(f"stopped: {text}", file=sys.stderr, flush=True)

    def leave(self, code: int = 0, why: str = "") -> None:
        """Tell the others that this rank ends in order, and whether with an error."""
        if code and self._store and not self.verdict:
            text = f"{self.sign} stopped in {self.sign.phase}: {why[:2000]}"
            self.verdict = Verdict(text, self.sign.rank)
            self._publish(self.verdict)
        self.sign.left = True
        self._wake.set()
        if self._thread:
            self._thread.join(7 * BEAT)
        if code == 0:  # this process may make another group, which has its own watch
            watch.cache_clear()

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.sign.left:
                self._look_for_launcher()  # first: its end also ends ranks, and the store
                if self._store:
                    self._write()
                    self._look()
                self._wake.wait(BEAT)
                self._wake.clear()
            if self._store:
                self._write()
                for _ in range(5 if self.sign.rank == 0 else 0):  # it may serve the store: it
                    if all(sign.left for sign in self._read()[0]):  # stays until all have read this
                        return
                    time.sleep(BEAT)
        except RuntimeError:  # of the store, which rank 0 or the launcher serves
            time.sleep(BEAT / 2)
            self._look_for_launcher()
            if not self._signs[0].left:
                self._conclude(self._signs[0].death())

    def _write(self) -> None:
        assert self._store
        if not self.sign.left:  # nothing of torch is called while the process group ends
            with suppress(RuntimeError, ValueError, AttributeError):  # no group, or no numbers
                group: Any = c10d._get_default_group()  # Any: torch's stubs lack the method
                self.sign.collectives = group._get_sequence_number_for_group()
        self._store.set(self._keys[self.sign.rank], json.dumps(asdict(self.sign)))

    def _read(self) -> tuple[list[Sign], Verdict | None]:
        assert self._store
        *signs, verdict = self._store.multi_get(self._keys)
        return [Sign(**json.loads(text)) for text in signs], (
            Verdict(*json.loads(verdict)) if verdict else None
        )

    def _publish(self, verdict: Verdict) -> None:
        """For all ranks, which read it; the first one counts."""
        assert self._store
        with suppress(RuntimeError):  # the store is gone
            self._store.compare_set(self._keys[-1], "", json.dumps(verdict))

    def _look(self) -> None:
        """Is a rank gone, or does it hang?"""
        before = self._signs
        self._signs, verdict = self._read()
        if verdict:
            self._conclude(verdict)
            return
        ahead = max(sign.collectives for sign in self._signs)
        for old, sign in zip(before, self._signs, strict=True):
            # a machine that sleeps, or a job that is suspended, does not count
            waited = old.collectives == sign.collectives < ahead
            sign.late = old.late + BEAT if waited else 0.0
            if sign.left:
                continue
            if sign.is_gone():
                self._publish(sign.death())
            elif self._timeout is not None and sign.late > self._timeout:
                text = (
                    f"{sign} hangs in {sign.phase}: the others have waited {self._timeout:g} s for "
                    "it, as long as train.timeout_seconds allows (or timeout_seconds of an "
                    f"evaluation). Allow more if it was at work. {AGAIN}"
                )
                self._publish(Verdict(text, sign.rank))

    def _look_for_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            text = f"the launcher (process {self._launcher}) is gone, and the run ends with it."
            self.verdict = Verdict(f"{text} {AGAIN}", rank=-1)
            self._exit()

    def _conclude(self, verdict: Verdict) -> None:
        """The main thread ends by itself, where it can."""
        if self.verdict:
            return
        self.verdict = verdict
        self._concluded.set()
        timer = threading.Timer(BEAT if verdict.rank == self.sign.rank else GRACE, self._exit)
        timer.daemon = True
        timer.start()

    def _exit(self) -> None:
        """The end, whatever the main thread waits for. What is on disk is complete at any
        moment."""
        assert self.verdict
        self.tell(self.verdict.text)
        os._exit(1)


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
