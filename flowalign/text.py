"""Prompts -> embeddings: each text once, kept on disk; the encoders need not stay on the GPU."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.frozen import Placement, fingerprint

BATCH = 32  # texts a forward pass: 1.5 GB of activations in T5-XXL
HELD = 1024  # texts in the memory of the CPU at most: 1.7 GB for Stable Diffusion 3.5 in 16 bits


class TextEncoder:
    """The three text encoders of a Stable Diffusion 3 pipeline, as one function of prompts.

    offload: they wait in the memory of the CPU, and lie on the device only while they encode.
    cache: a folder for what they gave, which later calls, other processes and other runs read
    (None = nothing is kept): <cache>/<weights>/<text>.safetensors, both as digests, so that other
    encoders, lengths or dtypes never meet. A text that is kept is encoded alone: what the file
    holds depends on the text, not on the batch that it first came in.
    `prepare` encodes ahead of many calls, so that an evaluation brings the encoders over once.
    """

    def __init__(
        self,
        pipe: StableDiffusion3Pipeline,
        *,
        device: torch.device | str,
        max_sequence_length: int,
        cache: str | Path | None = None,
        offload: bool = False,
    ) -> None:
        self.pipe, self.device = pipe, torch.device(device)
        self.max_sequence_length = max_sequence_length
        parts = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
        encoders = [part for part in parts if part is not None]
        self.places = [Placement(part, device, offload) for part in encoders]
        self._negative: tuple[Tensor, Tensor] | None = None
        self._held: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self.folder = None
        if cache is not None:
            dtypes = [str(part.dtype) for part in encoders]
            key = f"{fingerprint(parts)} {dtypes} {max_sequence_length}"
            self.folder = Path(cache).expanduser() / _digest(key)[:16]

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings [P,L,D] and pooled ones [P,E] of P prompts, on the device."""
        if held := self._held.get(tuple(prompts)):
            return held[0].to(self.device), held[1].to(self.device)
        if self.folder is None:
            with self._present():
                return self._encode_all(prompts)
        known = {prompt: self._read(prompt) for prompt in dict.fromkeys(prompts)}
        known |= self._keep([prompt for prompt, found in known.items() if found is None])
        pairs = [known[prompt] for prompt in prompts]
        embeds, pooled = zip(*(pair for pair in pairs if pair), strict=True)
        return torch.stack(embeds).to(self.device), torch.stack(pooled).to(self.device)

    def negative(self) -> tuple[Tensor, Tensor]:
        """Those of the empty text [1,L,D] and [1,E], for classifier-free guidance."""
        if self._negative is None:
            self._negative = self([""])
        return self._negative

    def _present(self) -> ExitStack:
        """The encoders on the device, inside the `with`."""
        stack = ExitStack()
        for place in self.places:
            stack.enter_context(place)
        return stack

    @torch.no_grad()
    def prepare(self, calls: Sequence[Sequence[str]]) -> None:
        """Encode what will be asked for next, call by call, with the encoders on the device once:
        the first calls, of HELD texts together, unless the very first one is held. What they give
        is held until others need the place, and is what they would give one by one, to the bit."""
        if self.folder is not None:
            if not all(self._path(text).is_file() for text in calls[0]):
                texts = dict.fromkeys(text for call in calls for text in call)
                missing = [text for text in texts if not self._path(text).is_file()]
                self._keep(missing, whole=False)
            return
        new: dict[tuple[str, ...], None] = {}
        for call in map(tuple, calls):
            if sum(map(len, new)) + len(call) > HELD or not new and call in self._held:
                break
            new[call] = None
        todo = [call for call in new if call not in self._held]
        for old in [call for call in self._held if call not in new]:
            if sum(map(len, self._held)) + sum(map(len, todo)) <= HELD:
                break
            del self._held[old]
        with self._present() if todo else ExitStack():
            for call in todo:
                embeds, pooled = self._encode_all(call)
                self._held[call] = embeds.cpu(), pooled.cpu()

    def _encode_all(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        starts = range(0, len(prompts), BATCH)
        parts = [self._encode(list(prompts[start : start + BATCH])) for start in starts]
        embeds, pooled = zip(*parts, strict=True)
        return torch.cat(embeds), torch.cat(pooled)

    def _encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompts,
            prompt_2=prompts,
            prompt_3=prompts,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        assert embeds is not None and pooled is not None
        return embeds, pooled

    # On disk -----------------------------------------------------------------------------------

    def _path(self, prompt: str) -> Path:
        name = _digest(prompt)
        assert self.folder
        return self.folder / name[:2] / f"{name}.safetensors"  # thousands of texts, 256 folders

    def _keep(self, prompts: Sequence[str], *, whole: bool = True) -> dict[str, Any]:
        """Encode texts, each alone, and write them; returns them if `whole`."""
        found = {}
        with self._present() if prompts else ExitStack():
            for prompt in dict.fromkeys(prompts):
                embeds, pooled = self._encode([prompt])
                pair = embeds[0].cpu(), pooled[0].cpu()
                self._write(prompt, pair)
                found |= {prompt: pair} if whole else {}
        return found

    def _read(self, prompt: str) -> tuple[Tensor, Tensor] | None:
        """What is kept of a text; None where there is nothing, or nothing whole."""
        try:
            found = load_file(self._path(prompt))
            return found["embeds"], found["pooled"]
        except (OSError, SafetensorError, KeyError):
            return None

    def _write(self, prompt: str, found: tuple[Tensor, Tensor]) -> None:
        path = self._path(prompt)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")  # processes may write the same text
        save_file({"embeds": found[0].contiguous(), "pooled": found[1].contiguous()}, part)
        os.replace(part, path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
