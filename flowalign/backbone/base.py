"""A diffusers pipeline as the library sees it: text -> velocity -> pixels, and named LoRA adapters.

The one place with classifier-free guidance. What differs between families of models is in
`flowalign.backbone.family`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from flowalign.backbone.adapters import Lora, read_lora, write_lora
from flowalign.backbone.family import ModelError
from flowalign.backbone.loading import family_of, load_pipeline
from flowalign.backbone.lora import (
    adapted_layers,
    compute_in_the_bases_dtype,
    lora_layers,
    put_lora,
    several_adapters,
)
from flowalign.backbone.placement import fingerprint
from flowalign.backbone.structure import ModelSpec, bare, weightless_pipeline
from flowalign.backbone.text import TextEncoder, joined
from flowalign.config import ModelConfig
from flowalign.types import Conditioning

log = logging.getLogger("flowalign")

COMPILATIONS = 256  # per kind of block: adapters x (rollout, update) x shapes; torch allows 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Backbone:
    """A frozen base with named adapters. It may hold other bases, each under the name of an
    adapter.

    pipe: a loaded diffusers pipeline of a known family. model: its settings; `load` applies two of
    them, the attention backend and gradient checkpointing. beside: see `load`.

    transformer is `core` (the bare diffusers model) or accelerate's wrapper of it. `velocity` calls
    transformer, so that rollout and update share one forward path; adapters and saving use `core`.
    """

    sharded = False  # if True, each process holds a piece of the base: all call `velocity` together
    compiled = False
    frozen: frozenset[str] = frozenset()  # names of adapters that are never trained
    _other: str | None = None  # the name of the active one of `others`
    _lora_layers: Sequence[LoraLayer] = ()  # kept: to look for them costs more than to switch
    _unused: Sequence[LoraLayer] = ()  # those of them that are never trained

    def __init__(
        self,
        pipe: Any,
        model: ModelConfig,
        device: torch.device | str = "cpu",
        beside: Backbone | None = None,
    ) -> None:
        self.pipe = pipe
        self.decode_batch = model.decode_batch
        self.name: str | None = model.id  # the base that saved adapters name
        self.family = family_of(type(pipe).__name__)(pipe)
        self.device = torch.device(device)
        if self.device.type == "cpu":
            # accelerate says "cpu:0" where there are several processes, which would copy all
            # weights, and their place in memory changes the last bits of products
            self.device = torch.device("cpu")
        self.others: Mapping[str, Backbone] = {}  # by the name that makes them active
        # of the transformer, by image: forward passes, and backward ones twice
        self.evaluations = 0
        self.core = pipe.transformer.requires_grad_(False).eval().to(self.device)
        self.transformer: nn.Module = self.core
        self.dtype = DTYPES[model.dtype]  # of all arithmetic of the transformer, adapters too
        if beside:
            self.text = beside.text
            self.latent_shape = beside.latent_shape
            return
        pipe.vae.requires_grad_(False).eval().to(self.device)
        self.text = TextEncoder(self.family, model, self.device)
        spec = ModelSpec(model, self.family)
        for problem in spec.problems():
            raise ModelError(str(problem))
        self.latent_shape = spec.latent_shape

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        device: torch.device | str = "cpu",
        beside: Backbone | None = None,
    ) -> Backbone:
        """The model of a config. Raises ModelError if it cannot be loaded. beside: its text
        encoders, VAE and schedule are taken, and only a transformer is loaded; what must match is
        in `flowalign.backbone.structure.mismatches`. On the meta device it has shapes alone; raises
        LookupError where these are not known."""
        parts = dict(beside.pipe.components) if beside else {}
        parts.pop("transformer", None)
        if torch.device(device).type == "meta":
            model = bare(model)
            pipe = weightless_pipeline(model, DTYPES[model.dtype], parts)
        else:
            pipe = load_pipeline(
                model.id,
                dtype=DTYPES[model.dtype],
                quantization=model.quantization,
                revision=model.revision,
                parts=parts,
            )
        backbone = cls(pipe, model, device, beside)
        attention = model.attention
        if torch.device(device).type == "cuda" and backbone.dtype != torch.float32:
            attention = attention or backbone.family.gpu_attention
        if attention:
            with attention_backend(attention):  # puts diffusers' global choice back, set here too
                backbone.core.set_attention_backend(attention)
        if model.gradient_checkpointing:
            backbone.core.enable_gradient_checkpointing()
        return backbone

    def fingerprint(self) -> str:
        """A digest that tells this base from another, whatever adapters it has: of the weights of
        all parts of the pipeline, and of the other bases. Call it before the transformer is
        sharded."""
        others = {id(other): other.core for other in self.others.values()}  # each once
        parts = [*self.pipe.components.values(), *others.values()]
        return fingerprint(part for part in parts if isinstance(part, nn.Module))

    # Sampling ----------------------------------------------------------------------------------

    def sigmas(self, num_steps: int) -> Tensor:
        """The schedule [T+1] of the pipeline's own scheduler, with all its settings. Raises
        ModelError for a scheduler that steps otherwise than a rollout does."""
        return self.family.sigmas(num_steps, self.family.tokens(self.latent_shape))

    def shift(self, num_steps: int) -> float:
        """The shift of the schedule: sigma = shift u / (1 + (shift - 1) u) of an even grid u."""
        return self.family.shift(self.family.tokens(self.latent_shape), num_steps)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], copies: int = 1) -> Conditioning:
        """Conditioning of len(prompts) * copies images; the copies of a prompt lie together. A text
        that comes several times is encoded once."""
        texts = list(dict.fromkeys(prompts))
        rows = {text: row for row, text in enumerate(texts)}
        index = torch.tensor([rows[text] for text in prompts], device=self.device)
        index = index.repeat_interleave(copies)
        return Conditioning(self.text(texts), index, self.text.negative)

    def velocity(
        self,
        x: Tensor,
        sigma: float | Tensor,
        cond: Conditioning,
        *,
        guidance: float,
        rows: int | None = None,
    ) -> Tensor:
        """v [B,C,h,w] of the active adapter, float32, at x [B,C,h,w]; sigma is a number or [B].

        With classifier-free guidance, v = v_negative + guidance * (v_positive - v_negative), as in
        diffusers' pipelines; guidance 1 is the conditional velocity alone, at half the cost.
        Families whose guidance is an input of the transformer, or none, say so
        (`Family.guidance`). rows: size of the forward pass, where B is less: the last row is
        repeated, without gradient (kernels of other sizes round differently).
        """
        if self._other:
            other = self.others[self._other]
            before = other.evaluations
            velocity = other.velocity(x.to(other.device), sigma, cond, guidance=guidance, rows=rows)
            self.evaluations += other.evaluations - before
            return velocity.to(x.device)
        batch = x.shape[0]
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=x.device).expand(batch)
        if rows is not None:
            filled = torch.arange(rows, device=x.device).clamp(max=batch - 1)
            x = x[filled]
            sigma = sigma[filled]
            cond = cond.select(filled)
        text = {name: part[cond.index].to(x.device) for name, part in cond.text.items()}
        kind = self.family.guidance
        if kind == "none" and guidance != 1:
            raise ModelError(
                f"guidance: got {guidance:g}, and {self.name or 'this model'} has none (it was "
                "distilled without). Set it to 1."
            )
        doubled = kind == "cfg" and guidance != 1
        if doubled:
            x, sigma = torch.cat([x, x]), torch.cat([sigma, sigma])
            text = joined({name: part.to(x.device) for name, part in cond.negative.items()}, text)
        inputs = self.family.inputs(x.to(self.dtype), sigma, text, guidance)
        velocity = self.family.velocity(self._output(inputs), x)
        passes = 3 if velocity.requires_grad else 1  # a backward pass counts as two
        self.evaluations += passes * (2 if doubled else 1) * batch
        if doubled:
            negative, positive = velocity.chunk(2)  # in the order of the torch.cat above
            velocity = self.family.guided(negative, positive, guidance)
        return velocity[:batch]

    def _output(self, inputs: Mapping[str, Any]) -> Tensor:
        """The transformer's. Blocks that cannot be compiled run eagerly from then on."""
        if not self.compiled:
            return self.transformer(**inputs, return_dict=False)[0]
        from torch._dynamo.exc import TorchDynamoException  # seconds to import

        # beyond its limit torch would silently run a block eagerly
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            try:
                return self.transformer(**inputs, return_dict=False)[0]
            except TorchDynamoException as error:
                kinds = ", ".join(sorted({type(block).__name__ for block in self._compilable}))
                why = " ".join(str(error).split("\n")[:2])
                log.warning("torch.compile failed in %s, which run eagerly now: %s", kinds, why)
        for block in self._compilable:
            block._compiled_call_impl = None  # what nn.Module.compile sets
        self.compiled = False
        return self._output(inputs)

    @contextmanager
    def uncounted(self, really: bool = True) -> Iterator[None]:
        """Inside the `with`, `evaluations` does not grow."""
        before = self.evaluations
        yield
        if really:
            self.evaluations = before

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of the transformer, as diffusers names their classes."""
        kinds = set(self.core._repeated_blocks or self.core._no_split_modules or ())
        return [block for block in self.core.modules() if type(block).__name__ in kinds]

    def compile(self, backend: str = "inductor") -> None:
        """torch.compile each block of the transformer (blocks of one kind share their code). Call
        it before the transformer is wrapped for several processes."""
        for block in self._compilable:
            block.compile(backend=backend)
        self.compiled = True

    @property
    def _compilable(self) -> list[nn.Module]:
        return self.blocks or [self.core]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B,C,h,w] -> images [B,3,H,W] in [0,1], float32; `decode_batch` at once."""
        return torch.cat([self.decoded(part) for part in latents.split(self.decode_batch)])

    def decoded(self, latents: Tensor) -> Tensor:
        """The images as by `decode`, all at once, with a gradient if the latents have one."""
        return (self.family.decode(latents).float() / 2 + 0.5).clamp(0, 1)  # the VAE has [-1, 1]

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """Images [B,3,H,W] in [0,1] -> latents [B,C,h,w], float32: the mode, so always the same."""
        return self.family.encode_image(images.to(self.device) * 2 - 1)

    # Adapters ----------------------------------------------------------------------------------

    def add_adapter(
        self,
        name: str,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str] | None = None,
    ) -> None:
        """A fresh LoRA, active and trainable. Its B is 0, so that it changes nothing yet. targets:
        layers, by the end of their names (None = the family's)."""
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType] (any number will do)
            init_lora_weights="gaussian",
            target_modules=adapted_layers(self.core, targets or self.family.targets),
        )
        with several_adapters():
            self.core.add_adapter(config, adapter_name=name)
        self._prepare(name, torch.float32)
        self.activate(name)

    def read_lora(self, source: str | Path | Lora) -> Lora:
        """A saved LoRA, as `flowalign.backbone.adapters.read_lora` does, for this model."""
        return read_lora(source, family=lambda: self.family)

    def load_adapter(self, name: str, folder: str | Path | Lora, *, frozen: bool = False) -> None:
        """A saved LoRA: whatever `flowalign.backbone.adapters.read_lora` takes. It becomes
        active and trainable. frozen: neither; its weights then have the base's dtype."""
        before = self.active
        weights = put_lora(self.core, name, self.read_lora(folder))
        self._prepare(name, self.dtype if frozen else torch.float32)
        # once more: peft has rounded them to the dtype that the base is stored in
        set_peft_model_state_dict(self.core, weights, adapter_name=name)
        if frozen:
            self.frozen |= {name}
        self.activate(before if frozen else name)

    def copy_adapter(self, source: str, name: str) -> None:
        """A frozen copy of an adapter, in its dtype, under another name; not active."""
        before = self.active
        with several_adapters():
            self.core.add_adapter(deepcopy(self.core.peft_config[source]), adapter_name=name)
        copied = self.adapter_parameters(source)
        self._prepare(name, copied[0].dtype)
        self.frozen |= {name}
        for parameter, value in zip(self.adapter_parameters(name), copied, strict=True):
            parameter.data.copy_(value.data)
        self.activate(before)

    def _prepare(self, name: str, dtype: torch.dtype) -> None:
        """Give an adapter its dtype and its arithmetic."""
        for parameter in self.adapter_parameters(name):
            # a copy: the place in memory (such as a mapped file) changes the last bits on a CPU
            parameter.data = parameter.data.to(self.device, dtype, copy=True)
        compute_in_the_bases_dtype(self.core, name)
        self._lora_layers = list(lora_layers(self.core))
        unused = (self.core.get_submodule(layer) for layer in self.family.unused)
        self._unused = [layer for layer in unused if isinstance(layer, LoraLayer)]

    def adapter_parameters(self, name: str) -> list[nn.Parameter]:
        """The weights A and B of one adapter, in a fixed order."""
        return [p for key, p in self.core.named_parameters() if f".{name}." in key]

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Write what `pipe.load_lora_weights(folder)` takes; the file's header holds alpha and the
        number of T5 tokens."""
        metadata = self.core.peft_config[name].to_dict()
        metadata["target_modules"] = sorted(metadata["target_modules"])
        metadata["base_model_name_or_path"] = self.name
        # state_dict: core.state_dict() would change the state of a sharded base, on this process
        # alone. save_embedding_layers: by default peft would look for the base on the Hub.
        state = {key: p.detach() for key, p in self.core.named_parameters() if f".{name}." in key}
        weights = get_peft_model_state_dict(
            self.core, state_dict=state, adapter_name=name, save_embedding_layers=False
        )
        write_lora(folder, weights, metadata, text_length=self.text.max_sequence_length)

    @property
    def active(self) -> str | None:
        """The active adapter, or another base by its name; None = the base alone."""
        if self._other:
            return self._other
        names = self._lora_layers[0].active_adapters if self._lora_layers else []
        return names[0] if names else None

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Inside the `with`, adapter `name` is active (None = the base alone); afterwards the one
        that was active before. Raises KeyError for a name that is not loaded."""
        before = self.active
        self.activate(name)
        try:
            yield
        finally:
            self.activate(before)

    def base(self) -> AbstractContextManager[None]:
        return self.adapter(None)

    def activate(self, name: str | None) -> None:
        """Make an adapter the active one. As in peft, only the active adapter has gradients, and a
        frozen one has none; nor have layers that the velocity does not depend on. The name of
        another base makes that one active, with the adapter of this name if it has one."""
        other = self.others.get(name or "")
        self._other = name if other else None
        if other:
            return other.activate(name if name in other.frozen else None)
        loaded = getattr(self.core, "peft_config", {})  # absent before the first adapter
        if name is not None and name not in loaded:
            raise KeyError(f"no adapter {name!r}; have {sorted(loaded)}. Load it first.")
        names = [name] if name else []
        for layer in self._lora_layers:
            layer.set_adapter(names)
        without_gradient = self._lora_layers if name in self.frozen else self._unused
        for layer in without_gradient:
            for half in (layer.lora_A, layer.lora_B):
                if name and name in half:
                    half[name].requires_grad_(False)
