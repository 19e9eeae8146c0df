"""LoRAs under the names of other programs: their updates are those of the file, or refused."""

import copy
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import save_file
from test_families import PIPES, backbone, probe
from torch import Tensor
from torch.testing import assert_close

from flowalign.backbone.adapters import AdapterError, read_lora
from flowalign.backbone.conversion import Update, convert, layers_of
from flowalign.backbone.sd3 import SD3
from flowalign.backbone.structure import model_spec
from flowalign.config import ModelConfig
from flowalign.teachers.merge import merge

RANK, ALPHA = 4, 3.0
Layers = dict[str, tuple[Tensor, Tensor]]  # {layer: (A, B)} as a format has them
FUSED = {  # BFL's names of the layers of a double block
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
}


def random_layers(core: Any, groups: dict[str, tuple[str, ...]]) -> Layers:
    """A LoRA of layers {name in the file: names in the transformer, side by side}."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for name, layers in groups.items():
        linear = [core.get_submodule(layer) for layer in layers]
        rows = sum(part.weight.shape[0] for part in linear)
        a = torch.randn(RANK, linear[0].weight.shape[1], generator=generator) * 0.3
        made[name] = (a, torch.randn(rows, RANK, generator=generator) * 0.3)
    return made


def as_they_are(core: Any) -> dict[str, tuple[str, ...]]:
    """Layers under their own names: attention of all blocks."""
    names = [name for name, m in core.named_modules() if isinstance(m, torch.nn.Linear)]
    return {n: (n,) for n in names if re.search(r"attn|attention", n) and "norm" not in n}


def bfl(core: Any) -> dict[str, tuple[str, ...]]:
    """The double blocks under BFL's names."""
    return {
        f"double_blocks.{block}.{name}": tuple(f"transformer_blocks.{block}.{x}" for x in layers)
        for block in range(2)
        for name, layers in FUSED.items()
    }


def flux_bfl(core: Any) -> dict[str, tuple[str, ...]]:
    """FLUX.1's other layers, too: the first of a single block is four, not all of one size, for
    which diffusers has the sizes of FLUX.1-dev alone."""
    path, parts = "single_transformer_blocks.0", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    others = {
        "double_blocks.0.img_mod.lin": "transformer_blocks.0.norm1.linear",
        "double_blocks.1.txt_mlp.2": "transformer_blocks.1.ff_context.net.2",
        "single_blocks.0.linear2": f"{path}.proj_out",
        "single_blocks.0.modulation.lin": f"{path}.norm.linear",
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "img_in": "x_embedder",
    }
    fused = {"single_blocks.0.linear1": tuple(f"{path}.{part}" for part in parts)}
    return bfl(core) | fused | {name: (layer,) for name, layer in others.items()}


def flux2_bfl(core: Any) -> dict[str, tuple[str, ...]]:
    """FLUX.2's single blocks, too, which have the same fused layers in diffusers."""
    single = {
        f"single_blocks.0.linear{number}": (f"single_transformer_blocks.0.attn.{layer}",)
        for number, layer in ((1, "to_qkv_mlp_proj"), (2, "to_out"))
    }
    feed = {
        f"double_blocks.0.img_mlp.{n}": (f"transformer_blocks.0.ff.{layer}",)
        for n, layer in ((0, "linear_in"), (2, "linear_out"))
    }
    return bfl(core) | single | feed


def z_image_fused(core: Any) -> dict[str, tuple[str, ...]]:
    found = {}
    for block in range(2):
        path = f"layers.{block}.attention"
        found[f"{path}.qkv"] = tuple(f"{path}.to_{x}" for x in "qkv")
        found[f"{path}.out"] = (f"{path}.to_out.0",)
    return found


# What programs make of a layer's name


def ab(prefix: str = "", default: bool = False) -> Callable[[Layers], dict[str, Tensor]]:
    """<prefix><layer>.lora_A.weight, of scale 1."""
    end = "default.weight" if default else "weight"

    def written(layers: Layers) -> dict[str, Tensor]:
        names = {layer: [f"{prefix}{layer}.lora_{half}.{end}" for half in "AB"] for layer in layers}
        return {n: w for x, pair in layers.items() for n, w in zip(names[x], pair, strict=True)}

    return written


