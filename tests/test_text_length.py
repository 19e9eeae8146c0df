"""A trained adapter brings the number of T5 tokens that it was trained with."""

from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from parts import MAX_LENGTH
from peft import LoraConfig
from torch import Tensor
from torch.testing import assert_close

import flowalign
from flowalign.backbone import Backbone
from flowalign.backbone.adapters import read_lora, write_lora
from flowalign.backbone.tiny import T5_LENGTH
from flowalign.config import SamplingConfig
from flowalign.teachers.merge import merge
from flowalign.training.rollout import Noise, generate

SETTINGS = SamplingConfig(steps=2, guidance=2.0, seed=3, batch_size=2)


@pytest.fixture
def adapter(random_model: str, tmp_path: Path) -> tuple[Backbone, Path]:
    """A backbone of T5_LENGTH tokens, and an adapter that it wrote."""
    backbone = fakes.adapted(random_model, "a", rank=2, alpha=4.0)
    backbone.save_adapter("a", tmp_path / "adapter")
    return backbone, tmp_path / "adapter"


def drawn(pipe: Any, backbone: Backbone, **kw: Any) -> Tensor:
    """What a pipeline draws of two prompts, on the noise of an evaluation."""
    noise = Noise((SETTINGS.seed,))
    start = [noise.draw(p, 0, backbone.latent_shape, 0)[0] for p in range(2)]
    return pipe(
        fakes.PROMPTS[:2], latents=torch.stack(start), height=32, width=32,
        num_inference_steps=SETTINGS.steps, guidance_scale=SETTINGS.guidance, output_type="pt",
        **kw,
    ).images  # fmt: skip


def test_the_images_of_a_loaded_adapter_are_those_of_the_evaluation(
    random_model: str, adapter: tuple[Backbone, Path]
) -> None:
    backbone, folder = adapter
    pipe: Any = flowalign.load(random_model, lora=folder)
    assert isinstance(pipe, StableDiffusion3Pipeline)
    ours = generate(backbone, fakes.batch(2), SETTINGS)
    assert_close(drawn(pipe, backbone), ours, rtol=0, atol=1e-5)
    longer = drawn(pipe, backbone, max_sequence_length=64)
    assert float((longer - ours).abs().max()) > 1e-4  # what is asked for counts
    with torch.no_grad():
        embeds = pipe.encode_prompt("red", "red", "red")[0]
    assert_close(embeds, backbone.encode(["red"]).text["embeds"])


def test_the_length_lies_in_the_file_and_others_still_read_it(
    random_model: str, adapter: tuple[Backbone, Path], tmp_path: Path
) -> None:
    _, folder = adapter
    assert read_lora(folder).text_length == T5_LENGTH
    lora = read_lora(folder)
    LoraConfig(**lora.metadata)
    pipe = StableDiffusion3Pipeline.from_pretrained(random_model)
    pipe.load_lora_weights(str(folder))
    scaling = pipe.transformer.transformer_blocks[0].attn.to_q.scaling["default_0"]
    assert scaling == 2.0  # alpha / r came along
    write_lora(tmp_path / "without", lora.weights, lora.metadata)
    assert read_lora(tmp_path / "without").text_length is None
    merge([folder, folder], tmp_path / "same")
    merge([folder, tmp_path / "without"], tmp_path / "mixed")
    assert read_lora(tmp_path / "same").text_length == T5_LENGTH
    assert read_lora(tmp_path / "mixed").text_length is None


def test_a_shipped_model_has_its_own_length_and_without_a_length_it_is_diffusers_own(
    random_model: str,
) -> None:
    tiny: Any = flowalign.load("tiny")  # it was trained with 16 tokens, and sees others as noise
    assert tiny.encode_prompt(*[["red"]] * 3)[0].shape[1] == MAX_LENGTH + T5_LENGTH
    assert type(flowalign.load(random_model)) is StableDiffusion3Pipeline  # diffusers' own
