"""Every family of models: what we sample is what its diffusers pipeline samples, row by row, and
what we train its pipeline loads."""

import copy
import functools
from pathlib import Path
from typing import Any

import diffusers
import families
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch.testing import assert_close

from flowalign import sde
from flowalign.backbone import Backbone, ModelError, load_pipeline
from flowalign.backbone.lora import adapted_layers
from flowalign.config import ModelConfig
from flowalign.training.rollout import Noise, Schedule, places, sample
from flowalign.types import PromptBatch

STEPS, LENGTH = 3, 40
TEXTS = ["a red sign", 'a blue sign that says "WINDOW" and a green circle', "red"]
CALLS: dict[str, list[tuple[float, dict[str, Any]]]] = {  # our guidance, and the pipeline's words
    "sd3": [(1.0, {"guidance_scale": 1.0}), (4.0, {"guidance_scale": 4.0})],
    "flux": [(3.5, {"guidance_scale": 3.5}), (1.0, {"guidance_scale": 1.0})],
    "schnell": [(1.0, {})],
    "flux2": [(4.0, {"guidance_scale": 4.0})],
    "klein": [(1.0, {"guidance_scale": 1.0}), (4.0, {"guidance_scale": 4.0})],
    "klein_distilled": [(1.0, {"guidance_scale": 1.0})],
    "qwen_image": [
        (1.0, {"true_cfg_scale": 1.0}),
        (4.0, {"true_cfg_scale": 4.0, "negative_prompt": [" "] * 3}),
    ],
    "z_image": [(1.0, {"guidance_scale": 0.0}), (4.0, {"guidance_scale": 3.0})],
    "sana": [(1.0, {"guidance_scale": 1.0}), (4.0, {"guidance_scale": 4.0})],
}
SIZES = [(64, 96), (96, 64)]
LARGE = ("flux2", "klein", "klein_distilled")  # of 28 to 31 layers
CASES = [
    pytest.param(name, *case, *SIZES[number % 2], marks=[pytest.mark.slow] if name in LARGE else [])
    for name, cases in CALLS.items()
    for number, case in enumerate(cases)
]


FAST = ("flux", "sana")  # families whose text encoders are small
NAMES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in families.PIPELINES]
SHAPES = [  # batch, latent height and width, words added to the prompts
    (2, 8, 8, 0), (3, 8, 12, 1), (4, 12, 16, 2), (3, 12, 8, 3), (5, 8, 16, 1), (6, 16, 8, 0),
]  # fmt: skip
PIPES = functools.cache(families.pipeline)  # not to be changed


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def pipeline(name: str) -> Any:
    """A pipeline of its own for a test."""
    return copy.deepcopy(PIPES(name))


def backbone(pipe: Any, height: int = 64, width: int = 96) -> Backbone:
    dtype: Any = str(pipe.transformer.dtype).removeprefix("torch.")
    sizes: dict[str, Any] = {"height": height, "width": width, "max_sequence_length": LENGTH}
    found = Backbone(pipe, ModelConfig(id="random", dtype=dtype, **sizes))
    found.name = None  # peft would look for it on the Hub
    return found


def packed(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents as a call of the pipeline takes them."""
    if type(pipe).__name__ in ("FluxPipeline", "QwenImagePipeline"):
        return pipe._pack_latents(latents, *latents.shape)
    return latents


@pytest.mark.parametrize(("family", "guidance", "call", "height", "width"), CASES)
def test_our_images_are_the_pipelines(
    family: str, guidance: float, call: dict[str, Any], height: int, width: int
) -> None:
    """For the same latents, prompts of different lengths, steps and guidance."""
    pipe = PIPES(family)
    ours = backbone(pipe, height, width)
    count = len(TEXTS)
    batch = PromptBatch(TEXTS, ["t"] * count, [{}] * count)
    noise, shape = Noise((0,)), ours.latent_shape
    schedule = Schedule(ours.sigmas(STEPS), "ode", 0.0, None)
    found = sample(ours, batch, schedule, guidance=guidance, noise=noise, places=places(count, 1))
    start = torch.stack([noise.draw(row, 0, shape, 0)[0] for row in range(count)])
    options = {"use_resolution_binning": False} if family == "sana" else {}
    theirs = pipe(
        prompt=list(TEXTS),
        latents=packed(pipe, start),
        height=height,
        width=width,
        num_inference_steps=STEPS,
        max_sequence_length=LENGTH,
        output_type="pt",
        **options,
        **call,
    ).images
    assert theirs.std() > 0.01
    assert_close(found.images, theirs.float(), rtol=0, atol=1e-5)


def probe(ours: Backbone, rows: int = 3) -> tuple[torch.Tensor, Any]:
    """Latents [rows,C,h,w], and the conditioning of as many texts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, *ours.latent_shape, generator=generator)
    return x, ours.encode((TEXTS * rows)[:rows])


