"""What images are held against for `fidelity`: reference images, reduced to features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowalign.config import ConfigError, EvalStage
from flowalign.eval.fidelity import frechet
from flowalign.eval.stats import Distance, distance, enough
from flowalign.eval.suite import ImageSet, Judged
from flowalign.pictures import image_files

COPIES = 4  # scenes a prompt: they cost nothing, and the fewer there are, the larger a distance
BATCH = 64


@dataclass(frozen=True)
class Reference:
    """features: images [B,3,H,W] in [0,1] -> [B,D]; those of the reference images [M,D]."""

    features: Callable[[Tensor], Tensor]
    of: Tensor

    def distance(self, judged: Iterable[Judged]) -> Distance:
        """How far the images of one model are, those of all benchmarks together."""
        found = [mine.features for mine in judged if mine.features is not None]
        return distance(torch.cat(found), self.of, frechet)


def build(
    config: EvalStage,
    sets: Sequence[ImageSet],
    features: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Reference:
    """Take the features of the reference images; ConfigError if there are too few of anything."""
    assert config.fidelity
    source, model = config.fidelity.reference, config.model
    metadata = [row for of in sets for row in of.prompts.metadata]
    if source == "tiny":
        images = scenes(metadata, config.sampling.seed)
    else:
        images = pictures(Path(source).expanduser(), model.height, model.width)
    try:
        found = torch.cat([features(batch.to(device)).float().cpu() for batch in images])
    except ValueError as error:
        raise ConfigError([f"fidelity.reference: {error}"]) from error
    width, sampled = found.shape[1], sum(len(of.prompts) * of.images for of in sets)
    problems = [
        f"{place}: {count} images are too few for a distance between {width} features. Use at "
        f"least {enough(width)}, better ten times as many, or write `fidelity: null`."
        for place, count in (("fidelity.reference", len(found)), ("benchmarks", sampled))
        if count < enough(width)
    ]
    if problems:
        raise ConfigError(problems)
    return Reference(features, found)


def scenes(metadata: Sequence[Mapping[str, Any]], seed: int) -> Iterator[Tensor]:
    """Batches of scenes [B,3,64,64] of the tiny world that are right for the metadata.

    Raises ValueError for metadata that is not of the tiny world.
    """
    from flowalign.tiny.scenes import rendered

    try:
        yield from rendered(metadata, seed, COPIES).split(BATCH)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"'tiny' draws prompts of the tiny world, and these are others ({error!r}). "
            "Name a folder of images."
        ) from error


def pictures(folder: Path, height: int, width: int) -> Iterator[Tensor]:
    """Batches of the images in a folder [B,3,height,width]: centre-cropped and resized.

    Raises ValueError for a file that is no image.
    """
    files = image_files(folder)
    for start in range(0, len(files), BATCH):
        found = []
        for path in files[start : start + BATCH]:
            try:
                with Image.open(path) as image:
                    fitted = ImageOps.fit(image.convert("RGB"), (width, height))
            except OSError as error:
                raise ValueError(f"{path} is not readable as an image ({error})") from error
            found.append(torch.from_numpy(np.array(fitted)))
        yield torch.stack(found).permute(0, 3, 1, 2) / 255
