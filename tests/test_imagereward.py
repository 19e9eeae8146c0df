"""ImageReward from a file with the official names is BLIP's arithmetic, written out here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm
from transformers import BertTokenizer

from flowalign.rewards import build
from flowalign.rewards.imagereward import Network

SIDE, PATCH, WIDE, TALL, TEXT_WIDE = 32, 16, 32, 48, 24
HEADS = {"vision": 4, "text": 3}
SHARED = {"num_hidden_layers": 2, "intermediate_size": TALL}
SEE = {"image_size": SIDE, "patch_size": PATCH, "hidden_size": WIDE}
READ = {"vocab_size": 40, "hidden_size": TEXT_WIDE, "max_position_embeddings": 64}
SMALL = {
    "vision": {**SHARED, **SEE, "num_attention_heads": HEADS["vision"]},
    "text": {**SHARED, **READ, "num_attention_heads": HEADS["text"]},
}
WORDS: Sequence[str] = "[PAD] [UNK] [CLS] [SEP] [MASK] a one two red blue green star sign".split()
PROMPTS = ["a red star", "Two blue sign", "one", "a green one", "red red red", "a star " * 40]
MLP = {0: (TEXT_WIDE, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}


def official() -> dict[str, Tensor]:
    """Random weights under the names of THUDM's ImageReward.pt (BLIP's vit.py and med.py)."""
    rng, found = torch.Generator().manual_seed(0), {}

    def linear(name: str, inner: int, outer: int) -> None:
        found[f"{name}.weight"] = torch.randn(outer, inner, generator=rng) * 1.5 / inner**0.5
        found[f"{name}.bias"] = torch.randn(outer, generator=rng) * 0.3

    def norm(name: str, width: int) -> None:
        found[f"{name}.weight"] = 1 + torch.randn(width, generator=rng) * 0.2
        found[f"{name}.bias"] = torch.randn(width, generator=rng) * 0.2

    see, read = "blip.visual_encoder", "blip.text_encoder"
    found[f"{see}.cls_token"] = torch.randn(1, 1, WIDE, generator=rng)
    found[f"{see}.pos_embed"] = torch.randn(1, 1 + (SIDE // PATCH) ** 2, WIDE, generator=rng)
    found[f"{see}.patch_embed.proj.weight"] = torch.randn(WIDE, 3, PATCH, PATCH, generator=rng) / 9
    found[f"{see}.patch_embed.proj.bias"] = torch.randn(WIDE, generator=rng)
    for block in (f"{see}.blocks.{i}" for i in range(2)):
        norm(f"{block}.norm1", WIDE)
        linear(f"{block}.attn.qkv", WIDE, 3 * WIDE)
        linear(f"{block}.attn.proj", WIDE, WIDE)
        norm(f"{block}.norm2", WIDE)
        linear(f"{block}.mlp.fc1", WIDE, TALL)
        linear(f"{block}.mlp.fc2", TALL, WIDE)
    norm(f"{see}.norm", WIDE)
    found[f"{read}.embeddings.position_ids"] = torch.arange(64)[None]
    found[f"{read}.embeddings.word_embeddings.weight"] = torch.randn(40, TEXT_WIDE, generator=rng)
    found[f"{read}.embeddings.position_embeddings.weight"] = torch.randn(
        64, TEXT_WIDE, generator=rng
    )
    norm(f"{read}.embeddings.LayerNorm", TEXT_WIDE)
    for layer in (f"{read}.encoder.layer.{i}" for i in range(2)):
        for part, source in (("attention", TEXT_WIDE), ("crossattention", WIDE)):
            linear(f"{layer}.{part}.self.query", TEXT_WIDE, TEXT_WIDE)
            linear(f"{layer}.{part}.self.key", source, TEXT_WIDE)
            linear(f"{layer}.{part}.self.value", source, TEXT_WIDE)
            linear(f"{layer}.{part}.output.dense", TEXT_WIDE, TEXT_WIDE)
            norm(f"{layer}.{part}.output.LayerNorm", TEXT_WIDE)
        linear(f"{layer}.intermediate.dense", TEXT_WIDE, TALL)
        linear(f"{layer}.output.dense", TALL, TEXT_WIDE)
        norm(f"{layer}.output.LayerNorm", TEXT_WIDE)
    linear("blip.vision_proj", WIDE, 8)  # of BLIP's training; nobody uses them here
    linear("blip.text_proj", TEXT_WIDE, 8)
    for index, (inner, outer) in MLP.items():
        linear(f"mlp.layers.{index}", inner, outer)
    return found


class Reference:
    """One image and one prompt by hand, straight from the official names."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = weights

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        found, parts = [], (x.chunk(heads, -1) for x in (q, k, v))
        for qh, kh, vh in zip(*parts, strict=True):
            found.append((qh @ kh.T / qh.shape[-1] ** 0.5).softmax(-1) @ vh)
        return torch.cat(found, -1)

    def see(self, image: Tensor) -> Tensor:
        """[3,S,S] -> [1+patches, WIDE]."""
        v = "blip.visual_encoder"
        patches = [
            image[:, y : y + PATCH, x : x + PATCH].flatten()
            for y in range(0, SIDE, PATCH)
            for x in range(0, SIDE, PATCH)
        ]
        kernel = self.w[f"{v}.patch_embed.proj.weight"].flatten(1)
        x = torch.stack(patches) @ kernel.T + self.w[f"{v}.patch_embed.proj.bias"]
        x = torch.cat([self.w[f"{v}.cls_token"][0], x]) + self.w[f"{v}.pos_embed"][0]
        for block in (f"{v}.blocks.{i}" for i in range(2)):
            qkv = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", x, 1e-6))
            found = self.attend(*qkv.chunk(3, -1), HEADS["vision"])
            x = x + self.linear(f"{block}.attn.proj", found)
            inner = self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", x, 1e-6))
            x = x + self.linear(f"{block}.mlp.fc2", gelu(inner))
        return self.norm(f"{v}.norm", x, 1e-6)

    def read(self, ids: list[int], seen: Tensor) -> Tensor:
        """Token ids without padding -> [TEXT_WIDE], the vector of the first."""
        t = "blip.text_encoder"
        x = self.w[f"{t}.embeddings.word_embeddings.weight"][ids]
        x = x + self.w[f"{t}.embeddings.position_embeddings.weight"][: len(ids)]
        x = self.norm(f"{t}.embeddings.LayerNorm", x, 1e-12)
        for layer in (f"{t}.encoder.layer.{i}" for i in range(2)):
            for part in ("attention", "crossattention"):
                own, source = f"{layer}.{part}", x if part == "attention" else seen
                q = self.linear(f"{own}.self.query", x)
                k, v = (self.linear(f"{own}.self.{name}", source) for name in ("key", "value"))
                found = self.linear(f"{own}.output.dense", self.attend(q, k, v, HEADS["text"]))
                x = self.norm(f"{own}.output.LayerNorm", found + x, 1e-12)
            inner = gelu(self.linear(f"{layer}.intermediate.dense", x))
            found = self.linear(f"{layer}.output.dense", inner)
            x = self.norm(f"{layer}.output.LayerNorm", found + x, 1e-12)
        return x[0]

    def score(self, image: Tensor, ids: list[int]) -> float:
        x = self.read(ids, self.see(image))
        for index in MLP:
            x = self.linear(f"mlp.layers.{index}", x)
        return (x.item() - 0.16717) / 1.03334


