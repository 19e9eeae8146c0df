"""How much the gradients of independent rollouts agree, by the number of noise levels.

    python benchmarks/gradient_noise.py configs/tiny/teacher_preference_nft.yaml --states 4 8

Samples `--rollouts` rollouts of the untrained student, and takes the gradient of each. Their mean
cosine c is the share of a gradient that is signal: c = |E g|^2 / E|g|^2. Prints it for each number
of levels, with the forward passes an image and update that a gradient costs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

import torch
from teacher_methods import passes
from torch import Tensor

from flowalign.commands import build
from flowalign.config import ForwardStage, load
from flowalign.training.loop import Loop
from flowalign.training.run.processes import Means
from flowalign.types import Rollout


def gradient(loop: Loop, rollout: Rollout, update: int) -> Tensor:
    """That of the policy loss on a rollout, all parameters side by side."""
    prepared = loop.algorithm.prepare(rollout, update)
    loop.step.accumulate(prepared, prepared.keep, len(rollout), Means())
    found = torch.cat([p.grad.flatten() for p in loop.parameters if p.grad is not None])
    loop.step.optimizer.zero_grad(set_to_none=True)
    return found


def agreement(gradients: Sequence[Tensor]) -> float:
    """|E g|^2 / E|g|^2, from pairs of different gradients."""
    stacked = torch.stack(list(gradients))
    products = stacked @ stacked.T
    own = products.diag()
    count = len(own)
    return float((products.sum() - own.sum()) / (count - 1) / own.sum())


def main() -> None:
    """Print a line for each number of noise levels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--states", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rollouts", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"output={folder}", "alarm=null", "train.trackers=[]"]
        config = load(args.config, changes, stage=ForwardStage)
        sampler, *_ = build.wire(config)
        rollouts = [sampler.rollout(update) for update in range(args.rollouts)]
        print("| noise levels | forward passes an image and update | agreement |\n|---|---|---|")
        for count in args.states:
            section = config.forward.model_copy(update={"states": count})
            changed = config.model_copy(update={config.stage: section})
            loop, *_ = build.wire(changed)  # the same weights, as the seed is the same
            found = [gradient(loop, rollout, i) for i, rollout in enumerate(rollouts)]
            print(f"| {count} | {passes(changed):.0f} | {agreement(found):.3f} |", flush=True)


if __name__ == "__main__":
    main()
