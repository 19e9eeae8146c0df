"""The frame of every command: refusals, early ends, and what is kept off stderr."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from typing import Any, NoReturn

from flowalign.system import packages
from flowalign.system.escape import harmless
from flowalign.system.signals import CODES, Interrupted, interruptible

LOG_LEVELS = {  # read by the libraries at import; processes that are started inherit them
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # CPU threads wait for each other without spinning. With another process on two cores an
    # update of the demo takes 3 seconds instead of 100
    "OMP_WAIT_POLICY": "PASSIVE",
}
Target = Callable[[Any], Any]
"""From arguments, or what another target made of them, to that or an exit status."""
QUIET_LIBRARIES = (
    "accelerate", "bitsandbytes", "diffusers", "fastapi", "huggingface_hub",
    "open_clip", "peft", "starlette", "torch", "torchvision", "transformers", "triton", "uvicorn",
)  # fmt: skip


def run_command(name: str, argv: Sequence[str], *targets: str) -> int:
    """Run the command `flowalign NAME`; returns its exit status: 2 if a package is missing, 130
    after Ctrl-C, 143 after SIGTERM, 75 after SIGUSR1, each with one line on stderr; 141 without a
    line if nothing reads its output any more (`| head`).

    targets: "module:function", each called with the result of the one before, until one returns the
    exit status. A target is imported when its turn comes, so that the first can refuse or print
    --help before the heavy libraries are imported.
    """
    try:
        with interruptible(), silenced():
            status: Any = list(argv)
            for target in targets:
                status = resolve_name(target)(status)
                if isinstance(status, int):
                    break
            sys.stdout.flush()  # the reader may be gone: fail here, not while Python ends
            return status
    except packages.MissingPackage as error:
        print(f"flowalign {name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        return 128 + signal.SIGPIPE
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # how rich's console takes that
            return 128 + signal.SIGPIPE
        raise
    except KeyboardInterrupt as error:
        print(f"flowalign {name}: interrupted ({str(error) or 'SIGINT'})", file=sys.stderr)
        return error.code if isinstance(error, Interrupted) else CODES[signal.SIGINT]


def refusing(name: str) -> Callable[[Target], Target]:
    """Decorate a target of `flowalign NAME`: a ValueError, OSError or ImportError, which says what
    is wrong with the command, becomes a line on stderr and exit status 2."""

    def decorate(command: Target) -> Target:
        @functools.wraps(command)
        def guarded(argument: Any) -> Any:
            try:
                return command(argument)
            except (ValueError, OSError, ImportError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                print(harmless(f"flowalign {name}: {error}"), file=sys.stderr)
                return 2

        return guarded

    return decorate


def end_process(status: int) -> NoReturn:
    """End the process now, after its exit functions, but without Python's own end, which would wait
    forever for a thread that hangs in a reward's pool. Python's end also kills a thread that
    returns from torch's C++ (gloo has some). That aborts the process, and other ranks would take it
    for a failure."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # of a terminal that is gone
            stream.flush()
    os._exit(status)


@contextmanager
def silenced() -> Iterator[None]:
    """Inside the `with`, notices and Python warnings of these libraries are not shown. Errors are,
    and warnings of any other code: ours, and the user's rewards. Enter it before the libraries are
    imported. Settings of the environment, `python -W` or an earlier filter come first."""
    added = [name for name in LOG_LEVELS if name not in os.environ]
    os.environ.update({name: LOG_LEVELS[name] for name in added})
    try:
        with warnings.catch_warnings():
            module = rf"({'|'.join(QUIET_LIBRARIES)})(\.|$)"
            warnings.filterwarnings("ignore", module=module, append=True)
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)
