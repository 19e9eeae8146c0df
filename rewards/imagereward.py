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

from flowalign.frozen import Placement
from flowalign.rewards import preprocess
from flowalign.rewards.head import Head
from flowalign.rewards.options import check_common, check_pretrained
from flowalign.rewards.weights import check_file, fit, locate, read
from flowalign.types import Scores

WEIGHTS = "THUDM/ImageReward/ImageReward.pt"
TOKENIZER = "google-bert/bert-base-uncased"
TOKENS = 35  # of a prompt; longer ones are cut
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output, ImageReward.py

# BLIP-L as its authors have it (BLIP's models/vit.py and configs/med_config.json). transformers'
# defaults are others: layer_norm_eps of the vision tower 1e-5, heads of the text tower 8.
VISION = {
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
}
TEXT = {
    "vocab_size": 30524,  # BERT's and two of BLIP's own, which ImageReward does not use
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}

# Names in the checkpoint -> names in `Network`; None = not needed. transformers' text tower kept
# the names of BLIP's.
SEEN, BLOCK, LAYER = (
    r"blip\.visual_encoder\.",
    r"blip\.visual_encoder\.blocks\.(\d+)\.",
    r"vision.encoder.layers.\1.",
)
KEYS: list[tuple[str, str | None]] = [
    (SEEN + r"cls_token", "vision.embeddings.class_embedding"),
    (SEEN + r"pos_embed", "vision.embeddings.position_embedding"),
    (SEEN + r"patch_embed\.proj\.(.+)", r"vision.embeddings.patch_embedding.\1"),
    (BLOCK + r"norm([12])\.(.+)", LAYER + r"layer_norm\2.\3"),
    (BLOCK + r"attn\.qkv\.(.+)", LAYER + r"self_attn.qkv.\2"),
    (BLOCK + r"attn\.proj\.(.+)", LAYER + r"self_attn.projection.\2"),
    (BLOCK + r"mlp\.(.+)", LAYER + r"mlp.\2"),
    (SEEN + r"norm\.(.+)", r"vision.post_layernorm.\1"),
    (r"blip\.text_encoder\.embeddings\.position_ids", None),
    (r"blip\.text_encoder\.(.+)", r"text.\1"),
    (r"(?!blip\.visual_encoder\.|mlp\.).*", None),  # what BLIP's training needed
]


class ImageReward:
    """Reward: (r - mean) / std / normalizer, r of a head on BLIP's view of image and prompt.

    Source: THUDM/ImageReward, ImageReward/ImageReward.py (v1.0): the image at 224 pixels by CLIP's
    preprocessing; 35 tokens of the prompt, that attend to the image; the first token's vector goes
    through `Head`; mean and std are those of r over the authors' data.
    weights: the path of the file (or owner/repository/file on the Hub), with the official names.
    tokenizer: a Hub id or folder of BERT's uncased tokenizer.
    architecture: sizes that differ from the published model's, {"vision": {...}, "text": {...}}
        with the keys of VISION and TEXT.
    normalizer: 1, the value is the published score. It sets the scale of the value only.
    offload: the weights lie on the CPU between calls.
    parts: "raw", the score before division: unbounded, over the authors' data about N(0, 1).
    Raises OSError where a file cannot be had, ValueError where it is not that of the model, and
    for an image with pixels that are no numbers.
    """

    name = "imagereward"

    def __init__(
        self,
        weights: str = WEIGHTS,
        tokenizer: str = TOKENIZER,
        architecture: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        normalizer: float = 1.0,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        offload: bool = False,
    ) -> None:
        shared: dict[str, Any] = {"device": device, "batch_size": batch_size, "offload": offload}
        self.check_options(weights, tokenizer, architecture, normalizer=normalizer, **shared)
        path = locate(weights)
        found = official_names(read(path))
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.network = Network(**(architecture or {}))
        fit(self.network, found, path)
        self.placement = Placement(self.network, device, offload)
        self.pixels = preprocess.clip_processor(self.network.image_size)
        self.batch_size = batch_size
        self.normalizer, self.source = normalizer, weights

    @staticmethod
    def check_options(
        weights: str = WEIGHTS,
        tokenizer: str = TOKENIZER,
        architecture: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """Raise ValueError for options that cannot work; loads no model."""
        check_common("reward imagereward", **options)
        check_file(weights, "weights", WEIGHTS)
        check_pretrained(tokenizer, "tokenizer", f"a folder or a Hub id, such as {TOKENIZER}")
        known = {"vision": VISION, "text": TEXT}
        for part, sizes in (architecture or {}).items():
            for size in sizes if part in known else [None]:
                if part not in known or size not in known[part]:
                    raise ValueError(
                        f"`architecture` of reward imagereward has {part!r}: {sizes!r}; it takes "
                        + ", ".join(f"{name}: {list(table)}" for name, table in known.items())
                    )

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {"name": self.name, "model": self.source, "normalizer": self.normalizer}

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU."""
        device, found = self.placement.device, [torch.empty(0)]
        with self.placement:
            for some in preprocess.batches(images, self.batch_size):
                start = sum(map(len, found))
                tokens = self.tokenizer(
                    list(prompts[start : start + len(some)]),
                    padding="max_length",
                    truncation=True,
                    max_length=TOKENS,
                    return_tensors="pt",
                )
                values = preprocess.values(self.pixels, some).to(device)
                ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
                found.append(self.network(values, ids, mask).cpu())
        raw = (torch.cat(found) - MEAN) / STD
        return Scores.of(raw / self.normalizer, raw=raw)


class Network(nn.Module):
    """BLIP's two towers and the head; vision, text: sizes other than the published model's."""

    def __init__(
        self, vision: Mapping[str, Any] | None = None, text: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        seeing = BlipVisionConfig(**VISION | dict(vision or {}))
        # is_decoder builds the layers that look at the image; the text is read in both directions
        width = {"encoder_hidden_size": seeing.hidden_size, "is_decoder": True}
        reading = BlipTextConfig(**TEXT | dict(text or {}) | width)
        self.image_size = int(seeing.image_size)  # pyright: ignore[reportArgumentType]
        self.vision = BlipVisionModel(seeing)
        self.text = BlipTextModel(reading, add_pooling_layer=False)
        self.mlp = Head(reading.hidden_size)

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """pixels [B,3,S,S], ids and mask [B,L] -> r [B]."""
        seen = self.vision(pixels).last_hidden_state
        read = self.text(ids, attention_mask=mask, encoder_hidden_states=seen, is_decoder=False)
        return self.mlp(read.last_hidden_state[:, 0])


def official_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors under the names of `Network`; a name not in KEYS stays as it is."""
    found = {}
    for name, tensor in weights.items():
        for pattern, ours in KEYS:
            match = re.fullmatch(pattern, name)
            if match:
                found |= {match.expand(ours): tensor} if ours else {}
                break
        else:
            found[name] = tensor
    return found
