"""What the tests of the model rewards share: pictures, a small CLIP on disk, hostile files."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from flowalign.backbone.tiny import PREFERENCE

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])  # of OpenAI's CLIP, as its README prints them
STD = np.array([0.26862954, 0.26130258, 0.27577711])
PROMPTS = ["a red dog", "two blue cats", "a bus", "a green bus", "a sign", "a red cat"]
SIDE = 32  # of the small CLIP's images


def pictures(count: int, height: int, width: int, seed: int = 0) -> tuple[Tensor, list]:
    """The same coarse random images as a tensor [B,3,H,W] in [0,1], and as PIL images."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 5, 6, 3), np.uint8)
    images = [Image.fromarray(c).resize((width, height), Image.Resampling.BICUBIC) for c in coarse]
    arrays = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255, images


def normalized(images: Sequence[Image.Image]) -> Tensor:
    """PIL images -> [B,3,H,W] with CLIP's mean and std taken out."""
    values = np.stack([(np.asarray(image) / 255 - MEAN) / STD for image in images])
    return torch.from_numpy(values).permute(0, 3, 1, 2).float()


def cropped(images: Sequence[Image.Image], size: int) -> Tensor:
    """CLIP's preprocessing by hand: short side to `size`, bicubic, the middle square."""
    found = []
    for image in images:
        scale = size / min(image.size)
        wide, high = (int(side * scale) for side in image.size)
        image = image.resize((wide, high), Image.Resampling.BICUBIC)
        left, top = (wide - size) // 2, (high - size) // 2
        found.append(image.crop((left, top, left + size, top + size)))
    return normalized(found)


def clip_folder(folder: Path) -> Path:
    """A small random CLIPModel as transformers saves one, with the tiny world's tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "projection_dim": 24}
    vision = {**sizes, **heads, "image_size": SIDE, "patch_size": 8}
    words = {"vocab_size": 128, "max_position_embeddings": 18}
    text = {**sizes, **heads, **words, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    model = CLIPModel(config)
    shake(model)
    with torch.no_grad():
        model.logit_scale.fill_(4.60517)  # log 100, as OpenAI's
    model.save_pretrained(folder)
    square = {"height": SIDE, "width": SIDE}
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=square).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PREFERENCE / name, folder)
    return folder


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Weights far enough from their start that what goes in changes what comes out."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)


class _Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def hostile_files(folder: Path) -> tuple[list[Path], Path]:
    """Files that make a folder when they are unpickled, and that folder."""
    attack = _Attack(folder / "executed")
    plain, zipped, wrapped = (folder / f"{name}.pth" for name in ("plain", "zipped", "wrapped"))
    plain.write_bytes(pickle.dumps({"layers.0.weight": attack}))
    torch.save({"layers.0.weight": attack}, zipped)
    torch.save({"state_dict": {"weight": torch.ones(1)}, "extra": attack}, wrapped)
    return [plain, zipped, wrapped], attack.mark
