"""Prompts -> embeddings: each text once, kept on disk; the encoders need not stay on the GPU."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowalign.backbone.family import Family, Text
from flowalign.backbone.placement import Placement, fingerprint
from flowalign.backbone.structure import ModelSpec
from flowalign.config import ModelConfig
from flowalign.system.files import replacing

log = logging.getLogger("flowalign")

TEXTS_A_PASS = 32  # texts per forward pass: 1.5 GB of activations in T5-XXL
HELD = 1024  # texts in the CPU's memory at most: 1.7 GB for Stable Diffusion 3.5 in 16 bits


class TextEncoder:
    """The text encoders of a pipeline, as one function of prompts.

    With `model.offload_text_encoders` they wait in the CPU's memory, and are on the device only
    while they encode. `model.text_cache` is a folder for their results, shared with later calls,
    other processes and other runs: <cache>/<encoders>/<text>.safetensors, both digests, so that
    other weights, lengths or dtypes have files of their own.
    """

    def __init__(self, family: Family, model: ModelConfig, device: torch.device | str) -> None:
        self.family = family
        self.device = torch.device(device)
        self.max_sequence_length = ModelSpec(model, family).length
        encoders, offload = family.encoders, model.offload_text_encoders
        self.placements = [Placement(part, device, offload) for part in encoders]
        self._held: dict[tuple[str, ...], Text] = {}  # by the texts of a call, on the CPU
        self.folder = None
        if model.text_cache is not None:
            dtypes = [str(part.dtype) for part in encoders]  # embeddings depend on all of these
            key = f"{fingerprint(encoders)} {dtypes} {self.max_sequence_length}"
            self.folder = Path(model.text_cache) / _digest(key)[:16]

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> Text:
        """What the family makes of P prompts, {name: [P, ...]}, on the device."""
        if not (batch := self._held.get(tuple(prompts))):
            if self.folder is None:
                with self._on_device():
                    return self._encode(prompts)
            self._encode_to_disk(prompts)
            batch = stacked_texts([self._read(prompt) for prompt in prompts])
        return {name: part.to(self.device) for name, part in batch.items()}

    @cached_property
    def negative(self) -> Text:
        """The prompt without content, {name: [1, ...]}, for classifier-free guidance."""
        return self([self.family.negative])

    @torch.no_grad()
    def prepare(self, calls: Sequence[Sequence[str]]) -> None:
        """Encode the texts of the next calls, with the encoders on the device once.

        With a cache: all of them, unless those of the first call are there. Without: the first
        calls, HELD texts together, unless the very first is held. They are held until others take
        their space, and are to the bit what each call would give.
        """
        if self.folder is not None:
            if not all(self._path(text).is_file() for text in calls[0]):
                self._encode_to_disk(text for call in calls for text in call)
        elif tuple(calls[0]) not in self._held:
            self._held.clear()
            count = 0
            with self._on_device():
                for call in dict.fromkeys(map(tuple, calls)):
                    if (count := count + len(call)) > HELD:
                        break
                    batch = self._encode(call)
                    self._held[call] = {name: part.cpu() for name, part in batch.items()}

    def _on_device(self) -> ExitStack:
        stack = ExitStack()  # inside its `with`, the encoders are on the device
        for placement in self.placements:
            stack.enter_context(placement)
        return stack

    def _encode(self, prompts: Sequence[str]) -> Text:
        """What the family makes of prompts, {name: [P, ...]}; the encoders must be on the
        device."""
        texts: list[Text] = []
        for start in range(0, len(prompts), TEXTS_A_PASS):
            batch = list(prompts[start : start + TEXTS_A_PASS])
            texts += self.family.encode(batch, self.max_sequence_length, self.device)
        return stacked_texts(texts)

    # On disk -----------------------------------------------------------------------------------

    def _path(self, prompt: str) -> Path:
        name = _digest(prompt)
        assert self.folder
        return self.folder / name[:2] / f"{name}.safetensors"  # thousands of texts, 256 folders

    def _encode_to_disk(self, prompts: Iterable[str]) -> None:
        missing = [text for text in dict.fromkeys(prompts) if not self._path(text).is_file()]
        if not missing:
            return
        with self._on_device():
            for prompt in missing:
                # each alone, so that its file does not depend on the batch
                text = {name: part[0].cpu() for name, part in self._encode([prompt]).items()}
                with replacing(self._path(prompt)) as part:
                    part.write_bytes(save(text))

    def _read(self, prompt: str) -> Text:
        path = self._path(prompt)
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            log.warning("%s is damaged; its text is encoded again.", path)
        path.unlink(missing_ok=True)
        self._encode_to_disk([prompt])
        return load_file(path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def stacked_texts(texts: Sequence[Mapping[str, Tensor]]) -> Text:
    """A batch {name: [P, ...]} of texts {name: [...]}. Where their first dimensions differ, the
    shorter ones are padded with zeros at the end; a family whose texts do has a mask among them."""
    return {
        name: pad_sequence([text[name] for text in texts], batch_first=True) for name in texts[0]
    }


def joined(negative: Mapping[str, Tensor], positive: Mapping[str, Tensor]) -> Text:
    """{name: [2B, ...]}: the negative prompt [1, ...] once for each row of the positive ones
    [B, ...], then these. The shorter texts are padded as by `stacked`."""
    return {
        name: pad_sequence([*negative[name]] * len(part) + [*part], batch_first=True)
        for name, part in positive.items()
    }