def down_up(
    prefix: str = "", dots: bool = True, alpha: bool = True
) -> Callable[[Layers], dict[str, Tensor]]:
    """<prefix><layer>.lora_down.weight with alpha; kohya writes names without dots."""

    def written(layers: Layers) -> dict[str, Tensor]:
        found = {}
        for layer, (a, b) in layers.items():
            name = prefix + (layer if dots else layer.replace(".", "_"))
            found |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}
            if alpha:
                found[f"{name}.alpha"] = torch.tensor(ALPHA)
        return found

    return written


def ab_with_alpha(layers: Layers) -> dict[str, Tensor]:
    """diffusers' names, and alphas."""
    alphas = {f"transformer.{layer}.alpha": torch.tensor(ALPHA) for layer in layers}
    return ab("transformer.")(layers) | alphas


def final_layer(core: Any) -> dict[str, tuple[str, ...]]:
    """The last layers in BFL's code: of the second one, the halves of B are exchanged."""
    return {"final_layer.linear": ("proj_out",), "final_layer.adaLN_modulation.1": (ADALN,)}


def stability(core: Any) -> dict[str, tuple[str, ...]]:
    """A fused layer in Stability's code."""
    names = tuple(f"transformer_blocks.0.attn.to_{x}" for x in "qkv")
    return {"joint_blocks.0.x_block.attn.qkv": names, **final_layer(core)}


def modulations(core: Any) -> dict[str, tuple[str, ...]]:
    """Of FLUX.2, for all blocks."""
    names = ("single_stream_modulation", "double_stream_modulation_img")
    return {f"{name}.lin": (f"{name}.linear",) for name in names}


def xlabs(core: Any) -> dict[str, tuple[str, ...]]:
    """XLabs' layers of FLUX.1, which have no alpha."""
    path = "transformer_blocks.0.attn"
    return {
        "double_blocks.0.processor.qkv_lora1": tuple(f"{path}.to_{x}" for x in "qkv"),
        "double_blocks.0.processor.proj_lora2": (f"{path}.to_add_out",),
    }


def processors(core: Any) -> dict[str, tuple[str, ...]]:
    """As diffusers wrote LoRAs in 2023."""
    path = "transformer_blocks.0.attn"
    outer = {f"{path}.processor.to_out_lora": (f"{path}.to_out.0",)}
    return outer | {f"{path}.processor.to_{x}_lora": (f"{path}.to_{x}",) for x in "qkv"}


def plain_down_up(layers: Layers) -> dict[str, Tensor]:
    down = {f"{layer}.down.weight": a for layer, (a, _) in layers.items()}
    return down | {f"{layer}.up.weight": b for layer, (_, b) in layers.items()}


