"""One thread that makes calls one after the other: rewards are not thread safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from flowalign.devices import Beside


class Worker:
    """Calls in the order of `submit`, in a daemon thread: one that hangs keeps nobody from ending.

    Whatever a call raises, KeyboardInterrupt and SystemExit included, is raised by its future.
    The thread's current device is that of the thread that makes the worker. It works on a stream of
    its own: a call sees all that its submitter has started, and its result is complete.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any], Any] | None] = SimpleQueue()
        self._beside = Beside()
        self._since: float | None = None
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """The future result of a call; it can be cancelled until its turn comes."""
        future: Future[Any] = Future()
        self._jobs.put((future, call, self._beside.mark()))
        return future

    def close(self) -> None:
        """End the thread, once what was submitted is done or cancelled; does not wait."""
        self._jobs.put(None)

    @property
    def busy(self) -> float:
        """For how many seconds the call under way has been; 0 if there is none."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def _work(self) -> None:
        self._beside.enter()
        while (job := self._jobs.get()) is not None:
            future, call, mark = job
            if not future.set_running_or_notify_cancel():
                continue
            self._since = time.monotonic()
            try:
                self._beside.follow(mark)
                result = call()
                self._beside.settle()
            except BaseException as error:
                self._since = None
                future.set_exception(error)
            else:
                self._since = None
                future.set_result(result)
            del job, future, call  # not kept until the next one comes
