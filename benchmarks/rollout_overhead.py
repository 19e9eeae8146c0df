"""What sampling costs beyond the transformer: the time of `sample` over its bare forwards.

    python benchmarks/rollout_overhead.py --model tiny

The forwards have the shapes and the number of the rollout's (classifier-free guidance included).
Everything is measured in turn, repeat by repeat, and the medians are compared, so that a load on
the machine meets all alike; on a busy one take `--clock cpu`, the time of this process alone.
Wanted: a ratio of at most 1.10 without decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from flowalign.backbone import DTYPES, Backbone, load_pipeline
from flowalign.config import SD3_ATTENTION
from flowalign.rollout import Noise, Schedule, places, sample
from flowalign.types import PromptBatch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--model", default="tiny", help="`tiny`, a folder or a Hub id")
    found.add_argument("--size", type=int, default=64, help="pixels")
    found.add_argument("--batch", type=int, default=32, help="images")
    found.add_argument("--copies", type=int, default=4, help="images of a prompt")
    found.add_argument("--steps", type=int, default=10, help="denoising steps")
    found.add_argument("--guidance", type=float, default=4.5, help="CFG scale")
    found.add_argument("--tokens", type=int, default=16, help="T5 tokens")
    found.add_argument("--repeats", type=int, default=9, help="medians over so many")
    found.add_argument("--dtype", choices=DTYPES, default="float32")
    found.add_argument("--device", default="cpu")
    found.add_argument("--clock", choices=CLOCKS, default="wall")
    return found


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    args = parser().parse_args()
    pipe = load_pipeline(args.model, dtype=DTYPES[args.dtype])
    backbone = Backbone(pipe, height=args.size, width=args.size,
                        max_sequence_length=args.tokens, device=args.device)  # fmt: skip
    backbone.add_adapter("student", rank=16, alpha=32, targets=SD3_ATTENTION)
    prompts = [
        f'a red sign that says "{chr(65 + i % 26)}"' for i in range(args.batch // args.copies)
    ]
    where = places(len(prompts), args.copies)
    batch = PromptBatch(prompts, ["task"] * len(prompts), [{} for _ in prompts])
    batch = batch.select([prompt for prompt, _ in where])
    schedule = Schedule(backbone.sigmas(args.steps), "sde", 0.7, (0, args.steps - 1))

    def rollout(decode: bool) -> None:
        sample(backbone, batch, schedule, guidance=args.guidance, noise=Noise((0,)),
               places=where, batch_size=args.batch, decode=decode)  # fmt: skip

    rows = args.batch * (2 if args.guidance != 1 else 1)
    cond = backbone.encode(prompts[:1], copies=rows)
    embeds, pooled = cond.embeds[cond.index], cond.pooled[cond.index]
    x = torch.randn(rows, *backbone.latent_shape, dtype=backbone.dtype, device=args.device)
    sigma = torch.full((rows,), 500.0, device=args.device)

    def forwards() -> None:
        for _ in range(args.steps):
            backbone.transformer(x, embeds, pooled, sigma, return_dict=False)

    measured = {
        "bare forwards": forwards,
        "sample, no decode": lambda: rollout(False),
        "sample and decode": lambda: rollout(True),
    }
    medians = interleaved(measured, args.repeats, args.device, CLOCKS[args.clock])
    bare = medians["bare forwards"]
    for name, seconds in medians.items():
        print(f"{name:20} {seconds * 1e3:9.1f} ms   x {seconds / bare:.3f}")


def interleaved(
    measured: dict[str, Callable[[], None]], repeats: int, device: str, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each, run in turn; the first round warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repeats + 1):
        for name, run in measured.items():
            began = clock()
            run()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times[name].append(clock() - began)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


if __name__ == "__main__":
    main()
