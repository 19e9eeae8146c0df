"""flowalign train for a test: FSDP2 and DeepSpeed in processes of a machine without a GPU.

accelerate starts either on GPUs only, by what PartialState says of the machine; here PartialState
is told otherwise, and everything after it is accelerate's, torch's and DeepSpeed's own code, on CPU
tensors over gloo.
"""

import os
import sys

from accelerate import PartialState
from accelerate.utils import DistributedType


def pretend() -> None:
    """Make this process's accelerate take its CPU for a GPU."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        PartialState(backend="gloo")
    elif os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    pretend()
    from flowalign.train import main

    sys.exit(main())
