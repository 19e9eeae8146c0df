"""Prompts -> embeddings: each text once, kept on disk; the encoders need not stay on the GPU."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from flowalign.backbone.placement import Placement, fingerprint
from flowalign.system import tensors
from flowalign.system.files import replacing

if TYPE_CHECKING:
    from flowalign.backbone.family import Family, Text

log = logging.getLogger("flowalign")

BATCH = 32  # texts per forward pass: 1.5 GB of activations in T5-XXL
HELD = 1024  # texts in the CPU's memory at most: 1.7 GB for Stable Diffusion 3.5 in 16 bits

SHA256 = "sha256"  # in the head of a cached file


class TextEncoder:
    """The text encoders of a pipeline, as one function of prompts.

    offload: they wait in the CPU's memory, and are on the device only while they encode. cache: a
    folder for their results, shared with later calls, other processes and other runs (None = no
    cache): <cache>/<encoders>/<text>.safetensors, both digests, so that other weights, lengths or
    dtypes have files of their own. A file carries a digest of its tensors and of both; one that is
    not what it says is encoded again.
    """

    def __init__(
        self,
        family: Family,
        *,
        device: torch.device | str,
        max_sequence_length: int,
        cache: str | Path | None = None,
        offload: bool = False,
    ) -> None:
        self.family, self.device = family, torch.device(device)
        self.max_sequence_length = max_sequence_length
        encoders = family.encoders
        self.places = [Placement(part, device, offload) for part in encoders]
        self._negative: Text | None = None
        self._held: dict[tuple[str, ...], Text] = {}  # by the texts of a call, on the CPU
        self.folder = None
        if cache is not None:
            dtypes = [str(part.dtype) for part in encoders]  # embeddings depend on all of these
            key = f"{fingerprint(encoders)} {dtypes} {max_sequence_length}"
            self.folder = Path(cache).expanduser() / _digest(key)[:16]

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> Text:
        """What the family makes of P prompts, {name: [P, ...]}, on the device."""
        if held := self._held.get(tuple(prompts)):
            return {name: part.to(self.device) for name, part in held.items()}
        if self.folder is None:
            with self._present():
                return stacked(self._encode(prompts))
        known = {prompt: text for prompt in prompts if (text := self._read(prompt))}
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        known |= dict(self._encode_to_disk(missing))
        whole = stacked([known[prompt] for prompt in prompts])
        return {name: part.to(self.device) for name, part in whole.items()}

    def negative(self) -> Text:
        """That of the prompt without content, {name: [1, ...]}, for classifier-free guidance."""
        if self._negative is None:
            self._negative = self([self.family.negative])
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
                whole = stacked(self._encode(call))
                self._held[call] = {name: part.cpu() for name, part in whole.items()}

    def _present(self) -> ExitStack:
        stack = ExitStack()  # inside its `with`, the encoders are on the device
        for place in self.places:
            stack.enter_context(place)
        return stack

    def _encode(self, prompts: Sequence[str]) -> list[Text]:
        found: list[Text] = []
        for start in range(0, len(prompts), BATCH):
            batch = list(prompts[start : start + BATCH])
            found += self.family.encode(batch, self.max_sequence_length, self.device)
        return found

    # On disk -----------------------------------------------------------------------------------

    def _path(self, prompt: str) -> Path:
        name = _digest(prompt)
        assert self.folder
        return self.folder / name[:2] / f"{name}.safetensors"  # thousands of texts, 256 folders

    def _encode_to_disk(self, prompts: Iterable[str]) -> Iterator[tuple[str, Text]]:
        with self._present() if prompts else ExitStack():
            for prompt in prompts:  # each alone, so that its file does not depend on the batch
                [text] = self._encode([prompt])
                whole = {name: part.cpu().contiguous() for name, part in text.items()}
                with replacing(self._path(prompt)) as part:
                    tensors.save_tensors(whole, part, {SHA256: self._sha256(prompt, whole)})
                yield prompt, whole

    def _read(self, prompt: str) -> Text | None:
        """What the cache has of a text; None if it has none that can be used."""
        path = self._path(prompt)
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                said = (file.metadata() or {}).get(SHA256)
            if said == self._sha256(prompt, found):
                return found
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError):
            pass
        log.warning("%s is damaged or of an older version; the text is encoded again.", path)
        return None

    def _sha256(self, prompt: str, whole: Mapping[str, Tensor]) -> str:
        """Of the tensors, the encoders and the text: the file of another text does not fit."""
        assert self.folder
        return tensors.digest_tensors(whole, f"{self.folder.name} {_digest(prompt)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def stacked(texts: Sequence[Mapping[str, Tensor]]) -> Text:
    """A batch {name: [P, ...]} of texts {name: [...]}. Where their first dimensions differ, the
    shorter ones are padded with zeros at the end; a family whose texts do has a mask among them."""
    return {
        name: pad_sequence([text[name] for text in texts], batch_first=True) for name in texts[0]
    }


def joined(negative: Mapping[str, Tensor], positive: Mapping[str, Tensor]) -> Text:
    """{name: [2B, ...]}: that of the negative prompt [1, ...] once for each row of the positive
    ones [B, ...], then these. The shorter texts are padded as by `stacked`."""
    both = {}
    for name, own in positive.items():
        other = negative[name].expand(len(own), *negative[name].shape[1:])
        if own.dim() > 1:
            longest = max(own.shape[1], other.shape[1])
            own, other = (_filled(part, longest) for part in (own, other))
        both[name] = torch.cat([other, own])
    return both


def _filled(text: Tensor, length: int) -> Tensor:
    """[B,L,...] with zeros at the end of L, up to a length."""
    missing = length - text.shape[1]
    return pad(text, [0, 0] * (text.dim() - 2) + [0, missing]) if missing else text  # no copy
