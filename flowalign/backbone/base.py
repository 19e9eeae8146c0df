"""A Stable Diffusion 3 pipeline as the library sees it: text -> velocity -> pixels.

The one place with classifier-free guidance, and the one that knows named LoRA adapters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from flowalign.adapters.files import AdapterError, Lora, read_lora, write_lora
from flowalign.backbone.attention import use_backend
from flowalign.backbone.precision import compute_in_the_bases_dtype, lora_layers
from flowalign.backbone.sd3 import dynamic_shift, load_pipeline, scheduler_sigmas
from flowalign.config import ModelConfig
from flowalign.text import TextEncoder
from flowalign.types import Conditioning

T = TypeVar("T")
COMPILATIONS = 256  # of one kind of block: adapters x (rollout, update) x shapes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Backbone:
    """One frozen base with named adapters. Images are height x width pixels. dtype: that of all
    arithmetic of the transformer, its adapters included (None = of its weights). decode_batch:
    images a VAE decode (None = all that are asked for at once). text_cache, offload_text_encoders:
    `flowalign.text.TextEncoder`. name: the base's id, which saved adapters carry.

    transformer may be replaced by its wrapped self (accelerate.prepare): `velocity` goes through
    the wrapper, so that rollout and update share one forward path; adapters and saving go
    through `core`, the bare SD3Transformer2DModel. sharded: the base's weights lie in pieces on
    several processes, so that a forward pass of one of them is one of all, or it waits for ever.
    """

    sharded = compiled = False
    frozen: frozenset[str] = frozenset()  # names of adapters that are never trained
    _lora_layers: Sequence[LoraLayer] = ()  # found once: to look costs more than to switch

    def __init__(
        self,
        pipe: StableDiffusion3Pipeline,
        *,
        height: int,
        width: int,
        max_sequence_length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        decode_batch: int | None = None,
        text_cache: str | Path | None = None,
        offload_text_encoders: bool = False,
        name: str | None = None,
    ) -> None:
        self.pipe, self.name, self.decode_batch = pipe, name, decode_batch
        self.device = torch.device(device)
        if self.device.type == "cpu":
            # accelerate's "cpu:0" of several processes would copy all weights, and where they lie
            # in memory changes the last bits of products: two processes are to do what one does
            self.device = torch.device("cpu")
        self.core = pipe.transformer.requires_grad_(False).eval().to(self.device)
        self.transformer: nn.Module = self.core
        self.dtype = dtype or next(self.core.parameters()).dtype
        pipe.vae.requires_grad_(False).eval().to(self.device)
        self.text = TextEncoder(
            pipe,
            device=self.device,
            max_sequence_length=max_sequence_length,
            cache=text_cache,
            offload=offload_text_encoders,
        )
        factor = pipe.vae_scale_factor
        grid = factor * self.core.config.patch_size
        if height % grid or width % grid:
            raise ValueError(
                f"{height}x{width} pixels: height and width must be multiples of {grid}"
            )
        self.latent_shape = (self.core.config.in_channels, height // factor, width // factor)

    @classmethod
    def load(cls, model: ModelConfig, device: torch.device | str = "cpu") -> Backbone:
        """The model of a config, with its attention backend and checkpointing; ModelError if it
        cannot be loaded."""
        pipe = load_pipeline(
            model.id,
            dtype=DTYPES[model.dtype],
            vae_dtype=DTYPES[model.vae_dtype],
            quantization=model.quantization,
            revision=model.revision,
        )
        backbone = cls.of(pipe, model, device)
        if model.attention:
            use_backend(backbone.core, model.attention)
        if model.gradient_checkpointing:
            backbone.core.enable_gradient_checkpointing()
        return backbone

    @classmethod
    def of(cls, pipe: Any, model: ModelConfig, device: torch.device | str) -> Backbone:
        """A pipeline as a config's model wants it; its attention and checkpointing as they are."""
        return cls(
            pipe,
            height=model.height,
            width=model.width,
            max_sequence_length=model.max_sequence_length,
            device=device,
            dtype=DTYPES[model.dtype],
            decode_batch=model.decode_batch,
            text_cache=model.text_cache,
            offload_text_encoders=model.offload_text_encoders,
            name=model.id,
        )

    # Sampling parts ----------------------------------------------------------------------------

    def sigmas(self, num_steps: int) -> Tensor:
        """The schedule [T+1] of the pipeline's own scheduler, all its settings included; ModelError
        where it steps otherwise than a rollout does."""
        return scheduler_sigmas(self.pipe.scheduler, num_steps, self._tokens)

    @property
    def shift(self) -> float:
        """The shift of that schedule: sigma = shift u / (1 + (shift - 1) u) of an even u."""
        scheduler = self.pipe.scheduler
        if not scheduler.config.use_dynamic_shifting:
            return scheduler.shift
        mu = dynamic_shift(scheduler, self._tokens)
        return mu if scheduler.config.time_shift_type == "linear" else math.exp(mu)

    @property
    def _tokens(self) -> int:
        """Tokens of an image, on which a dynamic shift depends."""
        _, height, width = self.latent_shape
        return (height // self.core.config.patch_size) * (width // self.core.config.patch_size)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], copies: int = 1) -> Conditioning:
        """Conditioning of len(prompts) * copies images; the copies of a prompt lie together. A text
        that comes several times is encoded once."""
        texts = list(dict.fromkeys(prompts))
        embeds, pooled = self.text(texts)
        negative, negative_pooled = self.text.negative()
        place = {text: i for i, text in enumerate(texts)}
        index = torch.tensor([place[text] for text in prompts], device=self.device)
        index = index.repeat_interleave(copies)
        return Conditioning(embeds, pooled, index, negative, negative_pooled)

    def velocity(
        self, x: Tensor, sigma: float | Tensor, cond: Conditioning, *, guidance: float
    ) -> Tensor:
        """v [B,C,h,w] of the active adapter, float32, at x [B,C,h,w]; sigma is a number or [B].

        v = v_negative + guidance * (v_positive - v_negative), as diffusers' pipeline has it;
        guidance 1 is the conditional velocity alone, at half the cost.
        """
        batch = x.shape[0]
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=x.device).expand(batch)
        embeds, pooled = cond.embeds[cond.index], cond.pooled[cond.index]
        if guidance == 1:
            return self._forward(x, sigma, embeds, pooled)
        both = self._forward(
            torch.cat([x, x]),
            torch.cat([sigma, sigma]),
            torch.cat([cond.negative_embeds.expand_as(embeds), embeds]),
            torch.cat([cond.negative_pooled.expand_as(pooled), pooled]),
        )
        negative, positive = both.chunk(2)
        return negative + guidance * (positive - negative)

    def _forward(self, x: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        with self._compiling():
            output = self.transformer(
                hidden_states=x.to(self.dtype),
                encoder_hidden_states=embeds.to(self.dtype),
                pooled_projections=pooled.to(self.dtype),
                timestep=sigma * 1000,
                return_dict=False,
            )
        return output[0].float()

    def in_step(self, batches: list[T]) -> list[T]:
        """The batches of this process, each of equally many forward passes. Where the base is
        sharded, the last one comes again until all processes have as many."""
        if not self.sharded:
            return batches
        most = max(gather_object([len(batches)]))
        return batches + batches[-1:] * (most - len(batches))

    def compile(self, backend: str = "inductor") -> None:
        """torch.compile each block of the transformer (blocks of one kind share their code). To be
        called before the transformer is wrapped for several processes."""
        kinds = set(self.core._repeated_blocks or self.core._no_split_modules or ())
        blocks = [block for block in self.core.modules() if type(block).__name__ in kinds]
        for block in blocks or [self.core]:
            block.compile(backend=backend)
        self.compiled = True

    def _compiling(self) -> AbstractContextManager[Any]:
        """Around a forward pass. A block is compiled once for each adapter, with and without
        gradient: more often than torch allows by default, after which it would run as it is."""
        if not self.compiled:
            return nullcontext()
        return torch._dynamo.config.patch(recompile_limit=COMPILATIONS)

    @torch.no_grad()
    def decode(self, latents: Tensor, batch_size: int = 32) -> Tensor:
        """Latents [B,C,h,w] -> images [B,3,H,W] in [0,1], float32; at most batch_size, and at most
        decode_batch, at once."""
        vae = self.pipe.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        parts = [
            vae.decode(part.to(vae.dtype), return_dict=False)[0].float()
            for part in latents.split(min(batch_size, self.decode_batch or batch_size))
        ]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)

    # Adapters ----------------------------------------------------------------------------------

    def add_adapter(self, name: str, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
        """A fresh LoRA (it changes nothing yet: B = 0), active and trainable."""
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType] (any number will do)
            init_lora_weights="gaussian",
            target_modules=list(targets),
        )
        with _several_adapters():
            self.core.add_adapter(config, adapter_name=name)
        self._own(name, torch.float32)
        self.activate(name)

    def load_adapter(self, name: str, folder: str | Path | Lora, *, frozen: bool = False) -> None:
        """A saved LoRA: whatever `flowalign.adapters.files.read_lora` takes.

        It becomes active, and is trainable. frozen: neither; its weights have the base's dtype, in
        which a trainable one computes, too.
        """
        before = self.active
        weights = put_lora(self.core, name, folder)
        self._own(name, self.dtype if frozen else torch.float32)
        # once more: peft has rounded them to the dtype that the base is stored in
        set_peft_model_state_dict(self.core, weights, adapter_name=name)
        if frozen:
            self.frozen |= {name}
        self.activate(before if frozen else name)

    def replace_adapter(self, name: str, folder: str | Path) -> None:
        """Put the weights of a saved adapter of the same layers, ranks and scales in the place of
        `name`'s. ValueError for another one."""
        lora = read_lora(folder)
        weights, mine = lora.weights, self._weights(name)
        if weights.keys() != mine.keys():
            raise ValueError(
                f"{folder} holds {len(weights.keys() & mine.keys())} of the {len(mine)} weights of "
                f"adapter {name!r} and {len(weights.keys() - mine.keys())} others. "
                "Give an adapter of the same layers, or load it under a name of its own."
            )
        for key, value in weights.items():
            if value.shape != mine[key].shape:
                raise ValueError(
                    f"{folder} has {key} of {list(value.shape)}, adapter {name!r} of "
                    f"{list(mine[key].shape)}. Give one of the same ranks."
                )
        for layer, scale in lora.scales.items():
            own = self.core.get_submodule(layer).scaling[name]
            if not math.isclose(scale, own, rel_tol=1e-6):
                raise ValueError(
                    f"{folder} scales {layer} by {scale:g}, adapter {name!r} by {own:g} (alpha / "
                    "rank). Give one of the same alpha, or load it under a name of its own."
                )
        set_peft_model_state_dict(self.core, weights, adapter_name=name)

    def _own(self, name: str, dtype: torch.dtype) -> None:
        """Give an adapter its dtype and its arithmetic; in memory of its own, as where weights lie
        (in a mapped file, say) changes the last bits of a CPU's products."""
        for parameter in self.adapter_parameters(name):
            parameter.data = parameter.data.to(self.device, dtype, copy=True)
        compute_in_the_bases_dtype(self.core, name)
        self._lora_layers = list(lora_layers(self.core))

    def adapter_parameters(self, name: str) -> list[nn.Parameter]:
        """The weights A and B of one adapter, in a fixed order."""
        return [p for key, p in self.core.named_parameters() if f".{name}." in key]

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Write what `pipe.load_lora_weights(folder)` takes; alpha and the number of T5 tokens
        travel in its head."""
        metadata = self.core.peft_config[name].to_dict()
        metadata["target_modules"] = sorted(metadata["target_modules"])
        metadata["base_model_name_or_path"] = self.name
        length = self.text.max_sequence_length
        write_lora(folder, self._weights(name), metadata, text_length=length)

    def _weights(self, name: str) -> dict[str, Tensor]:
        """The weights of an adapter as they are saved. (Asked whether it should save embeddings,
        peft would look for the base on the Hub. Asked for its own state_dict, a sharded base would
        change its state, on this process alone.)"""
        mine = {key: p.detach() for key, p in self.core.named_parameters() if f".{name}." in key}
        return get_peft_model_state_dict(
            self.core, state_dict=mine, adapter_name=name, save_embedding_layers=False
        )

    @property
    def active(self) -> str | None:
        """The adapter that velocities are of; None = the base alone."""
        names = self._lora_layers[0].active_adapters if self._lora_layers else []
        return names[0] if names else None

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Inside the `with`, velocities are those of adapter `name` (None = of the base alone); the
        one that was active is back afterwards. KeyError for a name that is not there."""
        before = self.active
        self.activate(name)
        try:
            yield
        finally:
            self.activate(before)

    def base(self) -> AbstractContextManager[None]:
        """The base alone, inside the `with`."""
        return self.adapter(None)

    def activate(self, name: str | None) -> None:
        """Make an adapter the active one. Only a trainable one asks for gradients, and only while
        it is active (peft's rule)."""
        if name is not None and name not in getattr(self.core, "peft_config", {}):
            known = sorted(getattr(self.core, "peft_config", {}))
            raise KeyError(f"no adapter {name!r}; have {known}. Load it first.")
        names = [name] if name else []
        for layer in self._lora_layers:
            layer.set_adapter(names)
            for half in (layer.lora_A, layer.lora_B):
                if name and name in self.frozen and name in half:
                    half[name].requires_grad_(False)


