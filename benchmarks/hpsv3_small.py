"""The package hpsv3 with small random weights, served and asked: the scores are the package's own.

    PYTHONPATH=scripts hpsv3/bin/python benchmarks/hpsv3_small.py

Runs in the environment of HPSv3 (docs/rewards/remote.md), on a CPU, without a network. It writes a
Qwen2-VL of some 100,000 weights in the real format, as the file and the folder that the package
reads, serves scripts/served_rewards.py with it, and asks that by the reward `remote`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    Qwen2TokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
)

from flowalign.rewards import build

PORT = 8137
PROMPTS = ["a dog", "a cat in a hat", "x"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_base(folder: Path) -> None:
    """A small random Qwen2-VL with its processor."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(PROMPTS, trainer)
    words = Qwen2TokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>",
        additional_special_tokens=SPECIAL, chat_template=CHAT,
    )  # fmt: skip
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
             "vision_start_token_id": SPECIAL[2], "vision_end_token_id": SPECIAL[3]}  # fmt: skip
    kind: Any = Qwen2VLConfig
    config = kind(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1,
                       "num_heads": 2},
        **{key: words.convert_tokens_to_ids(token) for key, token in names.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2VLProcessor(Qwen2VLImageProcessor(), words, chat_template=CHAT).save_pretrained(folder)


def write_checkpoint(path: Path) -> None:
    """A state dict of the package's own class, with its head."""
    inference = import_module("hpsv3.inference")
    kinds = (inference.DataConfig, inference.TrainingConfig, inference.ModelConfig,
             inference.PEFTLoraConfig)  # fmt: skip
    source = f"{inference._MODEL_CONFIG_PATH}/HPSv3_7B.yaml"
    (_, training, model, lora), _ = inference.parse_args_with_yaml(kinds, source, is_train=False)
    network, _, _ = inference.create_model_and_processor(model, lora, training)
    weights = network.state_dict().items()
    save_file({name: tensor.contiguous().clone() for name, tensor in weights}, path)


def main() -> int:
    """Exit status 0 if the scores are equal to the bit."""
    os.chdir(tempfile.mkdtemp())
    write_base(Path("Qwen/Qwen2-VL-7B-Instruct"))  # the name that the package asks for
    write_checkpoint(Path("small.safetensors"))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
    own: Any = build("served_rewards:HPSv3", checkpoint="small.safetensors", device="cpu")
    wanted = [
        float(own.model.reward(prompts=[prompt], image_paths=[Image.fromarray(image)])[0, 0])
        for prompt, image in zip(PROMPTS, pixels, strict=True)
    ]
    command = [sys.executable, "-m", "flowalign.commands.cli", "serve-reward",
               "served_rewards:HPSv3", "--port", str(PORT),
               "checkpoint=small.safetensors", "device=cpu"]  # fmt: skip
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    with subprocess.Popen(command) as server:
        try:
            remote: Any = build("remote", urls=f"http://127.0.0.1:{PORT}")
            for _ in range(60):  # until it listens
                try:
                    remote.connect()
                    break
                except (ConnectionError, TimeoutError):
                    time.sleep(2)
            scores = remote(images, PROMPTS, [{}] * 3)
        finally:
            server.terminate()
    print(f"package {wanted}\nserved  {scores.value.tolist()}")
    return int(scores.value.tolist() != wanted)


if __name__ == "__main__":
    sys.exit(main())
