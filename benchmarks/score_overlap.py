"""What scoring beside sampling saves: seconds from the start of a rollout to its scores.

    python benchmarks/score_overlap.py --repeats 5

The tiny base samples 64 images in batches of 16; the reward does nothing but wait, as a remote one
does, for as long an image as sampling one takes. Both ways in turns, medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flowalign import rewards
from flowalign.commands import build
from flowalign.config import load
from flowalign.training.report.progress import quiet
from flowalign.types import Scores

PRESET = "configs/tiny/teacher_preference.yaml"


class Waiting:
    """Brightness, after `seconds` an image."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        time.sleep(self.seconds * len(images))
        return Scores.of(images.mean((1, 2, 3)))


def main() -> None:
    """Time both ways and print their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    quiet()
    reward = Waiting()
    rewards.register("waiting")(lambda: reward)
    with tempfile.TemporaryDirectory() as folder:
        settings = ["rollout.prompts=8", "rollout.batch_size=16", "evaluation=null"]
        settings += ["tasks.0.reward={name: waiting}"]
        loop, *_ = build.wire(load(PRESET, [f"output={folder}", "train.trackers=[]", *settings]))
    algorithm = loop.algorithm
    on_images, found = algorithm.on_images, {"after": [], "beside": []}
    for repeat in range(args.repeats + 1):
        for way in found:
            algorithm.on_images = on_images if way == "beside" else None
            began = time.perf_counter()
            rollout = loop.rollout(repeat)
            sampled = time.perf_counter() - began
            algorithm.prepare(rollout, repeat)
            if repeat:
                found[way].append(time.perf_counter() - began)
            elif way == "after":
                reward.seconds = sampled / len(rollout)
    after, beside = (statistics.median(found[way]) for way in ("after", "beside"))
    print(f"after {after:.2f} s, beside {beside:.2f} s: x {beside / after:.2f}")


if __name__ == "__main__":
    main()
