"""Does the image show the text that its prompt puts between quotes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from flowalign.rewards.base import Cost, RewardBase
from flowalign.rewards.ocr_engines import ENGINES, Engine, Line, read_all
from flowalign.rewards.options import Count, check_call
from flowalign.system.images import to_uint8
from flowalign.types import Metadata, Scores


def target_of(prompt: str) -> str:
    """The text between the first two straight double quotes of a prompt, as it stands there.

    Raises ValueError where there is no such text: fewer than two quotes, or nothing but spaces
    between them. (The peers die of a prompt without quotes and of an empty target, and take the
    rest of the prompt after a lone quote, so that an inch mark becomes the target.)
    """
    pieces = prompt.split('"')
    if len(pieces) < 3 or not normalize(pieces[1]):
        raise ValueError(
            f"prompt {prompt!r} has no target text between straight double quotes. Write the text "
            "there, or give `target` in the metadata."
        )
    return pieces[1]


def normalize(text: str) -> str:
    """Lower case without U+0020 spaces (other white space stays): what the rules compare."""
    return text.replace(" ", "").lower()  # as the peers, who keep tabs and newlines


def text_reward(target: str, lines: Sequence[Line] | None) -> float:
    """The published OCR rule, in [0,1]; its mean is what papers call OCR accuracy.

    lines: (text, confidence) in reading order, None or [] = no text. Lines of confidence > 0
    are joined; 1 if the target is in them, else 1 - min(Levenshtein, n) / n for a target of n
    characters. So any surplus text around the target is free: see `strict_reward`.
    Source: Flow-OPD@434ab16 flow_grpo/ocr.py (OcrScorer). Raises ValueError for a blank target.
    """
    wanted, read = _compared(target, lines)
    if wanted in read:  # Levenshtein would count the surplus text
        return 1.0
    return 1 - min(Levenshtein.distance(wanted, read), len(wanted)) / len(wanted)


def strict_reward(target: str, lines: Sequence[Line] | None) -> float:
    """A rule of our own that does not pay for surplus text: 1 - Levenshtein / longer length.

    In [0,1], and 1 only for exactly the target. Raises ValueError for a blank target.
    """
    wanted, read = _compared(target, lines)
    return 1 - Levenshtein.distance(wanted, read) / max(len(wanted), len(read))


RULES = {"published": text_reward, "strict": strict_reward}


class OCR(RewardBase):
    """Reward in [0,1]: the text that an engine reads off the image, against the target text.

    engine: "rapidocr", "paddleocr" (with that engine's options), or an Engine object.
    workers: images read at once, each by an engine of its own (an Engine object reads alone).
    batch_size: images handed over in one call, to an engine that takes several (PaddleOCR).
    rule: "published" (`text_reward`) or "strict" (`strict_reward`).
    The target is `target` of the image's metadata, else what the prompt puts in quotes. An image
    without text scores 0. An image whose engine call fails, or that has no target, is invalid.
    parts: "exact", 1 where the text equals the target but for case and spaces, else 0.
    `engine.name` says what read: engine, models, settings. workers, batch_size change no result.
    """

    name = "ocr"
    choice = ("engine", "rapidocr")
    choices = {"rapidocr": "Apache-2.0", "paddleocr": "Apache-2.0"}
    cost = Cost(seconds=0.306)  # docs/rewards/ocr.md. PaddleOCR downloads a few MB
    resizes = frozenset({"limit_side_len", "limit_type", "rec_width", "upscale"})

    def __init__(
        self,
        engine: str | Engine = "rapidocr",
        rule: Literal["published", "strict"] = "published",
        workers: Count = 1,
        batch_size: Count = 16,
        **engine_options: Any,
    ) -> None:
        if isinstance(engine, str):
            self.engines = [ENGINES[engine](**engine_options) for _ in range(workers)]
        else:
            self.engines = [engine]
        self.engine = self.engines[0]
        self.rule_name, self.rule = rule, RULES[rule]
        self.batch_size = batch_size if hasattr(self.engine, "read_many") else 1  # else no gain

    @classmethod
    def check_options(cls, engine: str | Engine = "rapidocr", **options: Any) -> None:
        """Raise ValueError for an engine that does not take these options; imports no engine."""
        if isinstance(engine, str):
            if engine not in ENGINES:
                raise ValueError(f"no OCR engine {engine!r}; use one of {list(ENGINES)}.")
            for name in ("rule", "workers", "batch_size"):
                options.pop(name, None)
            check_call(f"OCR engine {engine!r}", ENGINES[engine], options)

    @classmethod
    def image_cost(cls, *, workers: int = 1, **options: Any) -> Cost | None:
        """`cost`, shared by the workers."""
        cost = super().image_cost(**options)
        return cost and replace(cost, seconds=cost.seconds / workers)

    @classmethod
    def packages(cls, engine: str | Engine = "rapidocr", **options: Any) -> tuple[str, ...]:
        """What the engine imports."""
        if engine == "rapidocr":
            return ("rapidocr", "onnxruntime")
        if engine != "paddleocr":
            return ()
        runtime = options.get("inference")
        return ("paddleocr", "onnxruntime" if runtime == "onnxruntime" else "paddle")

    @classmethod
    def check_prompts(cls, prompts: Sequence[str], metadata: Metadata, **options: Any) -> None:
        """Raise ValueError for the first prompt that has no target text."""
        for number, (prompt, meta) in enumerate(zip(prompts, metadata, strict=True), 1):
            try:
                _target(prompt, meta)
            except ValueError as error:
                raise ValueError(f"number {number} of {len(prompts)}: {error}") from None

    def describe(self) -> dict[str, Any]:
        """Which engine and models read, and by which rule."""
        return {"name": self.name, "engine": self.engine.name, "rule": self.rule_name}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B, on the CPU; reasons say what was read."""
        value = torch.full((len(images),), float("nan"))
        exact, reasons = value.clone(), {}
        pictures: dict[int, tuple[str, np.ndarray]] = {}
        for row, (image, prompt, meta) in enumerate(zip(images, prompts, metadata, strict=True)):
            try:
                pictures[row] = _target(prompt, meta), to_uint8(image)
            except Exception as error:
                reasons[row] = f"{type(error).__name__}: {error}"
        texts = self._read([pixels for _, pixels in pictures.values()])
        for (row, (target, _)), lines in zip(pictures.items(), texts, strict=True):
            try:
                if isinstance(lines, Exception):
                    raise lines
                wanted, read = _compared(target, lines)
                value[row] = self.rule(target, lines)
            except Exception as error:
                reasons[row] = f"{type(error).__name__}: {error}"
                continue
            exact[row] = float(wanted == read)
            reasons[row] = f"read {repr(read) if read else 'nothing'} for {wanted!r}"
        return Scores(value, torch.isfinite(value), {"exact": exact}, reasons)

    def _read(self, pictures: Sequence[np.ndarray]) -> list[list[Line] | Exception]:
        """The lines of each picture, or the exception; every worker has an engine of its own."""
        free: SimpleQueue[Engine] = SimpleQueue()
        for engine in self.engines:
            free.put(engine)

        def read(chunk: Sequence[np.ndarray]) -> list[list[Line] | Exception]:
            engine = free.get()  # never waits: there are as many threads as engines
            try:
                return read_all(engine, chunk)
            finally:
                free.put(engine)

        starts = range(0, len(pictures), self.batch_size)
        chunks = [pictures[start : start + self.batch_size] for start in starts]
        with ThreadPoolExecutor(len(self.engines)) as pool:  # the engines release the GIL
            return [lines for chunk in pool.map(read, chunks) for lines in chunk]


def _target(prompt: str, metadata: Mapping[str, Any]) -> str:
    """What an image of this prompt has to say; ValueError where there is no such text."""
    if "target" not in metadata:
        return target_of(prompt)
    target = metadata["target"]
    if not isinstance(target, str) or not normalize(target):
        raise ValueError(f"prompt {prompt!r} has in its metadata a `target` {target!r}, no text.")
    return target


def _compared(target: str, lines: Sequence[Line] | None) -> tuple[str, str]:
    wanted = normalize(target)
    if not wanted:
        raise ValueError(f"the target text {target!r} is blank; nothing can be compared with it.")
    return wanted, normalize("".join(text for text, confidence in lines or () if confidence > 0))