def strength(ours: Backbone) -> float:
    """A guidance scale that the model has."""
    return 1.0 if ours.family.guidance == "none" else 3.0


@torch.no_grad()
def test_a_row_is_the_same_alone_and_in_a_batch(name: str) -> None:
    """Whatever the lengths of the prompts beside it."""
    ours = backbone(PIPES(name))
    x, cond = probe(ours)
    scale, sigma = strength(ours), torch.tensor([0.9, 0.5, 0.2])
    together = ours.velocity(x, sigma, cond, guidance=scale)
    for row, text in enumerate(TEXTS):
        own = ours.encode([text])
        alone = ours.velocity(x[[row]], float(sigma[row]), own, guidance=scale)
        assert_close(together[[row]], alone, rtol=0, atol=1e-6 * scale)  # CFG multiplies errors


def adapted(pipe: Any) -> Backbone:
    """With an adapter that matters, of the family's own layers."""
    ours = backbone(pipe)
    ours.add_adapter("student", rank=4, alpha=6.0)
    torch.manual_seed(2)
    for parameter in ours.adapter_parameters("student"):
        torch.nn.init.normal_(parameter.data, std=0.2)
    return ours


@torch.no_grad()
def test_a_lora_goes_to_diffusers_and_back(name: str, tmp_path: Path) -> None:
    ours = adapted(pipeline(name))
    x, cond = probe(ours)
    velocity = ours.velocity(x, 0.7, cond, guidance=1.0)
    with ours.base():
        assert float((ours.velocity(x, 0.7, cond, guidance=1.0) - velocity).abs().max()) > 1e-2
    ours.save_adapter("student", tmp_path / "ours")

    stock = pipeline(name)
    stock.load_lora_weights(str(tmp_path / "ours"))
    assert_close(backbone(stock).velocity(x, 0.7, cond, guidance=1.0), velocity, rtol=0, atol=1e-6)
    peft = get_peft_model_state_dict(stock.transformer, adapter_name="default_0")
    config = stock.transformer.peft_config["default_0"].to_dict()
    stock.save_lora_weights(
        tmp_path / "theirs",
        transformer_lora_layers=peft,
        transformer_lora_adapter_metadata={**config, "target_modules": list(ours.family.targets)},
    )
    again = backbone(pipeline(name))
    again.load_adapter("theirs", tmp_path / "theirs")
    assert_close(again.velocity(x, 0.7, cond, guidance=1.0), velocity, rtol=0, atol=1e-6)


def test_the_ratio_of_a_fresh_rollout_is_one_in_16_bits(name: str) -> None:
    """Rollout and update share one forward path."""
    ours = adapted(pipeline(name).to(torch.bfloat16))
    count = len(TEXTS)
    batch = PromptBatch(TEXTS, ["t"] * count, [{}] * count)
    schedule = Schedule(ours.sigmas(STEPS), "sde", 0.7, (0, 2))
    scale = strength(ours)
    rollout = sample(
        ours, batch, schedule, guidance=scale, noise=Noise((0,)), places=places(count, 1)
    )
    assert rollout.log_probs is not None and rollout.next_states is not None
    for column, step in enumerate(rollout.steps):
        x, sigma = rollout.states[:, column].float(), schedule.sigmas[step]
        velocity = ours.velocity(x, sigma, rollout.conditioning, guidance=scale)
        assert velocity.requires_grad
        transition = sde.scheduled_transition(schedule, x, velocity, torch.full((count,), step))
        again = sde.log_prob(transition, rollout.next_states[:, column].float())
        assert torch.equal(again, rollout.log_probs[:, column])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the solver's own
