"""Processes of the library, forked from one that has imported it: each saves six CPU-seconds.

A forked process has its own folder, environment, arguments and streams, runs a script or a module
as `python SCRIPT` or `python -m MODULE` does, and ends with its exit status. Tests of the imports
themselves and of Python's own end start real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

ROOT = Path(__file__).parent.parent
PRELOADED = ["fakes", "flowalign.eval.evaluation", "flowalign.commands.cli"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


class Forked:
    """`python ARGUMENTS`, with the methods of a `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        folder = tempfile.mkdtemp(prefix="forked_")
        self._streams = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in self._streams:
            path.touch()
        given = (self.args, dict(os.environ if env is None else env), str(cwd or Path.cwd()))
        self._process: BaseProcess = CONTEXT.Process(target=_become, args=(*given, self._streams))
        with _quiet_main():
            start_server()
            self._process.start()
        self.pid, self.sentinel = self._process.pid or 0, self._process.sentinel

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, *self.said())
        return self.returncode

    def said(self) -> tuple[str, str]:
        """Its output and its errors so far."""
        out, err = (path.read_text(errors="replace") for path in self._streams)
        return out, err

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.said()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and was not polled since
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()


def run(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    seconds: float = 300,
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` until it ends."""
    with Forked(arguments, env, cwd) as process:
        out, err = process.communicate(seconds)
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def ranks(
    arguments: Sequence[object], processes: int = 2, env: Mapping[str, str] | None = None
) -> list[Forked]:
    """The same command as so many ranks on the CPU, as `srun` starts them: without a launcher."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = dict(os.environ if env is None else env) | {
        "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    each = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes))
    return [Forked(arguments, shared | own) for own in each]


def launch(
    *command: object, processes: int = 2, seconds: float = 500, strategy: str = "ddp_2cpu"
) -> subprocess.CompletedProcess[str]:
    """A script or module on so many ranks, in the environment that `accelerate launch` makes of a
    file of configs/accelerate. As under the launcher, one rank that fails ends the others."""
    file = ROOT / "configs" / "accelerate" / f"{strategy}.yaml"
    given = ["--config_file", str(file), "--num_processes", str(processes), "train.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(given))
    started = ranks(command, processes, prepare_multi_gpu_env(args))
    end, patience = time.monotonic() + seconds, 30  # seconds, as the launcher has
    code = 0  # of the rank that failed first
    try:
        while None in (codes := [rank.poll() for rank in started]):
            code = code or next(filter(None, codes), 0)
            if code:
                patience -= 1
                for rank in started:
                    rank.send_signal(signal.SIGTERM if patience > 0 else signal.SIGKILL)
            said = [rank.said() for rank in started]
            assert time.monotonic() < end, f"not done within {seconds} s: {said}"
            wait([rank.sentinel for rank in started if rank.poll() is None], timeout=1)
    finally:
        for rank in started:
            rank.__exit__()
    out, err = ("".join(texts) for texts in zip(*(r.said() for r in started), strict=True))
    code = code or next(filter(None, codes), 0)
    return subprocess.CompletedProcess(list(map(str, command)), code, out, err)


@functools.cache
def start_server() -> None:
    """Start the process that the others are forked from. Until Python 3.12 it does not get this
    process's sys.path, and silently leaves out what it cannot import."""
    before = os.environ.copy()
    paths = [str(ROOT / "tests"), str(ROOT), before.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


@contextmanager
def _quiet_main() -> Iterator[None]:
    """Inside the `with`, a new process does not import this one's main module (pytest's)."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = type(sys)("__main__")
    yield
    sys.modules["__main__"] = main


def _become(
    arguments: Sequence[str], env: dict[str, str], folder: str, streams: Sequence[Path]
) -> NoReturn:
    """In the new process: be the command, and end as Python does."""
    import torch
    from huggingface_hub import constants

    code = 1
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    constants.HF_HUB_OFFLINE = env.get("HF_HUB_OFFLINE") == "1"  # else read at the import
    os.chdir(folder)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            sys.path.insert(0, folder)
            sys.modules.pop(arguments[1], None)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
