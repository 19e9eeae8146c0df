"""docs/flux.py, the page's example of another backbone: it samples what diffusers samples, and has
adapters that diffusers loads."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)

from flowalign.rollout import Noise, Schedule, places, sample
from flowalign.types import PromptBatch

STEPS, HEIGHT, WIDTH = 4, 64, 96  # height and width differ, so that mixing them up shows


@pytest.fixture(scope="module")
def flux() -> Iterator[ModuleType]:
    path = Path(__file__).parents[1] / "docs" / "flux.py"
    spec = importlib.util.spec_from_file_location("docs_flux", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_flux"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["docs_flux"]


@pytest.fixture
def pipe() -> FluxPipeline:
    """A guidance-distilled FLUX with random weights and no text encoders."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    blocks: dict[str, Any] = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    vae = AutoencoderKL(
        **blocks,
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=0.1,
        scaling_factor=0.4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    nothing = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = FluxPipeline(scheduler=scheduler, vae=vae, transformer=transformer, **nothing)  # type: ignore[arg-type]
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def backbone(flux, pipe):
    found = flux.Flux(pipe, height=HEIGHT, width=WIDTH, embedded_guidance=2.5)
    generator = torch.Generator().manual_seed(1)
    texts = {text: torch.randn(7, 32, generator=generator) for text in ("one", "two", "")}

    def encode_prompt(prompts, device, max_sequence_length):  # the encoders are not there
        embeds = torch.stack([texts[prompt] for prompt in prompts])
        return embeds, embeds[:, 0], None

    found.text.pipe = SimpleNamespace(encode_prompt=encode_prompt)
    return found


def test_a_rollout_is_what_the_pipeline_samples(backbone, pipe):
    """Guidance 3 of both kinds: real CFG over a model that is told 2.5."""
    batch = PromptBatch(["one", "two"], ["t", "t"], [{}, {}])
    noise = Noise((0,))
    schedule = Schedule(backbone.sigmas(STEPS), "ode", 0.0, None)
    ours = sample(backbone, batch, schedule, guidance=3.0, noise=noise, places=places(2, 1))
    shape = backbone.latent_shape
    start = torch.cat([noise.draw(row, 0, shape, 0) for row in (0, 1)])
    assert shape == (4, HEIGHT // 8, WIDTH // 8)
    cond = backbone.encode(["one", "two"])
    theirs = pipe(
        prompt_embeds=cond.embeds,
        pooled_prompt_embeds=cond.pooled,
        negative_prompt_embeds=cond.negative_embeds.expand(2, -1, -1),
        negative_pooled_prompt_embeds=cond.negative_pooled.expand(2, -1),
        latents=pipe._pack_latents(start, 2, *shape),
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        guidance_scale=2.5,
        true_cfg_scale=3.0,
        output_type="pt",
    ).images
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours.images, theirs, rtol=1e-4, atol=1e-4)


def test_adapters_by_name_and_on_disk(flux, backbone, pipe, tmp_path):
    for name in ("one", "two"):
        backbone.add_adapter(name, rank=2, alpha=4.0, targets=flux.LAYERS)
        for parameter in backbone.adapter_parameters(name):
            torch.nn.init.normal_(parameter.data, std=0.3)
    cond = backbone.encode(["one", "two", ""])
    x = torch.randn(3, *backbone.latent_shape, generator=torch.Generator().manual_seed(2))
    alone = []
    for name in ("two", None, "one"):
        with torch.no_grad(), backbone.adapter(name):
            alone.append(backbone.velocity(x[[0]], 0.7, cond.select(slice(0, 1)), guidance=1.0))
    assert min((alone[i] - alone[i - 1]).abs().max() for i in range(3)) > 1e-2  # they do something

    backbone.save_adapter("two", tmp_path)
    backbone.load_adapter("again", tmp_path)
    with torch.no_grad():
        again = backbone.velocity(x[[0]], 0.7, cond.select(slice(0, 1)), guidance=1.0)
    torch.testing.assert_close(again, alone[0])
    pipe.unload_lora_weights()
    pipe.load_lora_weights(str(tmp_path))
    with torch.no_grad():
        loaded = backbone.velocity(x[[0]], 0.7, cond.select(slice(0, 1)), guidance=1.0)
    torch.testing.assert_close(loaded, alone[0], rtol=1e-4, atol=1e-5)