ADALN = "norm_out.linear"
COMFY, KOHYA, HERE = "diffusion_model.", "lora_unet_", "lora_transformer_"
ALL = ["flux", "flux2", "qwen_image", "z_image", "sd3", "sana"]
READ: dict[str, tuple[list[str], Any, Any, float]] = {
    # format: families, layers, writer, scale; diffusers reads it, too
    "kohya_bfl": (["flux", "schnell"], bfl, down_up(KOHYA, dots=False), ALPHA / RANK),
    "kohya_flux2": (["flux2"], flux2_bfl, down_up(KOHYA, dots=False), ALPHA / RANK),
    "kohya_diffusers": (["flux"], as_they_are, down_up("lora_transformer_", False), ALPHA / RANK),
    "kohya": (["qwen_image"], as_they_are, down_up(KOHYA, dots=False), ALPHA / RANK),
    "kohya_z": (["z_image"], z_image_fused, down_up(KOHYA, dots=False), ALPHA / RANK),
    "kohya_z_split": (["z_image"], as_they_are, down_up(KOHYA, dots=False), ALPHA / RANK),
    "comfy_bfl_down_up": (["flux"], bfl, down_up(COMFY), ALPHA / RANK),
    "comfy_bfl": (["flux2"], flux2_bfl, ab(COMFY), 1.0),
    "peft_bfl": (["klein"], flux2_bfl, ab("base_model.model."), 1.0),
    "comfy": (["klein", "qwen_image", "z_image"], as_they_are, ab(COMFY), 1.0),
    "comfy_down_up": (["qwen_image", "z_image"], as_they_are, down_up(COMFY), ALPHA / RANK),
    "down_up": (["qwen_image", "z_image"], as_they_are, down_up(), ALPHA / RANK),
    "default": (["qwen_image", "z_image"], as_they_are, ab("", True), 1.0),
    "alpha": (["flux"], as_they_are, ab_with_alpha, ALPHA / RANK),
    "down_up_no_alpha": (["flux"], as_they_are, down_up("transformer.", alpha=False), 1.0),
}
SCALE = ALPHA / RANK
WRAPPERS = ["pipe.dit.", "transformer._orig_mod.", "transformer.base_model.model."]
OURS: dict[str, tuple[list[str], Any, Any, float]] = {  # which no diffusers reads, or not rightly
    "onetrainer": (ALL, as_they_are, down_up("transformer."), SCALE),
    "onetrainer_underscores": (ALL[1:], as_they_are, down_up(HERE, False), SCALE),
    "comfy": (["flux", "sd3", "sana"], as_they_are, ab(COMFY), 1.0),
    "kohya": (["sd3", "sana"], as_they_are, down_up(KOHYA, dots=False), SCALE),
    "kohya_final": (["flux", "flux2", "sd3"], final_layer, down_up(KOHYA, dots=False), SCALE),
    "comfy_final": (["flux", "flux2"], final_layer, ab(COMFY), 1.0),
    "kohya_flux": (["flux"], flux_bfl, down_up(KOHYA, dots=False), SCALE),
    "kohya_sd3": (["sd3"], stability, down_up(KOHYA, dots=False), SCALE),
    "comfy_sd3": (["sd3"], stability, ab(COMFY), 1.0),
    "kohya_modulations": (["flux2"], modulations, down_up(KOHYA, dots=False), SCALE),
    "xlabs": (["flux"], xlabs, plain_down_up, 1.0),
    "processors": (["sd3", "flux"], processors, plain_down_up, 1.0),
    **{form: (["flux"], as_they_are, ab(form), 1.0) for form in WRAPPERS},
    "peft_default": (ALL, as_they_are, ab("base_model.model.", True), 1.0),
}  # fmt: skip
FAST = ("flux", "schnell", "z_image", "sd3")


def cases(table: dict[str, Any]) -> list[Any]:
    """(format, family) of a table."""
    return [
        pytest.param(name, family, marks=[] if family in FAST else [pytest.mark.slow])
        for name, case in table.items()
        for family in case[0]
    ]


def written(format: str, family: str, folder: Path) -> tuple[Layers, Path]:
    """A file of a format, alone in its folder."""
    _, groups, writer, _ = (READ | OURS)[format]
    core = PIPES(family).transformer
    layers = random_layers(core, groups(core))
    save_file(writer(layers), folder / "public.safetensors")
    return layers, folder


def assert_updates(lora: Any, layers: Layers, format: str, family: str) -> None:
    """By definition: the update of the layers, side by side, is scale B A."""
    _, names, _, scale = (READ | OURS)[format]
    groups = names(PIPES(family).transformer)
    for name, (a, b) in layers.items():
        parts = [
            lora.scales[n] * lora.weights[f"{n}.lora_B.weight"] @ lora.weights[f"{n}.lora_A.weight"]
            for n in groups[name]
        ]
        if groups[name] == (ADALN,):  # (shift, scale) there, (scale, shift) in diffusers
            b = torch.cat(b.chunk(2)[::-1])
        assert_close(torch.cat(parts), scale * b @ a, rtol=0, atol=1e-6)
    assert len(lora.ranks) == sum(map(len, groups.values()))


