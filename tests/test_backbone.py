"""The pipeline as the library sees it: adapters in and out, guidance, and what it refuses."""

from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor
from torch.testing import assert_close

import flowalign
from flowalign import sde
from flowalign.backbone import Backbone, ModelError, load_pipeline
from flowalign.config import ConfigError, ModelConfig, load
from flowalign.training.algorithm import STUDENT
from flowalign.types import Conditioning


def probe(backbone: Backbone, guidance: float = 3.0) -> tuple[Tensor, Tensor, Conditioning]:
    """A velocity, and the x and conditioning it was taken at."""
    cond = backbone.encode(fakes.PROMPTS[:2], copies=2)
    x = torch.randn(4, *backbone.latent_shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return backbone.velocity(x, 0.6, cond, guidance=guidance), x, cond


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_only_while_it_is_active(random_model):
    backbone = fakes.backbone(random_model)
    plain = probe(backbone)[0]
    backbone.add_adapter(STUDENT, rank=4, alpha=8, targets=fakes.TARGETS)
    assert torch.equal(probe(backbone)[0], plain)
    fakes.shake(backbone)
    adapted = probe(backbone)[0]
    assert (adapted - plain).abs().max() > 1e-2
    with pytest.raises(ZeroDivisionError), backbone.base():
        assert torch.equal(probe(backbone)[0], plain)
        raise ZeroDivisionError
    assert torch.equal(probe(backbone)[0], adapted)
    assert all(p.requires_grad for p in backbone.adapter_parameters(STUDENT))


def test_gradients_survive_a_look_at_the_base(random_model: str) -> None:
    def gradients(look: bool) -> list[Tensor]:
        backbone = fakes.adapted(random_model)
        cond = backbone.encode(fakes.PROMPTS[:2])
        x = torch.ones(2, *backbone.latent_shape)
        velocity = backbone.velocity(x, 0.5, cond, guidance=1.0)
        if look:
            with torch.no_grad(), backbone.base():
                backbone.velocity(x, 0.5, cond, guidance=1.0)
        velocity.square().mean().backward()
        return [p.grad for p in backbone.adapter_parameters(STUDENT) if p.grad is not None]

    plain, looked = gradients(False), gradients(True)
    assert len(plain) == len(fakes.adapted(random_model).adapter_parameters(STUDENT))
    assert all(torch.equal(a, b) for a, b in zip(plain, looked, strict=True))


def test_what_is_saved_is_what_diffusers_loads(random_model: str, tmp_path: Path) -> None:
    backbone = fakes.adapted(random_model, rank=4, alpha=10.0)
    velocity, x, cond = probe(backbone, guidance=1.0)
    backbone.save_adapter(STUDENT, tmp_path)
    stock = StableDiffusion3Pipeline.from_pretrained(random_model)
    stock.load_lora_weights(str(tmp_path))
    embeds, pooled = (cond.text[name][cond.index] for name in ("embeds", "pooled"))
    for pipe in (stock, flowalign.load(random_model, lora=tmp_path)):
        with torch.no_grad():
            found = pipe.transformer(x, embeds, pooled, torch.full((4,), 600.0)).sample
        assert_close(found, velocity, rtol=0, atol=1e-6)
    again = fakes.backbone(random_model)
    again.load_adapter("other", tmp_path)
    assert torch.equal(probe(again, guidance=1.0)[0], velocity)


def test_guidance_extrapolates_from_the_unconditional_velocity(random_model: str) -> None:
    backbone = fakes.backbone(random_model)
    one, three = probe(backbone, 1.0)[0], probe(backbone, 3.0)[0]
    zero = probe(backbone, 0.0)[0]
    assert_close(three, zero + 3 * (one - zero), rtol=0, atol=1e-5)
    assert (three - one).abs().max() > 1e-4


def test_a_model_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    for index in (None, "{"):
        if index:
            (tmp_path / "model_index.json").write_text(index)
        with pytest.raises(ModelError, match=r"model\.id") as error:
            load_pipeline(str(tmp_path if index else tmp_path / "none"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["sd3.5_medium.safetensors", "me/model/lora.safetensors"])
def test_a_file_is_no_model(name: str, tmp_path: Path) -> None:
    """Nor a teacher's base. A folder may have such a name."""
    config = Path(flowalign.__file__).parents[1] / "configs/tiny/student_flow_opd.yaml"
    for key in ("model.id", "teachers.ocr.base"):
        with pytest.raises(ConfigError, match=f"{key}: .*{name}"):
            load(config, [f"{key}={name}"])
    (tmp_path / "x.safetensors").mkdir()
    assert ModelConfig(id=str(tmp_path / "x.safetensors")).id


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"dtype": "bfloat16"}])
def test_an_adapter_keeps_all_its_bits_on_a_base_that_has_fewer(
    random_model: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    full = fakes.adapted(random_model)
    full.save_adapter(STUDENT, tmp_path)
    small = fakes.backbone(random_model, **options)
    small.load_adapter(STUDENT, tmp_path)
    pairs = zip(small.adapter_parameters(STUDENT), full.adapter_parameters(STUDENT), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_fp8_is_the_rounded_base_in_velocity_and_gradient(random_model: str) -> None:
    """Against the same base whose weights were rounded by hand where they are stored in 8 bits."""
    small, rounded = fakes.backbone(random_model, quantization="fp8"), fakes.backbone(random_model)
    eight = {n for n, p in small.core.named_parameters() if p.dtype == torch.float8_e4m3fn}
    assert len(eight) > 20 and not any("norm" in name for name in eight)
    for name, weight in rounded.core.named_parameters():
        if name in eight:
            weight.data = weight.data.to(torch.float8_e4m3fn).float()
    found = []
    for backbone in (small, rounded):
        backbone.add_adapter(STUDENT, rank=4, alpha=6.0, targets=fakes.TARGETS)
        fakes.shake(backbone)
        cond = backbone.encode(fakes.PROMPTS[:2])
        x = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(3))
        velocity = backbone.velocity(x, 0.5, cond, guidance=2.0)
        velocity.square().mean().backward()
        found.append((velocity.detach(), [p.grad for p in backbone.adapter_parameters(STUDENT)]))
    assert_close(found[0], found[1], rtol=0, atol=1e-6)
    stored = {p.dtype for n, p in small.core.named_parameters() if n in eight}
    assert stored == {torch.float8_e4m3fn}


def test_the_vae_keeps_its_bits_and_decodes_in_small_batches(random_model: str) -> None:
    backbone = fakes.backbone(random_model, dtype="bfloat16", decode_batch=2)
    full = fakes.backbone(random_model)
    assert backbone.dtype == torch.bfloat16 and backbone.pipe.vae.dtype == torch.float32
    seen: list[int] = []
    decode = backbone.pipe.vae.decode
    backbone.pipe.vae.decode = lambda z, **kw: (seen.append(len(z)), decode(z, **kw))[1]
    latents = torch.randn(5, *backbone.latent_shape, generator=torch.Generator().manual_seed(4))
    assert_close(backbone.decode(latents), full.decode(latents), rtol=0, atol=1e-5)
    assert seen == [2, 2, 1]
    vae, process = full.pipe.vae, full.pipe.image_processor.postprocess
    with torch.no_grad():
        sample = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    assert_close(full.decode(latents), process(sample, output_type="pt"), rtol=0, atol=1e-5)


DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 3.0,
           "base_image_seq_len": 4, "max_image_seq_len": 64}  # fmt: skip


