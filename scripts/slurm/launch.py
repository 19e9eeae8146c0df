"""`accelerate launch` for a queue: python scripts/slurm/launch.py [its options] train.py ...

SIGUSR1 is passed on to the processes, which save and end; accelerate's launcher would die of it and
leave them alone. The exit status is that of the processes: accelerate's is 1 for any.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

UNFINISHED = 75  # of flowalign: start it again with --resume
GRACE = 5.0  # seconds


def forward(number: int, frame: object) -> None:
    """Send a signal to the processes that were started."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def main() -> int:
    """The exit status: 75 if a process is not finished, else that of the first that failed; 128 + n
    after another signal or if one was ended by it."""
    arguments = launch_command_parser().parse_args()
    signal.signal(signal.SIGUSR1, forward)
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        failures = {failure.exitcode for failure in error.failures.values()}
        status = UNFINISHED if UNFINISHED in failures else error.get_first_failure()[1].exitcode
    except subprocess.CalledProcessError as error:  # a single process
        status = error.returncode
    except SignalException as error:
        status = 128 + error.sigval
    else:
        status = 0
    if status == UNFINISHED and (arguments.num_machines or 1) > 1:
        # those of the other nodes end as well, and srun kills what is left when the first has ended
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(GRACE)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