@pytest.mark.parametrize(("format", "family"), [*cases(READ), *cases(OURS)])
def test_a_public_lora_has_the_updates_of_its_file(format: str, family: str, tmp_path: Path):
    """And the velocity that it has in diffusers, where that reads it."""
    layers, folder = written(format, family, tmp_path)
    ours = backbone(copy.deepcopy(PIPES(family)))
    ours.load_adapter("public", folder)
    assert_updates(ours.read_lora(folder), layers, format, family)
    if family in READ.get(format, ([],))[0]:
        x, cond = probe(ours)
        stock = copy.deepcopy(PIPES(family))
        stock.load_lora_weights(str(folder), weight_name="public.safetensors")
        with torch.no_grad():
            found = ours.velocity(x, 0.7, cond, guidance=1.0)
            expected = backbone(stock).velocity(x, 0.7, cond, guidance=1.0)
        assert_close(found, expected, rtol=0, atol=1e-6)


def family_of(name: str) -> Callable[[], Any]:
    """The family of a small pipeline, or of a public model."""
    if "/" in name:
        return lambda: model_spec(ModelConfig(id=name)).family
    return lambda: backbone(PIPES(name)).family


def converted(weights: dict[str, Tensor], family: Any) -> dict[str, Update]:
    return convert(layers_of(weights), family)


@pytest.mark.parametrize("family", ["flux2", "sana"])
def test_wrappers_that_torch_and_peft_put_anywhere_are_taken_off(family: str) -> None:
    """Blocks that were compiled one by one, checkpointed or sharded; an adapter of another name."""
    (layer, pair), *_ = random_layers(core := PIPES(family).transformer, as_they_are(core)).items()
    first, _, rest = layer.partition(".0.")
    for name in (f"{first}.0._orig_mod.{rest}", f"_fsdp_wrapped_module.{first}.0.module.{rest}"):
        for end in (".style", ""):
            weights = {f"{name}.lora_{h}{end}.weight": w for h, w in zip("AB", pair, strict=True)}
            assert list(converted(weights, family_of(family)())) == [layer]