def with_scheduler(model: str, size: int = 32, **changes: Any) -> Backbone:
    """The backbone of a pipeline whose scheduler has these settings."""
    pipe = load_pipeline(model)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **changes)
    return fakes.backbone(model, pipe, height=size, width=size)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"shift": 3.0, "shift_terminal": None}, DYNAMIC,
        {**DYNAMIC, "time_shift_type": "linear", "shift_terminal": None},
        {"use_karras_sigmas": True}, {"use_exponential_sigmas": True},
    ],
)  # fmt: skip
def test_the_schedule_is_the_one_that_the_pipeline_takes(random_model, changes: dict[str, Any]):
    backbone, steps = with_scheduler(random_model, **changes), 5
    pipe = backbone.pipe
    before = torch.as_tensor(pipe.scheduler.sigmas).clone()
    ours = backbone.sigmas(steps)
    assert torch.equal(torch.as_tensor(pipe.scheduler.sigmas), before)  # it was not touched
    pipe("red", height=32, width=32, num_inference_steps=steps, output_type="latent")
    assert torch.equal(ours, pipe.scheduler.sigmas.cpu())
    if "use_dynamic_shifting" in changes:
        shift = backbone.shift(steps)  # sigma = shift u / (1 + (shift - 1) u), of the even grid u
        plain = with_scheduler(random_model, shift=1.0, shift_terminal=None).sigmas(steps)
        if not pipe.scheduler.config.shift_terminal:
            assert_close(ours, shift * plain / (1 + (shift - 1) * plain))
        assert not torch.equal(with_scheduler(random_model, 64, **changes).sigmas(steps), ours)
    elif not any(key.startswith("use_") for key in changes):
        config = pipe.scheduler.config
        assert backbone.shift(steps) == config.shift
        assert torch.equal(ours, sde.sigmas(steps, config.shift, terminal=config.shift_terminal))


@pytest.mark.parametrize(
    "changes",
    [{"invert_sigmas": True}, {"stochastic_sampling": True}, {"num_train_timesteps": 500}],
)
def test_a_schedule_that_would_be_sampled_otherwise_is_refused(
    random_model: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        with_scheduler(random_model, **changes).sigmas(5)
