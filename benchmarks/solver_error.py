"""How far few steps of a solver are from the solution: `python benchmarks/solver_error.py`.

On the tiny base model: the mean squared error of the final latents against those of 100 Euler steps
from the same noise, for equal numbers of forward passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import ModelConfig
from flowalign.training.data import load_prompts
from flowalign.training.report.progress import quiet
from flowalign.training.rollout import Noise, clean_schedule, places, sample
from flowalign.training.solvers import forwards

TASKS = ("geneval", "ocr", "preference")
RUNS = [
    *(f"euler:{steps}" for steps in (5, 7, 9, 10, 14, 19, 20, 40)),
    *(f"dpm2:{steps}" for steps in (5, 7, 9, 10, 14, 19, 20, 40)),
]


def table(runs: Sequence[str] = RUNS, prompts: int = 16, guidance: float = 1.0) -> dict[str, float]:
    """{solver:steps: mean squared latent error}, over so many prompts of each task."""
    model = ModelConfig(id="tiny", height=64, width=64, max_sequence_length=16)
    backbone = Backbone.load(model)
    texts = [load_prompts(f"tiny/{task}_val", task).select(range(prompts)) for task in TASKS]

    def latents(solver: str, steps: int) -> Tensor:
        schedule = clean_schedule(backbone, steps, solver=solver)
        ends = [
            sample(
                backbone, batch, schedule, guidance=guidance, noise=Noise((7, number)),
                places=places(prompts, 1), batch_size=64, decode=False, finish=True,
            ).latents
            for number, batch in enumerate(texts)
        ]  # fmt: skip
        return torch.cat([end for end in ends if end is not None])

    exact = latents("euler", 100)
    parts = (run.split(":") for run in runs)
    return {
        f"{solver}:{steps}": float(((latents(solver, int(steps)) - exact) ** 2).mean())
        for solver, steps in parts
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="of each of the three tasks")
    parser.add_argument("--guidance", type=float, default=1.0, help="CFG scale")
    args = parser.parse_args()
    quiet()
    print("| solver | steps | forward passes | mean squared latent error |\n|---|---|---|---|")
    for run, error in table(prompts=args.prompts, guidance=args.guidance).items():
        solver, steps = run.split(":")
        print(f"| {solver} | {steps} | {forwards(solver, int(steps))} | {error:.2e} |")
