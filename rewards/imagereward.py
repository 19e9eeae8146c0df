"""ImageReward (2304.05977): how much people would prefer an image for its prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
)

from flowalign.backbone.placement import Placement
from flowalign.rewards import clip
from flowalign.rewards.base import VIT_L, Cost
from flowalign.rewards.options import Count, Device, Divisor, Pretrained, hub_texts, located
from flowalign.rewards.preference import Head, Preference
from flowalign.rewards.weights import WeightsFile, fit_weights, hub_file, read_weights

CHECKPOINT = "THUDM/ImageReward/ImageReward.pt"
TOKENIZER = "google-bert/bert-base-uncased"
TOKENS = 35  # of a prompt; longer ones are cut
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output, ImageReward.py

# BLIP-L as its authors have it (BLIP's models/vit.py and configs/med_config.json), where it differs
# from transformers' defaults.
VISION: dict[str, Any] = {
    "image_size": 224,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-6,
}
TEXT: dict[str, Any] = {"num_attention_heads": 12}

# Names in the checkpoint -> names in `Network`; None = not needed. transformers' text tower kept
# the names of BLIP's.
SEEN, LAYER = r"blip\.visual_encoder\.", r"vision.encoder.layers.\1."
VISION_BLOCK = SEEN + r"blocks\.(\d+)\."
KEYS: list[tuple[str, str | None]] = [
    (SEEN + r"cls_token", "vision.embeddings.class_embedding"),
    (SEEN + r"pos_embed", "vision.embeddings.position_embedding"),
    (SEEN + r"patch_embed\.proj\.(.+)", r"vision.embeddings.patch_embedding.\1"),
    (VISION_BLOCK + r"norm([12])\.(.+)", LAYER + r"layer_norm\2.\3"),
    (VISION_BLOCK + r"attn\.qkv\.(.+)", LAYER + r"self_attn.qkv.\2"),
    (VISION_BLOCK + r"attn\.proj\.(.+)", LAYER + r"self_attn.projection.\2"),
    (VISION_BLOCK + r"mlp\.(.+)", LAYER + r"mlp.\2"),
    (SEEN + r"norm\.(.+)", r"vision.post_layernorm.\1"),
    (r"blip\.text_encoder\.embeddings\.position_ids", None),
    (r"blip\.text_encoder\.(.+)", r"text.\1"),
    (r"(?!blip\.visual_encoder\.|mlp\.).*", None),  # what BLIP's training needed
]


class ImageReward(Preference):
    """Reward: (r - mean) / std / normalizer, r of a head on BLIP's view of image and prompt.

    Source: THUDM/ImageReward, ImageReward/ImageReward.py (v1.0): the image at 224 pixels by CLIP's
    preprocessing; 35 tokens of the prompt, that attend to the image; the first token's vector goes
    through `Head`; mean and std of r over the authors' data are constants.
    weights: the path of the file (or owner/repository/file on the Hub), with the official names.
    tokenizer: a Hub id or folder of BERT's uncased tokenizer.
    architecture: sizes that differ from the published model's, {"vision": {...}, "text": {...}}
        of transformers' BlipVisionConfig and BlipTextConfig.
    normalizer: 1, the value is the published score: over the authors' data about N(0, 1).
    Raises OSError where a file cannot be had, ValueError where it does not fit the model.
    """

    name = "imagereward"
    licence = "Apache-2.0"
    cost = Cost(VIT_L, kept=0.28e9)
    downloads = {"THUDM/ImageReward": 1.8}
    reads = {"weights": (CHECKPOINT, hub_file), "tokenizer": (TOKENIZER, hub_texts)}

    def __init__(
        self,
        weights: WeightsFile = CHECKPOINT,
        tokenizer: Pretrained = TOKENIZER,
        architecture: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        normalizer: Divisor = 1.0,
        device: Device = None,
        batch_size: Count = 32,
        offload: bool = False,
    ) -> None:
        tensors = official_names(read_weights(weights))
        folder, at = located(tokenizer)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **at)
        self.network = Network(**(architecture or {}))
        fit_weights(self.network, tensors, weights)
        self.placement = Placement(self.network, device, offload)
        self.pixels = clip.clip_processor(self.network.image_size)
        self.batch_size = batch_size
        super().__init__(normalizer, model=weights)

    @torch.no_grad()
    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """(r - mean) / std [B]."""
        device = self.placement.device
        scores = []
        with self.placement:
            for number, pictures in enumerate(clip.pixel_batches(images, self.batch_size)):
                start = number * self.batch_size
                values = clip.pixel_values(self.pixels, pictures).to(device)
                scores.append(self._rating(values, prompts[start : start + len(pictures)]).cpu())
        return torch.cat(scores)

    def _raw_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        with self.placement:
            values = clip.float_values(self.pixels, images.to(self.placement.device))
            return self._rating(values, prompts)

    def _rating(self, values: Tensor, prompts: Sequence[str]) -> Tensor:
        """(r - mean) / std [b] of preprocessed pixels [b,3,S,S]."""
        tokens = self.tokenizer(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=TOKENS,
            return_tensors="pt",
        ).to(values.device)
        rating = self.network(values, tokens["input_ids"], tokens["attention_mask"])
        return (rating - MEAN) / STD


class Network(nn.Module):
    """BLIP's two towers and the head; vision, text: sizes other than the published model's."""

    def __init__(self, vision: Mapping[str, Any] = {}, text: Mapping[str, Any] = {}) -> None:
        super().__init__()
        vision_config = BlipVisionConfig(**VISION | dict(vision))
        # is_decoder builds the layers that attend to the image; the text is read bidirectionally
        width = {"encoder_hidden_size": vision_config.hidden_size, "is_decoder": True}
        text_config = BlipTextConfig(**TEXT | dict(text) | width)
        self.image_size = int(vision_config.image_size)  # pyright: ignore[reportArgumentType]
        self.vision = BlipVisionModel(vision_config)
        self.text = BlipTextModel(text_config, add_pooling_layer=False)
        self.mlp = Head(text_config.hidden_size)

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """pixels [B,3,S,S], ids and mask [B,L] -> r [B]."""
        patches = self.vision(pixels).last_hidden_state
        seen: Any = {"encoder_hidden_states": patches, "is_decoder": False}
        return self.mlp(self.text(ids, attention_mask=mask, **seen).last_hidden_state[:, 0])


def official_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors under the names of `Network`; a name not in KEYS stays as it is."""
    renamed = {}
    for name, tensor in weights.items():
        for pattern, ours in KEYS:
            if match := re.fullmatch(pattern, name):
                renamed |= {match.expand(ours): tensor} if ours else {}
                break
        else:
            renamed[name] = tensor
    return renamed
