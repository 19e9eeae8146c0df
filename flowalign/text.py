"""Prompts -> embeddings: each text once, kept on disk; the encoders need not stay on the GPU."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowalign import tensors
from flowalign.files import replacing
from flowalign.frozen import Placement, fingerprint

log = logging.getLogger("flowalign")

BATCH = 32  # texts per forward pass: 1.5 GB of activations in T5-XXL
HELD = 1024  # texts in the CPU's memory at most: 1.7 GB for Stable Diffusion 3.5 in 16 bits

SHA256 = "sha256"  # in the head of a cached file

Pair = tuple[Tensor, Tensor]  # embeddings [P,L,D] and pooled ones [P,E]; of one text [L,D], [E]


class TextEncoder:
    """The three text encoders of a Stable Diffusion 3 pipeline, as one function of prompts.

    offload: they wait in the CPU's memory, and are on the device only while they encode. cache: a
    folder for their results, shared with later calls, other processes and other runs (None = no
    cache): <cache>/<encoders>/<text>.safetensors, both digests, so that other weights, lengths or
    dtypes have files of their own. A file carries a digest of its tensors and of both; one that is
    not what it says is encoded again.
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
        self._negative: Pair | None = None
        self._held: dict[tuple[str, ...], Pair] = {}  # by the texts of a call, on the CPU
        self.folder = None
        if cache is not None:
            dtypes = [str(part.dtype) for part in encoders]  # embeddings depend on all of these
            key = f"{fingerprint(parts)} {dtypes} {max_sequence_length}"
            self.folder = Path(cache).expanduser() / _digest(key)[:16]

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> Pair:
        """Embeddings [P,L,D] and pooled ones [P,E] of P prompts, on the device."""
        if held := self._held.get(tuple(prompts)):
            return held[0].to(self.device), held[1].to(self.device)
        if self.folder is None:
            with self._present():
                return self._encode(prompts)
        known = {prompt: pair for prompt in prompts if (pair := self._read(prompt))}
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        known |= dict(self._encode_to_disk(missing))
        embeds, pooled = zip(*(known[prompt] for prompt in prompts), strict=True)
        return torch.stack(embeds).to(self.device), torch.stack(pooled).to(self.device)

    def negative(self) -> Pair:
        """Those of the empty text [1,L,D] and [1,E], for classifier-free guidance."""
        if self._negative is None:
            self._negative = self([""])
        return self._negative

    @torch.no_grad()
    def prepare(self, calls: Sequence[Sequence[str]]) -> None:
        """Encode the texts of the next calls, with the encoders on the device once.

        With a cache: all of them, unless those of the first call are there. Without: the first
        calls, HELD texts together, unless the very first is held; they are held until others need
        the space, and are to the bit what each call would give.
        """
        if self.folder is not None:
            if not all(self._path(text).is_file() for text in calls[0]):
                texts = dict.fromkeys(text for call in calls for text in call)
                missing = [text for text in texts if not self._path(text).is_file()]
                for _ in self._encode_to_disk(missing):
                    continue  # not a list: thousands of texts would fill the memory
            return
        ahead: dict[tuple[str, ...], None] = {}  # an ordered set
        for call in map(tuple, calls):
            if sum(map(len, ahead)) + len(call) > HELD or not ahead and call in self._held:
                break
            ahead[call] = None
        todo = [call for call in ahead if call not in self._held]
        for old in [call for call in self._held if call not in ahead]:
            if sum(map(len, self._held)) + sum(map(len, todo)) <= HELD:
                break
            del self._held[old]
        with self._present() if todo else ExitStack():
            for call in todo:
                embeds, pooled = self._encode(call)
                self._held[call] = embeds.cpu(), pooled.cpu()

    def _present(self) -> ExitStack:
        stack = ExitStack()  # inside its `with`, the encoders are on the device
        for place in self.places:
            stack.enter_context(place)
        return stack

    def _encode(self, prompts: Sequence[str]) -> Pair:
        parts = []
        for start in range(0, len(prompts), BATCH):
            batch = list(prompts[start : start + BATCH])
            embeds, _, pooled, _ = self.pipe.encode_prompt(
                batch,
                prompt_2=batch,
                prompt_3=batch,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
            assert embeds is not None and pooled is not None
            parts.append((embeds, pooled))
        embeds, pooled = zip(*parts, strict=True)
        return torch.cat(embeds), torch.cat(pooled)

    # On disk -----------------------------------------------------------------------------------

    def _path(self, prompt: str) -> Path:
        name = _digest(prompt)
        assert self.folder
        return self.folder / name[:2] / f"{name}.safetensors"  # thousands of texts, 256 folders

    def _encode_to_disk(self, prompts: Iterable[str]) -> Iterator[tuple[str, Pair]]:
        with self._present() if prompts else ExitStack():
            for prompt in prompts:  # each alone, so that its file does not depend on the batch
                embeds, pooled = self._encode([prompt])
                pair = embeds[0].cpu().contiguous(), pooled[0].cpu().contiguous()
                whole = {"embeds": pair[0], "pooled": pair[1]}
                with replacing(self._path(prompt)) as part:
                    tensors.save(whole, part, {SHA256: self._sha256(prompt, whole)})
                yield prompt, pair

    def _read(self, prompt: str) -> Pair | None:
        """What the cache has of a text; None if it has none that can be used."""
        path = self._path(prompt)
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                said = (file.metadata() or {}).get(SHA256)
            if said == self._sha256(prompt, found):
                return found["embeds"], found["pooled"]
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError):
            pass
        log.warning("%s is damaged or of an older version; the text is encoded again.", path)
        return None

    def _sha256(self, prompt: str, whole: Mapping[str, Tensor]) -> str:
        """Of the tensors, the encoders and the text: the file of another text does not fit."""
        assert self.folder
        return tensors.digest(whole, f"{self.folder.name} {_digest(prompt)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
