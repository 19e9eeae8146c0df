"""How the ranks of a run notice that one of them, or their launcher, is gone or hangs.

A thread of every rank writes once a second where its rank is into the store of the process group,
and reads where the others are. A rank is dead if its process is gone, which the ranks of its
machine see; a machine is gone if its ranks write nothing for VANISHED seconds. A rank hangs where
others have waited for it for the time that the config allows. torch counts the collective
operations that a process has begun, so the rank that others wait for is one that has begun fewer.

torch alone notices less: over gloo a dead rank is a traceback about a closed connection, over NCCL
it is a wait until the timeout and an abort (TORCH_NCCL_ASYNC_ERROR_HANDLING in torch's docs).
Neither names the rank.
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
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

BEAT = 1.0  # seconds between two signs of life
PATIENCE = 5.0  # seconds to learn which rank is to blame for a collective operation that failed
# Seconds that the main thread has to end by itself once a rank is lost: it says "stopped" in
# status.json. gloo raises soon after; NCCL does not raise, and would abort.
GRACE = {"gloo": 15.0}
SHORT_GRACE = 1.0
# All ranks may stop for one reason, one after the other; the main one has most to write.
STOP_GRACE = 30.0
# Seconds that the process group waits longer than the watch, which names the rank.
MARGIN = 5.0
VANISHED = 120.0  # seconds after which a machine that writes nothing counts as gone
AGAIN = "To continue, give the same command again, for training with --resume."


class LostRank(RuntimeError):
    """The run ends because of another rank: which, what it was at, what to do."""


@dataclass(frozen=True)
class Verdict:
    """Why the run ends. rank: the one that is to blame; -1 for the launcher.

    stopped: it ended in order, with an error that other ranks may meet, too.
    """

    text: str
    rank: int
    stopped: bool = False


@dataclass(frozen=True)
class Sign:
    """A sign of life, as it is in the store. beat: how many there were before. collectives: how
    many operations the rank has begun. left: it has ended its work. end: a Verdict, if it has one.
    """

    rank: int
    host: str
    process: int
    phase: str
    beat: int
    collectives: int
    left: bool
    end: dict[str, Any] | None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    @property
    def is_gone(self) -> bool:
        """Whether the process is a process of this machine, and has ended."""
        if self.host != socket.gethostname():
            return False
        try:
            return psutil.Process(self.process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@dataclass
class _Peer:
    """A rank as it is seen here, also this one. silent, late: seconds since its last sign of life,
    and since others wait for it."""

    sign: Sign
    silent: float = 0.0
    late: float = 0.0


@dataclass
class Phase:
    """seconds: how long it took, once it is over."""

    seconds: float = 0.0


@contextmanager
def phase(name: str, update: int | None = None) -> Iterator[Phase]:
    """Around a part of a run: what other ranks say of this one if it is lost there, and its time.
    The name stays until the next one."""
    watch().at(name, update)
    phase, began = Phase(), time.perf_counter()
    yield phase
    phase.seconds = time.perf_counter() - began


@functools.cache
def watch() -> Watch:
    """The watch of this process. There is one, as there is one process group."""
    return Watch()


class Watch:
    """Ends this process if another rank is lost, or the launcher. Does nothing before `begin`, and
    nothing in a process that is alone and has no launcher: its shell may end before it."""

    def __init__(self) -> None:
        self.rank, self.world, self.local = 0, 1, 0
        self.verdict: Verdict | None = None
        self._phase = "its start"
        self._launcher: int | None = None
        self._timeout: float | None = None
        self._grace = SHORT_GRACE
        self._store: TCPStore | None = None
        self._keys: list[str] = []  # of the ranks in the store
        self._peers: list[_Peer] = []
        self._beat, self._collectives = 0, 0
        self._thread: threading.Thread | None = None
        self._wake, self._known, self._told = (threading.Event() for _ in range(3))
        self._left = False  # this rank ends

    # In the main thread --------------------------------------------------------------------------

    def begin(self, timeout: float | None) -> None:
        """Start, right after the process group is made; all ranks must call it. timeout: seconds
        that a rank may keep others waiting; None = for ever."""
        if self._thread:
            return
        if torch.distributed.is_initialized():
            self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self._grace = GRACE.get(torch.distributed.get_backend(), SHORT_GRACE)
        self.local = int(os.environ.get("LOCAL_RANK") or self.rank)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun and of accelerate launch
            self._launcher = os.getppid()
        if self.world == 1 and self._launcher is None:
            return
        self._timeout = timeout
        if self.world > 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._keys = [f"flowalign/{attempt}/{rank}" for rank in range(self.world)]
            self._store = _connection()
            self._write()
            self._store.wait(self._keys)
            self._peers = [_Peer(sign) for sign in self._signs()]
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def at(self, phase: str, update: int | None = None) -> None:
        """What this rank is at, for errors: "scoring", of an update."""
        self._phase = phase if update is None else f"{phase} (update {update})"
        self._wake.set()  # now: it may not live until the next beat

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside the `with`, a collective operation that fails raises LostRank."""
        try:
            yield
        except RuntimeError as error:
            if lost := self.explain(error):
                raise lost from error
            raise

    def explain(self, error: BaseException) -> LostRank | None:
        """The error about another rank that this one follows from; None if it does not."""
        if self.world == 1 or isinstance(error, LostRank) or not _is_collective(error):
            return None
        if self._known.wait(PATIENCE) and self.verdict:
            return LostRank(self.verdict.text)
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        return LostRank(f"another rank is gone or hangs, and it is not known which: {first}")

    def tell(self, text: str) -> None:
        """Print why the run ends, on one rank of each machine."""
        speaker = 0
        if self.verdict and self.verdict.rank == self.rank - self.local:
            speaker = 1  # the first rank of this machine is the lost one
        if self.local == speaker and not self._told.is_set():
            self._told.set()
            with suppress(OSError, ValueError):  # a terminal that is gone
                print(f"stopped: {text}", file=sys.stderr, flush=True)

    def leave(self, code: int = 0, why: str = "") -> None:
        """Tell the others that this rank ends in order, and whether with an error."""
        if code and not self.verdict and self._peers:
            name = self._peers[self.rank].sign.name
            text = f"{name} stopped in {self._phase}: {why[:2000]}"
            self.verdict = Verdict(text, self.rank, stopped=True)
        self._left = True
        self._wake.set()
        if self._thread:
            self._thread.join(7 * BEAT)
        if code == 0:  # this process may make another group, which has its own watch
            watch.cache_clear()

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        try:
            while not self._left:
                # a machine that sleeps, or a job that is suspended, is not late
                now = time.monotonic()
                elapsed, last = min(now - last, 5 * BEAT), now
                self._look_for_launcher()
                if self._store:
                    self._write()
                    self._look(elapsed)
                self._wake.wait(BEAT)
                self._wake.clear()
            if self._store:
                self._write()
                self._wait_for_readers()
        except RuntimeError:  # of the store, which rank 0 or the launcher serves
            time.sleep(BEAT / 2)
            self._look_for_launcher()
            first = self._peers[0].sign
            if not first.left:
                self._conclude(Verdict(_death(first), rank=0))

    def _wait_for_readers(self) -> None:
        """Rank 0 may serve the store: it stays until the others have read its last sign."""
        for _ in range(5 if self.rank == 0 else 0):
            if all(sign.left for sign in self._signs()):
                return
            time.sleep(BEAT)

    def _write(self) -> None:
        assert self._store
        if not self._left:  # nothing of torch is called while the process group ends
            with suppress(RuntimeError, ValueError, AttributeError):  # no group, or no numbers
                group: Any = c10d._get_default_group()  # Any: torch's stubs lack the method
                self._collectives = group._get_sequence_number_for_group()
        self._beat += 1
        sign = Sign(
            rank=self.rank,
            host=socket.gethostname(),
            process=os.getpid(),
            phase=self._phase,
            beat=self._beat,
            collectives=self._collectives,
            left=self._left,
            end=asdict(self.verdict) if self.verdict else None,
        )
        self._store.set(self._keys[self.rank], json.dumps(asdict(sign)))

    def _signs(self) -> list[Sign]:
        assert self._store
        return [Sign(**json.loads(text)) for text in self._store.multi_get(self._keys)]

    # Judging -------------------------------------------------------------------------------------

    def _look(self, elapsed: float) -> None:
        """Is a rank gone, or does it hang? elapsed: seconds since the last look."""
        signs = self._signs()
        ahead = max(sign.collectives for sign in signs)
        for peer, sign in zip(self._peers, signs, strict=True):
            waited = sign.collectives < ahead and sign.collectives == peer.sign.collectives
            peer.late = peer.late + elapsed if waited else 0.0
            peer.silent = peer.silent + elapsed if sign.beat == peer.sign.beat else 0.0
            peer.sign = sign
            if sign.end:
                self._conclude(Verdict(**sign.end))
            elif not sign.left and (sign.is_gone or self._vanished(peer)):
                self._look_for_launcher()  # which may have been the first to go
                self._conclude(Verdict(_death(sign), sign.rank))
        present = [peer for peer in self._peers if not peer.sign.left]
        worst = max(present, key=lambda peer: max(peer.late, peer.silent))
        if self._timeout is not None and max(worst.late, worst.silent) > self._timeout:
            sign = worst.sign
            text = (
                f"{sign.name} hangs in {sign.phase}: the others have waited {self._timeout:g} s "
                "for it, as long as train.timeout_seconds allows (or timeout_seconds of an "
                f"evaluation). Allow more if it was at work. {AGAIN}"
            )
            self._conclude(Verdict(text, sign.rank))

    def _vanished(self, peer: _Peer) -> bool:
        """Whether a rank of another machine has been silent for too long."""
        return peer.sign.host != socket.gethostname() and peer.silent > VANISHED

    def _look_for_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            text = f"the launcher (process {self._launcher}) is gone, and nobody watches this run."
            self.verdict = Verdict(f"{text} {AGAIN}", rank=-1)
            self._exit()

    def _conclude(self, verdict: Verdict) -> None:
        if self.verdict or self._left:
            return
        self.verdict = verdict
        self._known.set()
        self._wake.set()
        if not verdict.stopped:  # else all may have one reason, and say it
            self.tell(verdict.text)
        grace = STOP_GRACE if verdict.stopped else self._grace
        timer = threading.Timer(SHORT_GRACE if verdict.rank == self.rank else grace, self._exit)
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


def _death(sign: Sign) -> str:
    return (
        f"{sign.name} died in {sign.phase}: its process ended without a word. SIGKILL does that, "
        f"also from the kernel when memory is short: its own messages or `dmesg` may tell. {AGAIN}"
    )


def _is_collective(error: BaseException) -> bool:
    """Whether a collective operation raised it; torch has no type for gloo's errors."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )
