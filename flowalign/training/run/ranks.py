"""Which rank ended a run, where and why.

Each rank writes its phase, and the error that it ends with, into the store of the process group,
as torch names no rank where a collective operation fails. Over NCCL it may not fail: then torchrun
ends the other ranks, or torch after its timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING in its docs).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch.distributed import distributed_c10d as c10d


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
    notes: list[str] = []
    lost = LostRank()
    # in a thread, as the process that serves the store may be stopped, and never answer
    (reader := threading.Thread(target=_read, args=(notes, lost), daemon=True)).start()
    reader.join(5)
    lost.args = (
        f"a rank is gone or hangs: {'; '.join(notes) or 'the store of their phases is gone, too'}. "
        f"torch: {str(error).splitlines()[0]}. To continue, give the same command again, for "
        "training with --resume.",
    )
    return lost


def _read(notes: list[str], lost: LostRank) -> None:
    """Add what each rank has written, and whether this one reads it first."""
    with suppress(RuntimeError):  # the store is gone with the process that served it
        store = c10d._get_default_store()
        lost.first = store.add("flowalign/readers", 1) == 1
        for rank in range(torch.distributed.get_world_size()):
            keys = [k for end in ("", "/error") if store.check([k := f"flowalign/{rank}{end}"])]
            notes.append(f"rank {rank}" + "".join(store.get(key).decode() for key in keys))


def _write(text: str, key: str = "") -> None:
    with suppress(RuntimeError, ValueError):  # the store is gone, or there is no process group
        key = f"flowalign/{torch.distributed.get_rank()}{key}"
        c10d._get_default_store().set(key, text)  # it waits for no answer
