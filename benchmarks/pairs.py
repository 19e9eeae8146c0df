"""Pairs of images of the tiny world, of which its PickScore chooses one: for configs/tiny/dpo.yaml.

    python benchmarks/pairs.py outputs/tiny/pairs ["a picture of"]

Of each of 400 training prompts ("a picture of ...") two images by the LoRA that the teacher starts
from. The second one is asked for in other words, by default as "a photo of ...": two images of the
same words are both line art, so that neither is what the judge prefers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flowalign import rewards
from flowalign.backbone import Backbone
from flowalign.commands.sample import write_images
from flowalign.commands.vote import Ballot
from flowalign.config import ModelConfig, SamplingConfig
from flowalign.system.images import read_image, stacked
from flowalign.training.data import load_prompts, subset
from flowalign.training.rollout import generate
from flowalign.types import PromptBatch

MODEL = ModelConfig(id="tiny", height=96, width=96, max_sequence_length=14)
SAMPLING = SamplingConfig(steps=10, guidance=1.0, seed=0, batch_size=64)


def main(folder: Path, words: str) -> None:
    prompts = subset(load_prompts("tiny/preference_train", "preference"), 400).prompts
    asked = [text for p in prompts for text in (p, p.replace("a picture of", words))]
    backbone = Backbone.load(MODEL)
    backbone.load_adapter("guided", "tiny/guided", frozen=True)
    with backbone.adapter("guided"):
        batch = PromptBatch(asked, ["preference"] * len(asked), [{}] * len(asked))
        images = generate(backbone, batch, SAMPLING)
    write_images(folder, images, [p for p in prompts for _ in range(2)], SAMPLING.seed)
    reward = rewards.build("pickscore", model="tiny", normalizer=28)
    ballot = Ballot(folder)
    better, worse = 0.0, 0.0
    for number, pair in enumerate(ballot.pairs):
        seen = stacked([read_image(folder / image["file"]) for image in pair])
        value = reward(seen, [pair[0]["prompt"]] * 2, [{}] * 2).value
        ballot.vote(number, 2 if value.argmax() else 1)
        better, worse = better + float(value.max()), worse + float(value.min())
    count = len(ballot.pairs)
    print(f"{count} pairs; mean score of the chosen {better / count:.3f}, ", end="")
    print(f"of the rejected {worse / count:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="to be written")
    parser.add_argument("words", nargs="?", default="a photo of", help="of the second image")
    given = parser.parse_args()
    main(given.folder, given.words)