def sd3_checkpoint(width: int = 8) -> dict[str, Tensor]:
    """Weights of Stability's own code with two blocks, of which the first has two attentions as in
    SD3.5 Medium: what diffusers converts."""
    shapes = {"pos_embed": (1, 4, width), "x_embedder.proj.weight": (width, 4, 2, 2)}
    linear = {f"{name}_embedder.mlp.{n}": (width, width) for name in "ty" for n in (0, 2)}
    linear |= {"context_embedder": (width, width), "final_layer.linear": (4, width)}
    linear["final_layer.adaLN_modulation.1"] = (2 * width, width)
    for block, stream in product(range(2), ("x_block", "context_block")):
        path = f"joint_blocks.{block}.{stream}"
        last = block == 1 and stream == "context_block"  # only its keys and values are used
        linear[f"{path}.attn.qkv"] = (3 * width, width)
        linear[f"{path}.adaLN_modulation.1"] = ((2 if last else 6) * width, width)
        if not last:
            linear[f"{path}.attn.proj"] = (width, width)
            linear |= {f"{path}.mlp.fc1": (4 * width, width), f"{path}.mlp.fc2": (width, 4 * width)}
    linear |= {"joint_blocks.0.x_block.attn2.qkv": (3 * width, width)}
    linear |= {"joint_blocks.0.x_block.attn2.proj": (width, width)}
    shapes |= {f"{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    shapes["x_embedder.proj.bias"] = (width,)
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class TwoBlocks(SD3):
    """Of that checkpoint."""

    def __init__(self, width: int = 8) -> None:
        names: Any = dict(num_layers=2, joint_attention_dim=8, caption_projection_dim=width)
        self.transformer = SD3Transformer2DModel(
            sample_size=8, in_channels=4, num_attention_heads=1, attention_head_dim=width,
            pooled_projection_dim=8, dual_attention_layers=(0,), pos_embed_max_size=8, **names,
        )  # fmt: skip

    @property
    def core(self) -> Any:
        return self.transformer


def test_a_kohya_lora_of_sd3_changes_what_it_changes_in_stability_s_code() -> None:
    """The reference is diffusers' conversion of whole checkpoints: before and after B A is added
    to the layers under their own names."""
    before, generator = sd3_checkpoint(), torch.Generator().manual_seed(4)
    layers = {}
    for name, weight in before.items():
        if re.match("joint_blocks|final_layer", name) and name.endswith(".weight"):
            a, b = (
                torch.randn(s, generator=generator)
                for s in ((4, weight.shape[1]), (len(weight), 4))
            )
            layers[name.removesuffix(".weight")] = (a, b)
    scale = ALPHA / RANK
    after = dict(before) | {
        f"{name}.weight": before[f"{name}.weight"] + scale * b @ a
        for name, (a, b) in layers.items()
    }
    converter = convert_sd3_transformer_checkpoint_to_diffusers
    plain, changed = (converter(dict(w)) for w in (before, after))
    found = converted(down_up(KOHYA, dots=False)(layers), TwoBlocks())
    updated = {name for name in plain if not torch.equal(plain[name], changed[name])}
    assert {name.removesuffix(".weight") for name in updated} == found.keys()
    for name in updated:
        a, b, alpha = found[name.removesuffix(".weight")]
        assert alpha == ALPHA
        assert_close(plain[name] + scale * b @ a, changed[name], rtol=0, atol=1e-5)


# What is refused, and where a model is not known -------------------------------------------------


def kohya_flux() -> dict[str, Tensor]:
    """A kohya file of FLUX.1, not written yet."""
    layers = random_layers(core := PIPES("flux").transformer, bfl(core))
    return down_up(KOHYA, dots=False)(layers)


def halves(layer: str, form: str = "{}.lora_{}.weight") -> dict[str, Tensor]:
    """A LoRA of one layer, 32 wide."""
    return {form.format(layer, h): torch.ones(s) for h, s in (("A", (2, 32)), ("B", (32, 2)))}


TO_Q = "transformer.transformer_blocks.0.attn.to_q"
X_Q = COMFY + TO_Q.partition(".")[2]  # another program's, which is converted
HALF, NAN = halves(X_Q), torch.tensor(torch.nan)
REFUSED: dict[str, tuple[str, dict[str, Tensor], str]] = {
    # family, weights, what the reason names
    "BFL's names with SANA": ("sana", halves("double_blocks.0.img_attn.proj"), "double_blocks"),
    "a layer that is not there": ("flux", HALF | halves(f"{KOHYA}double_blocks_0_x"), "blocks_0_x"),
    "LoKr": ("flux", halves(TO_Q, "{}.lokr_w{}"), "LoKr"),
    "a text encoder": ("flux", HALF | halves("lora_te1_text_model_x"), "lora_te1"),
    "8 bits with scales": ("flux", HALF | {f"{X_Q}.weight_scale": torch.ones(1)}, "scale"),
    "integers": ("sd3", {n: w.to(torch.int8) for n, w in HALF.items()}, "int8"),
    "a shape of ComfyUI's": (
        "flux", HALF | {f"{X_Q}.reshape_weight": torch.tensor([4, 4])}, "reshape_weight is another"
    ),
    "a count of steps": ("flux", HALF | {"step": torch.tensor([100])}, "step is no A, B or alpha"),
    "NaN": ("flux", {n: w * NAN for n, w in HALF.items()}, "NaN"),
    "an alpha below 0": ("flux", HALF | {f"{X_Q}.alpha": torch.tensor(-1.0)}, "alpha"),
    "half a layer": ("flux", {f"{X_Q}.lora_A.weight": torch.ones(2, 32)}, "A and B"),
    "rows of another model": ("flux", halves(f"{COMFY}double_blocks.0.img_attn.qkv"), "rows"),
    "fused and split": (
        "z_image",
        down_up(KOHYA, dots=False)({
            f"layers.0.attention.{name}": (torch.ones(2, 32), torch.ones(rows, 2))
            for name, rows in (("to_q", 32), ("qkv", 96))
        }),
        "two updates of layers.0.attention",
    ),
    **{
        f"twice: {end}": ("flux", HALF | halves(X_Q, end), "two weights")
        for end in ("{}.lora_{}.default.weight", "{}._orig_mod.lora_{}.weight")
    },
    "two alphas": (
        "flux",
        HALF | {f"{X_Q}.{end}": torch.tensor(2.0) for end in ("alpha", "lora.alpha")},
        "two weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_a_refusal_names_what_is_left_over(how: str, tmp_path: Path) -> None:
    family, weights, reason = REFUSED[how]
    save_file(weights, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError, match=reason):
        backbone(PIPES(family)).load_adapter("refused", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "family"), [("kohya_bfl", "flux"), ("kohya_z", "z_image"), ("alpha", "flux")]
)
def test_alpha_is_not_rounded_to_the_bits_of_a_file(
    format: str, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Weights so small that their product with alpha / r would lose bits in float16."""
    _, groups, writer, scale = READ[format]
    core = PIPES(family).transformer
    layers = {
        name: ((1e-4 * a).to(dtype), b.to(dtype))
        for name, (a, b) in random_layers(core, groups(core)).items()
    }
    save_file(writer(layers), tmp_path / "x.safetensors")
    lora = read_lora(tmp_path, family=family_of(family))
    for name, (a, b) in layers.items():
        parts = [
            lora.scales[layer]
            * lora.weights[f"{layer}.lora_B.weight"].double()
            @ lora.weights[f"{layer}.lora_A.weight"].double()
            for layer in groups(core)[name]
        ]
        assert_close(torch.cat(parts), scale * b.double() @ a.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_8_bits_are_read_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.linspace(-300, 300, 64).reshape(2, 32).to(dtype)
    save_file({**halves(TO_Q), f"{TO_Q}.lora_A.weight": values}, tmp_path / "x.safetensors")
    found = read_lora(tmp_path).weights["transformer_blocks.0.attn.to_q.lora_A.weight"]
    assert torch.equal(found.float(), values.float())


def test_without_a_model_another_program_s_names_are_refused_and_merge_takes_one(tmp_path: Path):
    (tmp_path / "a").mkdir()
    save_file(kohya_flux(), tmp_path / "a" / "public.safetensors")
    with pytest.raises(AdapterError, match="model"):
        merge([tmp_path / "a"] * 2, tmp_path / "out")
    PIPES("flux").save_pretrained(tmp_path / "model")
    merge([tmp_path / "a"] * 2, tmp_path / "out", model=str(tmp_path / "model"))
    one, two = read_lora(tmp_path / "a", family=family_of("flux")), read_lora(tmp_path / "out")
    assert set(two.ranks) == set(one.ranks)
    for layer in one.ranks:
        a, b = (f"{layer}.lora_{half}.weight" for half in "AB")
        update = one.scales[layer] * one.weights[b] @ one.weights[a]
        assert_close(two.weights[b] @ two.weights[a], 2 * update)


def test_peft_s_description_still_counts(tmp_path: Path) -> None:
    """diffusers takes alpha to be the rank; peft's file beside the weights says what it is."""
    layers = random_layers(core := PIPES("z_image").transformer, as_they_are(core))
    save_file(ab(COMFY)(layers), tmp_path / "adapter_model.safetensors")
    described = tmp_path / "adapter_config.json"
    described.write_text('{"r": 4, "lora_alpha": 8}')
    assert set(read_lora(tmp_path, family=family_of("z_image")).scales.values()) == {2.0}
    described.write_text('{"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2}}')
    with pytest.raises(AdapterError, match="alpha_pattern"):
        read_lora(tmp_path, family=family_of("z_image"))