@contextmanager
def _several_adapters() -> Iterator[None]:
    """Without peft's warnings that there will be more than one (that is the plan), and, where one
    cannot be loaded, that the other is active again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        yield


def put_lora(core: nn.Module, name: str, source: str | Path | Lora) -> dict[str, Tensor]:
    """Load a saved LoRA onto a transformer under a name, made active; returns its weights.

    Raises AdapterError for one that is not this transformer's, HubError for one that cannot be had.
    """
    lora = read_lora(source)
    _check_fits(core, lora.weights, source if isinstance(source, (str, Path)) else lora.file)
    with _several_adapters():
        core.load_lora_adapter(  # pyright: ignore[reportCallIssue] (of diffusers' mixin)
            dict(lora.weights), prefix=None, adapter_name=name, metadata=lora.metadata
        )
    return lora.weights


def _check_fits(core: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """AdapterError unless every layer of a LoRA is there, and of its size."""
    layers = dict(core.named_modules())
    for key, value in weights.items():
        layer, half = key.removesuffix(".weight").rsplit(".lora_", 1)
        if layer not in layers:
            raise AdapterError(f"{source} adapts {layer}, and the model has no such layer")
        sides = ("in_features", 1) if half == "A" else ("out_features", 0)
        size = getattr(layers[layer], sides[0], value.shape[sides[1]])
        if size != value.shape[sides[1]]:
            raise AdapterError(
                f"{source} adapts {layer} with {sides[0]} = {value.shape[sides[1]]}, and the "
                f"model's has {size}"
            )
