"""Pairs of images of the tiny world, of which its PickScore chooses one: for configs/tiny/dpo.yaml.

    python benchmarks/pairs.py outputs/tiny/pairs

Two images of each of 400 training prompts, by the LoRA that the teacher starts from.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flowalign import rewards
from flowalign.backbone import Backbone
from flowalign.commands.sample import write_images
from flowalign.commands.vote import Ballot
from flowalign.config import ModelConfig, SamplingConfig
from flowalign.system.images import read_image, stacked
from flowalign.training.data import load_prompts, subset
from flowalign.training.rollout import generate

MODEL = ModelConfig(id="tiny", height=96, width=96, max_sequence_length=14)
SAMPLING = SamplingConfig(steps=10, guidance=1.0, seed=0, batch_size=64)


def main(folder: Path, count: int) -> None:
    prompts = subset(load_prompts("tiny/preference_train", "preference"), count)
    backbone = Backbone.load(MODEL)
    backbone.load_adapter("guided", "tiny/guided", frozen=True)
    with backbone.adapter("guided"):
        images = generate(backbone, prompts, SAMPLING, copies=2)
    write_images(folder, images, prompts.prompts, SAMPLING.seed)
    reward, ballot = rewards.build("pickscore", model="tiny", normalizer=28), Ballot(folder)
    better, worse = [], []
    for number, pair in enumerate(ballot.pairs):
        seen = stacked([read_image(folder / image["file"]) for image in pair])
        value = reward(seen, [pair[0]["prompt"]] * 2, [{}] * 2).value
        ballot.vote(number, 2 if value.argmax() else 1)
        better.append(float(value.max()))
        worse.append(float(value.min()))
    means = [sum(values) / len(values) for values in (better, worse)]
    print(f"{len(better)} pairs; mean PickScore of the chosen and the rejected: {means}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 400)