def test_the_dpm_solver_of_sana_becomes_euler_steps_between_its_noise_levels() -> None:
    pipe = pipeline("sana")
    flow: dict[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler(**flow, flow_shift=3.0)
    pipe.scheduler.set_timesteps(20)
    assert_close(backbone(pipe).sigmas(20), pipe.scheduler.sigmas.float(), rtol=0, atol=1e-3)
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler()
    with pytest.raises(ModelError, match="FlowMatchEulerDiscreteScheduler"):
        backbone(pipe).sigmas(STEPS)


def test_a_scale_that_a_model_does_not_have_is_refused() -> None:
    ours = backbone(PIPES("schnell"))
    x, cond = probe(ours)
    with pytest.raises(ModelError, match=r"guidance"):
        ours.velocity(x, 0.7, cond, guidance=3.5)


def test_a_folder_is_enough(name: str, tmp_path: Path) -> None:
    """model_index.json names the family."""
    PIPES(name).save_pretrained(tmp_path)
    ours, again = backbone(PIPES(name)), backbone(load_pipeline(str(tmp_path)))
    assert type(again.family) is type(ours.family)
    x, cond = probe(ours)
    with torch.no_grad():
        expected = ours.velocity(x, 0.7, cond, guidance=strength(ours))
        found = again.velocity(x, 0.7, again.encode(TEXTS), guidance=strength(ours))
    assert_close(found, expected, rtol=0, atol=1e-5)  # where weights lie moves the last bits


def test_every_weight_that_is_trained_has_a_gradient(name: str) -> None:
    """Else DDP waits for it for ever. Layers whose output is thrown away are not trained."""
    ours = adapted(pipeline(name))
    x, cond = probe(ours)
    ours.velocity(x, 0.7, cond, guidance=1.0).square().mean().backward()
    for key, parameter in ours.core.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
    idle = [key for key, p in ours.core.named_parameters() if ".lora_" in key and p.grad is None]
    assert {key.split(".lora_")[0] for key in idle} == set(ours.family.unused)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch itself, while it traces
def test_how_it_computes_changes_nothing(name: str) -> None:
    """Velocity and gradient with activations recomputed, and traced blocks (the compiler itself is
    tested with the tiny model)."""
    ours = adapted(pipeline(name))
    x, cond = probe(ours)

    def computed() -> list[torch.Tensor]:
        velocity = ours.velocity(x, 0.5, cond, guidance=1.0)
        trained = [p for p in ours.adapter_parameters("student") if p.requires_grad]
        return [velocity.detach(), *torch.autograd.grad(velocity.square().mean(), trained)]

    before = computed()
    ours.core.enable_gradient_checkpointing()
    ours.core.train()
    assert_close(computed(), before, rtol=0, atol=1e-5)
    ours.core.disable_gradient_checkpointing()
    ours.core.eval()
    torch._dynamo.reset()
    ours.compile(backend="eager")
    assert_close(computed(), before, rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_new_shapes_are_not_compiled_without_end(name: str) -> None:
    """After three shapes a graph fits all further batch sizes, images and lengths of texts."""
    counters = torch._dynamo.utils.counters["stats"]
    ours = adapted(pipeline(name))
    torch._dynamo.reset()
    counters.clear()
    ours.compile(backend="eager")
    graphs = []
    for rows, height, width, words in SHAPES:
        x = torch.randn(rows, ours.family.channels, height, width)
        cond = ours.encode([f"{row} cats{' and a dog' * words}" for row in range(rows)])
        ours.velocity(x, 0.5, cond, guidance=1.0)
        graphs.append(counters["unique_graphs"])
    assert graphs[2:] == [graphs[2]] * 4 and graphs[2] > 0


@pytest.mark.slow
def test_a_list_of_layers_that_has_the_name_of_a_target_is_left_out() -> None:
    """As `attn.to_out` in the double blocks of FLUX.2."""
    core = pipeline("flux2").transformer
    found = adapted_layers(core, ["attn.to_out"])
    assert found and all(isinstance(core.get_submodule(n), torch.nn.Linear) for n in found)
    core.add_adapter(LoraConfig(r=1, target_modules=found))


def test_the_layers_of_published_scripts_can_be_adapted(name: str) -> None:
    """Those in docs/backbones.md."""
    page = (Path(__file__).parent.parent / "docs" / "backbones.md").read_text()
    kind = backbone(PIPES(name)).family.name
    rows = [row for row in page.splitlines() if f"`{kind}`" in row and "to_out.0, " in row]
    for row in rows:
        core = pipeline(name).transformer
        targets = row.split("`[")[1].split("]`")[0].split(", ")
        assert all(adapted_layers(core, [target]) for target in targets)
        core.add_adapter(LoraConfig(r=1, target_modules=adapted_layers(core, targets)))
    assert len(rows) == (kind not in ("sd3", "sana"))
