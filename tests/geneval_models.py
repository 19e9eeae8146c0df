"""Small models with random weights, in the formats that GenEval's detector and colours load."""

# transformers' configs take more than their annotations say:
# pyright: reportCallIssue=false

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig
from transformers.models.mask2former import Mask2FormerImageProcessorPil

CLIP = "geneval-test-clip"
QUERIES = 10


def mask2former(folder: Path, labels: int = 80) -> str:
    """A Mask2Former of 118 thousand weights: scores up to .5, masks of half of the pixels."""
    torch.manual_seed(3)
    sizes = {"depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 4, "image_size": 64}
    layers = [f"stage{number}" for number in range(1, 5)]
    config = Mask2FormerConfig(
        backbone_config=SwinConfig(embed_dim=8, out_features=layers, **sizes), feature_size=32,
        mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=32, num_queries=QUERIES,
        num_labels=labels,
    )  # fmt: skip
    network = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():  # as initialised, classes are equally likely and masks are everything
        network.class_predictor.weight *= 30
        pixels = network.model.pixel_level_module.decoder.mask_projection
        seen: list[Any] = []
        hook = pixels.register_forward_hook(lambda module, inputs, output: seen.append(output))
        network.eval()(pixel_values=torch.randn(1, 3, 64, 96))
        hook.remove()
        pixels.bias.copy_(50 * (pixels.bias - seen[0].mean((0, 2, 3))))  # pyright: ignore
        pixels.weight *= 50
    network.save_pretrained(folder)
    # what the sibling models of the Hub say, which is not what the benchmark does
    Mask2FormerImageProcessorPil(size={"height": 384, "width": 384}).save_pretrained(folder)
    return str(folder)


def clip(open_clip: ModuleType, folder: Path) -> dict[str, str]:
    """Options of a CLIP of open_clip, its weights in a file of the folder."""
    vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (folder / f"{CLIP}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{CLIP}.json")
    torch.manual_seed(0)
    state = open_clip.create_model(CLIP).state_dict()
    state["visual.conv1.weight"] *= 10  # the picture, not the position, is what is seen
    file = folder / "open_clip_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    return {"architecture": CLIP, "pretrained": str(file)}
