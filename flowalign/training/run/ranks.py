"""What the ranks of a run say when one of them, or their launcher, is gone.

Each rank writes its phase, and the error that it ends with, into the store of the process group,
as torch names no rank where a collective operation fails. Over NCCL it may not fail: the launcher
ends the other ranks, or torch after its timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING in its docs).
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch.distributed import distributed_c10d as c10d

LOOK = 1.0  # seconds between two looks for the launcher
AGAIN = "To continue, give the same command again, for training with --resume."


class LostRank(RuntimeError):
    """The run ends because of another rank: the phases of all, torch's error, what to do."""

    first = True  # whether no other rank has said so


@contextmanager
def phase(name: str, update: int | None = None) -> Iterator[None]:
    """Around a part of a run: what other ranks say of this one if it is lost there. A collective
    operation that fails raises LostRank. The name stays until the next one."""
    name = name if update is None else f"{name} (update {update})"
    _write(f" (process {os.getpid()} on {socket.gethostname()}) in {name}")
    try:
        yield
    except RuntimeError as error:
        if lost := explain(error):
            raise lost from error
        raise


def leave(why: str) -> None:
    """Tell the others that this rank ends with an error of its own."""
    _write(f", stopped by {why[:2000]}", "/error")


def explain(error: BaseException) -> LostRank | None:
    """The error about another rank that this one follows from; None if it does not."""
    collective = isinstance(error, torch.distributed.DistError) or (  # gloo's errors have no type
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    if alone or not collective or isinstance(error, LostRank):
        return None
    time.sleep(2 * LOOK)  # if the launcher is gone, its thread ends this process now
    said: list[str] = []
    (reader := threading.Thread(target=_read, args=(said,), daemon=True)).start()
    reader.join(5)  # seconds: the process that serves the store may be stopped
    *notes, readers = said or ["the store, served by rank 0 or the launcher, does not answer", ""]
    of_torch = str(error).partition("\n")[0]
    lost = LostRank(f"a rank is gone or hangs: {'; '.join(notes)}. torch: {of_torch}. {AGAIN}")
    lost.first = readers == "1" or (not readers and torch.distributed.get_rank() < 2)
    return lost


def _write(text: str, key: str = "") -> None:
    with suppress(RuntimeError, ValueError):  # the store is gone, or there is no process group
        key = f"flowalign/{torch.distributed.get_rank()}{key}"
        c10d._get_default_store().set(key, text)  # it waits for no answer


def _read(said: list[str]) -> None:
    """Add what each rank has written, and the number of ranks that have read it."""
    with suppress(RuntimeError):  # the store is gone
        store, notes = c10d._get_default_store(), []
        for rank in range(torch.distributed.get_world_size()):
            keys = [k for end in ("", "/error") if store.check([k := f"flowalign/{rank}{end}"])]
            notes.append(f"rank {rank}" + "".join(store.get(key).decode() for key in keys))
        said += [*notes, str(store.add("flowalign/readers", 1))]


@functools.cache
def follow_launcher() -> None:
    """Start a thread that ends this process, which holds a GPU, soon after its launcher."""
    launcher = os.getppid()

    def follow() -> None:
        while os.getppid() == launcher:
            time.sleep(LOOK)
        if os.environ.get("RANK") == "0":
            with suppress(OSError, ValueError):  # a terminal that is gone
                print(f"stopped: the launcher (process {launcher}) ended. {AGAIN}", file=sys.stderr)
        os._exit(1)  # whatever the main thread waits for; files are complete at any moment

    if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun; a shell may end before its process
        threading.Thread(target=follow, name="launcher", daemon=True).start()
