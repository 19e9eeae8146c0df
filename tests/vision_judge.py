"""A small random Qwen3-VL in the real format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flowalign.rewards.geneval2 import WORDS

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    """Of bytes and of the words of answers, as Qwen's: with their space, and digits alone."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    words = ["yes", "Yes", "No", *WORDS, *map(str.capitalize, WORDS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text for word in words for text in (word, f"x {word}")], trainer)
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
             "vision_bos_token": SPECIAL[2], "vision_eos_token": SPECIAL[3]}  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>",
        extra_special_tokens=named, chat_template=CHAT,
    )  # fmt: skip


def qwen3_vl(folder: Path) -> str:
    """A Qwen3VLForConditionalGeneration of some 100 thousand weights, with its real processor."""
    import torch
    import transformers

    torch.manual_seed(0)
    words = tokenizer()
    ids = {f"{name}_id": words.convert_tokens_to_ids(token) for name, token in (
        ("image_token", "<|image_pad|>"), ("video_token", "<|video_pad|>"),
        ("vision_start_token", "<|vision_start|>"), ("vision_end_token", "<|vision_end|>"),
    )}  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {"vocab_size": len(words), "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "rope_parameters": rope, "rope_scaling": rope}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
              "patch_size": 16, "out_hidden_size": 32, "deepstack_visual_indexes": [0],
              "num_position_embeddings": 64}  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    network = transformers.Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():  # so that the picture and the question change the answer
        for parameter in network.parameters():
            parameter += torch.randn_like(parameter) * 0.15
    network.save_pretrained(folder)
    size = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size)
    videos = transformers.Qwen3VLVideoProcessor()
    transformers.Qwen3VLProcessor(images, words, videos, chat_template=CHAT).save_pretrained(folder)
    return str(folder)
