"""Runs of `flowalign train`, one after the other (--then), in processes on a CPU, for the tests.

accelerate starts FSDP2 on GPUs only, by what PartialState says of the machine. Here
PartialState is told otherwise; all that follows is accelerate's and torch's own code, on
CPU tensors, over gloo. A run with model.compile traces its blocks, and generates no code.
"""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType


def pretend() -> None:
    """Make this process's accelerate take its CPU for a GPU."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def traced(graph: Any, inputs: Any) -> Any:
    """A backend of torch.compile that generates no code, and says that it was asked."""
    print("a graph was traced", file=sys.stderr)
    return graph.forward


def run(argv: list[str]) -> None:
    """As train.main, but that the processes stay together, and errors are raised."""
    from flowalign.commands import run, train
    from flowalign.config import Job, load

    args = train.parser().parse_args(argv)
    run.run_job(load(args.config, args.overrides, stage=Job), Path(args.config).parent, args.resume)


if __name__ == "__main__":
    from flowalign.backbone.base import Backbone
    from flowalign.training.run import processes

    pretend()
    Backbone.compile.__defaults__ = (traced,)
    for then, argv in itertools.groupby(sys.argv[1:], lambda arg: arg == "--then"):
        if not then:
            run(list(argv))
    processes.part()
