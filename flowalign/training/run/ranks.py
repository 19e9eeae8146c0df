"""How the ranks of a run notice that one of them, or their launcher, is gone or hangs.

A thread of every rank says once a second, over TCP, where its rank is. Rank 0 listens and judges.
The kernel closes the connections of a process that dies, however it dies, so its end is known at
once; a rank that is busy or stopped is never taken for a dead one. A rank hangs where another has
waited for it for the time that the config allows. torch counts the collective operations that a
process has begun, so the rank that others wait for is one that has begun fewer.

torch alone notices less: over gloo a dead rank is a traceback about a closed connection, over NCCL
it is a wait until the timeout and an abort (TORCH_NCCL_ASYNC_ERROR_HANDLING in torch's docs).
Neither names the rank.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

log = logging.getLogger("flowalign")

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
VANISHED = 50.0  # seconds after which a machine that answers nothing counts as gone
LOOPBACK = "127.0.0.1"
AGAIN = "To continue, give the same command again, for training with --resume."


class LostRank(RuntimeError):
    """The run ends because of another rank: which, what it was at, what to do."""


@dataclass(frozen=True)
class Sign:
    """A sign of life. meetings: how many collective operations the rank has begun."""

    rank: int
    host: str
    process: int
    place: str
    meetings: int

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"


@dataclass(frozen=True)
class Verdict:
    """Why the run ends. rank: the one that is to blame; -1 for the launcher.

    stopped: it ended in order, with an error that other ranks may meet, too.
    """

    text: str
    rank: int
    stopped: bool = False


@dataclass
class _Peer:
    """A rank as it is seen here; this one itself has no writer. silent, late: seconds since its
    last sign of life, and since others wait for it."""

    sign: Sign
    writer: asyncio.StreamWriter | None = None
    silent: float = 0.0
    late: float = 0.0
    left: bool = False

    def heard(self, sign: Sign) -> None:
        if sign.meetings != self.sign.meetings:
            self.late = 0.0
        self.sign, self.silent = sign, 0.0


@functools.cache
def watch() -> Watch:
    """The watch of this process. There is one, as there is one process group."""
    return Watch()


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


class Watch:
    """Ends this process if another rank is lost, or the launcher. Does nothing before `begin`, and
    nothing in a process that is alone and has no launcher: its shell may end before it."""

    def __init__(self) -> None:
        self.rank, self.world, self.local = 0, 1, 0
        self.verdict: Verdict | None = None
        self._place = "its start"
        self._launcher: int | None = None
        self._timeout: float | None = None
        self._grace = SHORT_GRACE
        self._meetings = 0
        self._token = ""
        self._hub: tuple[str, int, Sign] | None = None  # where rank 0 listens
        self._listener: socket.socket | None = None
        self._peers: dict[int, _Peer] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._known, self._told = threading.Event(), threading.Event()
        self._over = False  # this rank ends
        self._finished = asyncio.Event()  # it ends well

    # In the main thread --------------------------------------------------------------------------

    def begin(self, timeout: float | None) -> None:
        """Start, right after the process group is made; a collective operation. timeout: seconds
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
            box: list[Any] = [self._listen() if self.rank == 0 else None]
            torch.distributed.broadcast_object_list(box)
            self._token, host, port, sign = box[0]
            self._hub = host, port, Sign(**sign)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live()), name="ranks", daemon=True
        )
        self._thread.start()

    def at(self, what: str, update: int | None = None) -> None:
        """What this rank is at, for errors: "scoring", of an update."""
        self._place = what if update is None else f"{what} (update {update})"
        if self._loop and self._loop.is_running():  # now: it may not live until the next beat
            self._loop.call_soon_threadsafe(self._send_sign)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside the `with`, a collective operation that fails raises LostRank."""
        try:
            yield
        except RuntimeError as error:
            if found := self.explain(error):
                raise found from error
            raise

    def explain(self, error: BaseException) -> LostRank | None:
        """The error about another rank that this one follows from; None if it does not."""
        if self.world == 1 or isinstance(error, LostRank) or not _collective(error):
            return None
        if self._known.wait(PATIENCE) and self.verdict:
            return LostRank(self.verdict.text)
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        return LostRank(f"another rank is gone, and it is not known which: {first}")

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
        self._over = True
        if self._loop and self._loop.is_running():
            message = {"left": code, "why": why[:2000], "place": self._place}
            sent = asyncio.run_coroutine_threadsafe(self._send_last(message), self._loop)
            with suppress(FutureTimeout):
                sent.result(2 * BEAT)
        if code == 0:  # this process may make another group, which has its own watch
            if self._thread and self._loop:
                with suppress(RuntimeError):  # the thread has ended: rank 0 has left
                    self._loop.call_soon_threadsafe(self._finished.set)
                self._thread.join(2 * BEAT)
            watch.cache_clear()

    # In the thread -------------------------------------------------------------------------------

    def _listen(self) -> tuple[str, str, int, dict[str, Any]]:
        """Open rank 0's port -> token, host, port, and its first sign of life."""
        host = os.environ.get("MASTER_ADDR") or "localhost"
        alone = os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)
        if alone or host == "localhost" or host.startswith("127."):
            host = LOOPBACK
            self._listener = socket.create_server((LOOPBACK, 0))
        elif socket.has_dualstack_ipv6():
            self._listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._listener = socket.create_server(("", 0))
        self._token = secrets.token_hex(16)
        return self._token, host, self._listener.getsockname()[1], asdict(self._sign())

    async def _live(self) -> None:
        self._loop, follower = asyncio.get_running_loop(), None
        if self._listener:
            await asyncio.start_server(self._serve, sock=self._listener)
        elif self._hub:
            follower = asyncio.create_task(self._follow(*self._hub))
        last = time.monotonic()
        while not self._finished.is_set():
            if follower and follower.done() and not (self._launcher or self.verdict):
                return  # rank 0 has left
            # a machine that sleeps, or a job that is suspended, is not late
            now = time.monotonic()
            self._look(min(now - last, 5 * BEAT))
            last = now
            self._send_sign()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._finished.wait(), BEAT)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Rank 0: a connection, until this thread ends. Python 3.11 logs a traceback for a handler
        that is cancelled then."""
        with suppress(asyncio.CancelledError):
            await self._welcome(reader, writer)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Rank 0: a connection from another rank, which knows the token."""
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), 30 * BEAT))
            if not hmac.compare_digest(str(hello["token"]), self._token):
                raise ValueError("not of this run")
            peer = _Peer(Sign(**hello["sign"]), writer)
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError):
            writer.close()
            return
        await self._hear(peer, reader)

    async def _follow(self, host: str, port: int, sign: Sign) -> None:
        """Any other rank: the connection to rank 0."""
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            log.warning(
                "rank %d cannot reach rank 0 at %s:%d (%s): a rank that dies or hangs may end the "
                "run late, and unnamed", self.rank, host, port, error,
            )  # fmt: skip
            return
        hello = {"token": self._token, "sign": asdict(self._sign())}
        writer.write(json.dumps(hello).encode() + b"\n")
        await self._hear(_Peer(sign, writer), reader)

    async def _hear(self, peer: _Peer, reader: asyncio.StreamReader) -> None:
        """What another rank says, until its end."""
        assert peer.writer
        rank = peer.sign.rank
        self._peers[rank] = peer
        _keep_alive(peer.writer.get_extra_info("socket"))
        with suppress(OSError, ValueError, TypeError):
            while line := await reader.readline():
                self._take(peer, json.loads(line))
        del self._peers[rank]
        peer.writer.close()
        self._look_for_launcher()  # which may have been the first to go
        if not peer.left:
            self._conclude(
                f"{peer.sign.name} died in {peer.sign.place}: its process ended without a word. "
                "SIGKILL does that, also from the kernel when memory is short: its own messages or "
                f"`dmesg` may tell. {AGAIN}",
                rank,
            )

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "sign" in message:
            peer.heard(Sign(**message["sign"]))
        elif "end" in message:
            self._conclude(**message["end"])
        elif "left" in message:
            peer.left = True
            if message["left"]:
                text = f"{peer.sign.name} stopped in {message['place']}: {message['why']}"
                self._conclude(text, peer.sign.rank, stopped=True)

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            if peer.writer and peer.silent < 10 * BEAT:  # one that is stopped reads nothing
                peer.writer.write(line)

    def _send_sign(self) -> None:
        self._send({"sign": asdict(self._sign())})

    async def _send_last(self, message: dict[str, Any]) -> None:
        self._send(message)
        for peer in list(self._peers.values()):
            with suppress(OSError):
                if peer.writer:
                    await peer.writer.drain()

    def _sign(self) -> Sign:
        if not self._over:  # nothing of torch is called while the process group ends
            with suppress(RuntimeError, ValueError, AttributeError):  # no group, or no numbers
                group: Any = c10d._get_default_group()  # Any: torch's stubs lack the method
                self._meetings = group._get_sequence_number_for_group()
        return Sign(self.rank, socket.gethostname(), os.getpid(), self._place, self._meetings)

    # Judging -------------------------------------------------------------------------------------

    def _look(self, elapsed: float) -> None:
        """Is the launcher there, and does a rank hang? elapsed: seconds since the last look."""
        self._look_for_launcher()
        own = self._peers.setdefault(self.rank, _Peer(self._sign()))
        for peer in self._peers.values():
            peer.silent += elapsed
        own.heard(self._sign())
        ahead = max(peer.sign.meetings for peer in self._peers.values())
        for peer in self._peers.values():
            peer.late = peer.late + elapsed if peer.sign.meetings < ahead else 0.0
        worst = max(self._peers.values(), key=lambda peer: max(peer.late, peer.silent))
        if self._timeout is not None and max(worst.late, worst.silent) > self._timeout:
            self._conclude(
                f"{worst.sign.name} hangs in {worst.sign.place}: the others have waited "
                f"{self._timeout:g} s for it, as long as train.timeout_seconds allows (or "
                f"timeout_seconds of an evaluation). Allow more if it was at work. {AGAIN}",
                worst.sign.rank,
            )

    def _look_for_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            text = f"the launcher (process {self._launcher}) is gone, and nobody watches this run."
            self.verdict = Verdict(f"{text} {AGAIN}", rank=-1)
            self._exit()

    def _conclude(self, text: str, rank: int, stopped: bool = False) -> None:
        if self.verdict or self._over:
            return
        self.verdict = Verdict(text, rank, stopped)
        self._known.set()
        self._send({"end": asdict(self.verdict)})
        if not stopped:  # else all may have one reason, and say it
            self.tell(text)
        grace = STOP_GRACE if stopped else self._grace
        assert self._loop
        self._loop.call_later(SHORT_GRACE if rank == self.rank else grace, self._exit)

    def _exit(self) -> None:
        """The end, whatever the main thread waits for. What is on disk is whole at any moment."""
        assert self.verdict
        self.tell(self.verdict.text)
        os._exit(1)


def _collective(error: BaseException) -> bool:
    """Whether a collective operation raised it; torch has no type for gloo's errors."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )


def _keep_alive(connection: socket.socket) -> None:
    """The kernel closes it if the other machine answers nothing for VANISHED seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", round(1000 * VANISHED)),
    ):  # fmt: skip
        if (option := getattr(socket, name, None)) is not None:  # not every system has them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