def ids_of(prompt: str) -> list[int]:
    """[CLS] words [SEP], at most 35."""
    words = [WORDS.index(word) for word in prompt.lower().split()]
    return [2, *words[:33], 3]


def saved(folder: Path) -> dict:
    """The options of a small one in a folder."""
    torch.save(official(), folder / "ImageReward.pt")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer.from_pretrained(folder).save_pretrained(folder / "bert")
    return {
        "weights": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "bert"),
        "architecture": SMALL, "device": "cpu",
    }  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return saved(tmp_path_factory.mktemp("imagereward"))


def test_the_published_sizes_are_those_of_the_published_names():
    """Every tensor of BLIP-L with a BERT-base reader and the head."""
    with torch.device("meta"):
        network = Network()
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert len([name for name in shapes if name.startswith("vision.")]) == 24 * 12 + 6
    assert len([name for name in shapes if name.startswith("text.")]) == 12 * 26 + 4
    assert shapes["vision.embeddings.position_embedding"] == [1, 197, 1024]
    assert shapes["text.encoder.layer.11.crossattention.self.key.weight"] == [768, 1024]
    assert shapes["text.embeddings.word_embeddings.weight"] == [30524, 768]
    assert network.vision.config.num_attention_heads == 16
    assert network.text.config.num_attention_heads == 12
    assert network.vision.config.layer_norm_eps == 1e-6
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == 446


def test_a_tensor_of_its_parts_that_is_not_known_is_refused(options: dict, tmp_path: Path):
    torch.save({**official(), "mlp.weight": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="mlp.weight"):
        build("imagereward", **{**options, "weights": str(tmp_path / "other.pt")})
