"""The attention backend of `model.attention` in Stable Diffusion 3.

diffusers' own switch (`set_attention_backend`) does not reach its processors, which call torch's
function themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import Tensor, nn

from flowalign.system.packages import hint, installed


def use_backend(transformer: nn.Module, name: str) -> None:
    """Let every attention layer use a backend of diffusers, which raises if it is not installed.
    Other models keep theirs."""
    for module in transformer.modules():
        if isinstance(module, Attention) and type(module.processor) is JointAttnProcessor2_0:
            module.set_processor(JointAttention())  # pyright: ignore[reportArgumentType]
    with attention_backend(name):  # puts diffusers' global choice back, which the switch sets, too
        transformer.set_attention_backend(name)  # pyright: ignore[reportCallIssue]


def unavailable(name: str) -> str | None:
    """Why a backend cannot be used here, without a model; None if it can. One that is downloaded
    from the Hub (its name ends with _hub) is not asked for."""
    possible = [backend.value for backend in AttentionBackendName]
    if name not in possible:
        return f"want one of {', '.join(possible)}."
    if name.endswith("_hub"):
        return None
    if name == "xformers" and not installed(name):
        return f"xformers is not installed. {hint(name)}"
    try:
        with attention_backend(name):  # puts diffusers' global choice back
            pass
    except (RuntimeError, ValueError, ImportError) as error:
        return str(error).strip().splitlines()[0]
    return None


class JointAttention:
    """diffusers' JointAttnProcessor2_0, with `dispatch_attention_fn` for the attention. Image and
    text attend to both; without text the image attends to itself."""

    _attention_backend: Any = None  # diffusers' switch sets this name

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B,L,D] and the text's [B,M,D] -> the same shapes."""

        def heads(layer: nn.Module, norm: nn.Module | None, x: Tensor) -> Tensor:
            split = layer(x).unflatten(-1, (attn.heads, -1))
            return split if norm is None else norm(split)  # RMS norm of q and k in 3.5

        query = heads(attn.to_q, attn.norm_q, hidden_states)
        key = heads(attn.to_k, attn.norm_k, hidden_states)
        value = heads(attn.to_v, None, hidden_states)
        if encoder_hidden_states is not None:
            text = encoder_hidden_states
            query = torch.cat([query, heads(attn.add_q_proj, attn.norm_added_q, text)], 1)
            key = torch.cat([key, heads(attn.add_k_proj, attn.norm_added_k, text)], 1)
            value = torch.cat([value, heads(attn.add_v_proj, None, text)], 1)
        output = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
        output = output.flatten(2).to(query.dtype)  # heads [B,L,H,D/H] -> [B,L,D]
        if encoder_hidden_states is None:
            return attn.to_out[1](attn.to_out[0](output))
        image, text = output.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        text = text if attn.context_pre_only else attn.to_add_out(text)  # the last block drops text
        return attn.to_out[1](attn.to_out[0](image)), text
