"""OCR as a reward: whether an image shows the text that its prompt puts between quotes."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from importlib.metadata import version
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from flowalign.rewards.base import Cost, RewardBase
from flowalign.rewards.options import Count, check_call
from flowalign.rewards.vlm import VLM
from flowalign.system.images import to_uint8
from flowalign.system.packages import installed, require
from flowalign.types import Metadata, Scores

OcrLine = tuple[str, float]
Words = Sequence[str]
Row = Mapping[str, Any]  # the metadata of an image
Letters = frozenset[str] | None  # what an engine can write; None = it has no list
LEAST_CONFIDENCE = 0.5  # lines of less are dropped, as PaddleOCR 2.x, the peers' engine, does
READ_QUESTION = (
    "Which text does the image show? Reply with that text only, and do not repeat any of it."
)


def target_of(prompt: str) -> str:
    """The text between the first two straight double quotes of a prompt, as it stands there.

    Raises ValueError where there is no such text: fewer than two quotes, or nothing but spaces
    between them. (The peers take the rest of the prompt after a lone quote.)
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


# What fonts, keyboards and engines write in several ways: the plain form of each.
PLAIN = {
    **dict.fromkeys(map(ord, "‘’‚‛′´ʼ"), "'"),
    **dict.fromkeys(map(ord, "“”„‟″"), '"'),
    **dict.fromkeys(map(ord, "‐‑‒–—―−"), "-"),
    **dict.fromkeys(range(0xFE00, 0xFE10), ""),  # say which variant of a glyph is meant
}
BY_CATEGORY = {"Zs": " ", "Cf": ""}  # spaces; characters of no width


def plain(text: str) -> str:
    """Text in NFKC, with plain quotes, apostrophes, dashes and spaces, without characters of no
    width. So digits of full width are ASCII, … is three dots, and ⅓ is 1/3."""
    text = unicodedata.normalize("NFKC", text.translate(PLAIN)).replace("\u2044", "/")
    return "".join(BY_CATEGORY.get(unicodedata.category(sign), sign) for sign in text)


def unwritable_letters(text: str, letters: frozenset[str]) -> list[str]:
    """The characters of a text that an engine cannot write."""
    signs = [sign for sign in plain(text) if not (sign.isascii() or sign.isspace())]
    missing = [sign for sign in signs if letters.isdisjoint((sign, sign.lower(), sign.upper()))]
    if "ς" not in letters:  # it has Greek letters for formulas, and reads words as Latin
        missing += "".join(re.findall(r"[\u0370-\u03ff\u1f00-\u1fff]{2,}", plain(text)))
    return list(dict.fromkeys(missing))


# Rules: what an image has to show, and how well it does -------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A way to compare what is read with the texts that an image has to show.

    words: what is compared of a text. score: the numbers of an image, from its wanted words, the
    read words, and its metadata: value, parts, and the groups that it belongs to. several: whether
    it may have several texts; then `text` of the metadata may hold them, too.
    """

    name: str
    words: Callable[[str], Words]
    score: Callable[[Any, Any, Row], dict[str, float]]
    several: bool = True

    def texts(self, prompt: str, metadata: Row, letters: Callable[[], Letters]) -> list[str]:
        """What an image of this prompt has to show. ValueError where there is no such text, where
        more than one is possible, or where it has others than the engine's letters."""
        keys = ("target", "text") if self.several else ("target",)
        key = next((key for key in keys if key in metadata), None)
        target = metadata[key] if key else self._quoted(prompt)
        texts = [target] if isinstance(target, str) else target
        is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        is_many = is_list and len(texts) > 1 and not self.several
        if not is_list or is_many or not self.compared(texts, [])[0]:
            where = f"in its metadata a `{key}`" if key else "between quotes"
            want = "words" if self.several else "one text"
            text = f"{where} {target!r}; rule {self.name!r} wants {want}."
            raise ValueError(f"prompt {prompt!r} has {text}")
        text = " ".join(texts)
        known = None if text.isascii() else letters()
        if known and (missing := unwritable_letters(text, known)):
            raise ValueError(
                f"prompt {prompt!r} wants letters that this engine never writes: "
                f"{' '.join(missing)}. Leave it out, or use `engine: vlm`, or `paddleocr` with a "
                "`lang` that has them."
            )
        return texts

    def _quoted(self, prompt: str) -> list[str]:
        before, *rest = prompt.split('"')
        inches = rest and before.endswith((*string.digits, "\\"))
        is_pairs = self.several and len(rest) % 2 == 0
        if inches or (len(rest) > 2 and not is_pairs):
            raise ValueError(
                f"prompt {prompt!r}: which text its {len(rest)} double quotes mean is not clear "
                "(inch marks, escaped quotes?). Give `target` in the metadata."
            )
        return [target_of(prompt), *rest[2:-1:2]]

    def compared(self, texts: Sequence[str], lines: Sequence[OcrLine]) -> tuple[Words, Words]:
        """The words of the texts, and of the lines of confidence > 0. Unless the texts are ASCII,
        which is compared as the peers do, both are `plain` first."""
        target = " ".join(texts)
        joint = "\n" if self.several else ""
        page = joint.join(text for text, confidence in lines if confidence > 0)
        if not target.isascii():
            target, page = map(plain, (target, page))
        return self.words(target), self.words(page)


def text_reward(target: str, lines: Sequence[OcrLine] | None) -> float:
    """The published OCR rule, in [0,1]; its mean is what papers call OCR accuracy.

    lines: (text, confidence) in reading order, None or [] = no text. Lines of confidence > 0
    are joined; 1 if the target is in them, else 1 - min(Levenshtein, n) / n for a target of n
    characters. So any surplus text around the target is free. Targets that are not ASCII, and
    what is read for them, are compared as `plain` text.
    Source: Flow-OPD@434ab16 flow_grpo/ocr.py (OcrScorer). Raises ValueError for a blank target.
    """
    wanted, read = RULES["published"].compared([target], lines or [])
    if not wanted:
        raise ValueError(f"the target text {target!r} is blank; nothing can be compared with it.")
    return RULES["published"].score(wanted, read, {})["value"]


def published(wanted: str, read: str, metadata: Row) -> dict[str, float]:
    """`text_reward`; "exact", 1 where nothing else is read, else 0; by the target's length."""
    value = 1.0
    if wanted not in read:  # Levenshtein would count the surplus text
        value -= min(Levenshtein.distance(wanted, read), len(wanted)) / len(wanted)
    longest = max(4, 1 << (len(wanted) - 1).bit_length())
    shortest = longest // 2 + 1 if longest > 4 else 1
    group = f"letters_{shortest:02}_to_{longest:02}"
    return {"value": value, "exact": float(wanted == read), group: value}


def cvtg2k(wanted: Words, read: Words, metadata: Row) -> dict[str, float]:
    """CVTG-2K: a word is right if it is read at least once. `ned`: the mean over words of
    1 - Levenshtein / longer length to the closest word, as difflib finds it. By regions.
    weight: the number of words, over which the benchmark's means are.
    Source: NJU-PCALab/TextCrafter, unified_metrics_eval.py."""
    close = [(word, get_close_matches(word, read or [""], 1, cutoff=0)[0]) for word in wanted]
    ned = fmean(1 - Levenshtein.distance(*p) / (max(map(len, p)) + 1e-5) for p in close)
    value = fmean(word in read for word in wanted)
    group = f"regions_{metadata['regions']}"
    by_group = {group: value, f"{group}_ned": ned}
    return {"value": value, "ned": ned, **by_group, "weight": len(wanted)}


def longtext(wanted: Words, read: Words, metadata: Row) -> dict[str, float]:
    """LongText-Bench: each word (in Chinese, character) that is read is right once. By length.
    weight: as for `cvtg2k`. Source: X-Omni, textbench/summary_scores.py."""
    value = (Counter(wanted) & Counter(read)).total() / len(wanted)
    length = metadata.get("length")
    group = {f"length_{length}": value} if length in ("short", "long") else {}
    return {"value": value, **group, "weight": len(wanted)}


# What LongText-Bench removes: all but Chinese, Latin and French letters, digits and white space.
NOT_COMPARED = re.compile(r"[^\u4e00-\u9fa5a-zA-Z0-9\sàâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ]")
RULES = {
    rule.name: rule
    for rule in (
        Rule("published", normalize, published, several=False),
        Rule("cvtg2k", lambda text: text.lower().split(), cvtg2k),
        Rule("longtext", lambda text: NOT_COMPARED.sub("", text).lower().split(), longtext),
        Rule("longtext_zh", lambda text: "".join(NOT_COMPARED.sub("", text).split()), longtext),
    )
}


# Engines: numbers from different ones are not comparable ------------------------------------------


class Engine(Protocol):
    """Reads text. `name` says which engine, models and settings, and is recorded with results."""

    name: str

    def read(self, image: np.ndarray) -> list[OcrLine]:
        """image uint8 RGB [H,W,3] -> (text, confidence in [0,1]) in reading order; [] = none."""
        ...


class RapidOCREngine:
    """RapidOCR on onnxruntime; its wheel brings the PP-OCRv6 small models, so it works offline.

    limit_side_len, limit_type: "min" enlarges for detection until the short side has this many
        pixels, "max" shrinks until the long side has. RapidOCR's own: 736, "min".
    rec_width: the recogniser's input (48 high) is padded to this width; longer lines get more.
        320 is what it was made for, 128 halves its time where lines are short.
    One image a call: in a batch a line is padded to the longest, and scores depend on others.
    Raises ImportError where rapidocr is not installed. Not for use from several threads.
    """

    def __init__(
        self,
        limit_side_len: Count = 736,
        limit_type: Literal["min", "max"] = "min",
        rec_width: Count = 320,
    ) -> None:
        rapidocr = require("rapidocr", "this reward reads text with")
        self.longest = limit_side_len if limit_type == "max" else None
        self._ocr: Any = rapidocr.RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.text_score": LEAST_CONFIDENCE,
                "Global.use_cls": False,  # upside-down lines: generated text has none
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # -1 would take all cores
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_side_len": limit_side_len,
                "Det.limit_type": limit_type,
                "Det.box_thresh": 0.5,
                "Det.unclip_ratio": 1.6,
                "Rec.rec_img_shape": [3, 48, rec_width],
            }
        )
        parts = (self._ocr.cfg.Det, self._ocr.cfg.Rec)  # often of one release: named once
        models = dict.fromkeys(f"{p.ocr_version.value} {p.model_type.value}" for p in parts)
        self.name = (
            f"rapidocr {version('rapidocr')}, {' + '.join(models)}, text_score {LEAST_CONFIDENCE}, "
            f"upscale 1, limit {limit_side_len} {limit_type}, box_thresh 0.5, "
            f"unclip_ratio 1.6, rec_width {rec_width}"
        )

    def read(self, image: np.ndarray) -> list[OcrLine]:
        """image uint8 RGB [H,W,3] -> (text, confidence) in RapidOCR's order, [] = no text."""
        page = self._ocr(_bgr(image))
        return list(zip(page.txts or (), map(float, page.scores or ()), strict=True))


class PaddleOCREngine:
    """PaddleOCR 3.x with the peers' models, which it downloads on first use.

    lang: of the models. device: "cpu" or "gpu:0"; None = PaddleOCR's choice. An image keeps its
    size for detection (at 512 px the peers' limit gives the same).
    Raises ImportError where paddleocr is not installed.
    """

    def __init__(self, lang: str = "en", device: str | None = None) -> None:
        paddleocr = require("paddleocr", "this reward reads text with")
        self._ocr = paddleocr.PaddleOCR(
            lang=lang,
            ocr_version="PP-OCRv4",
            cpu_threads=1,
            device=device,
            use_doc_orientation_classify=False,  # these three are for scans and photographs
            use_doc_unwarping=False,
            use_textline_orientation=False,
            text_rec_score_thresh=LEAST_CONFIDENCE,
            text_det_limit_side_len=64,
            text_det_limit_type="min",
            text_det_box_thresh=0.6,
            text_det_unclip_ratio=1.5,
        )
        self.name = (
            f"paddleocr {version('paddleocr')} paddle, PP-OCRv4 {lang}, text_rec_score_thresh "
            f"{LEAST_CONFIDENCE}, upscale 1, limit 64 min, box_thresh 0.6, unclip_ratio 1.5"
        )

    def read(self, image: np.ndarray) -> list[OcrLine]:
        """image uint8 RGB [H,W,3] -> (text, confidence) in PaddleOCR's order, [] = no text."""
        (page,) = self._ocr.predict([_bgr(image)])
        return list(zip(page["rec_texts"], map(float, page["rec_scores"]), strict=True))


class VLMEngine:
    """A vision-language model at an endpoint (options of reward `vlm`), as LongText-Bench reads."""

    def __init__(
        self, endpoint: Mapping[str, Any], question: str = READ_QUESTION, max_tokens: Count = 1024
    ) -> None:
        self.judge = VLM(**{**endpoint, "image_size": None})
        self.question = question
        self.max_tokens = max_tokens
        self.name = f"OpenAI chat completions, {self.judge.model}, {max_tokens} tokens, {question}"

    @staticmethod
    def check_options(endpoint: Mapping[str, Any], **others: Any) -> None:
        """Raise ValueError for an endpoint that reward `vlm` would refuse."""
        check_call("`endpoint` of OCR engine 'vlm'", VLM, endpoint)

    def read(self, image: np.ndarray) -> list[OcrLine]:
        """image uint8 RGB [H,W,3] -> (line, 1), or the endpoint's failure as an exception."""
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
        (answer,) = self.judge.say(pixels, [(0, self.question)], self.max_tokens)
        if isinstance(answer, Exception):
            raise answer
        return [(line, 1.0) for line in answer.splitlines()]


ENGINES: dict[str, Callable[..., Engine]] = {
    "rapidocr": RapidOCREngine,
    "paddleocr": PaddleOCREngine,
    "vlm": VLMEngine,
}


@cache
def alphabet(engine: str, lang: str) -> Letters:
    """The letters of an engine. RapidOCR's are in its model, whose loading takes a second;
    PaddleOCR's of other languages come with the download."""
    if engine == "paddleocr" and lang == "en":
        return frozenset(string.printable)
    if engine != "rapidocr" or not installed("rapidocr"):
        return None
    params = {"Global.log_level": "critical", "Global.use_det": False, "Global.use_cls": False}
    ocr: Any = require("rapidocr", "this reward reads text with").RapidOCR(params=params)
    ocr(np.full((48, 48, 3), 255, np.uint8))  # the first image loads the model
    return frozenset(ocr.text_rec.postprocess_op.character)


def _bgr(image: np.ndarray) -> np.ndarray:
    """RGB -> BGR, as both engines take arrays; OpenCV takes no negative strides."""
    return np.ascontiguousarray(image[:, :, ::-1])


# The reward --------------------------------------------------------------------------------------


class OCR(RewardBase):
    """Reward in [0,1]: the text that an engine reads off the image, against the target text.

    engine: "rapidocr", "paddleocr", "vlm" (with that engine's options), or an Engine object.
    workers: images read at once, each by an engine of its own (an Engine object reads alone).
    rule: "published" (`text_reward`), or of several texts `cvtg2k`, `longtext`, "longtext_zh".
    The target is `target` of the image's metadata (for several texts a list, or LongText-Bench's
    `text`), else what the prompt puts in quotes. An image without text scores 0. A failing engine
    and a prompt without a target raise: see `flowalign.rewards.score`.
    parts: "exact", 1 where the text equals the target but for case and spaces, else 0, and the
    value under the length of the target; of several texts those of their rule.
    The name of an engine says its models and settings. workers change no result.
    """

    name = "ocr"
    choice = ("engine", "rapidocr")
    choices = {"rapidocr": "Apache-2.0", "paddleocr": "Apache-2.0", "vlm": ""}
    cost = Cost(seconds=0.306)  # docs/rewards/ocr.md
    resizes = frozenset({"limit_side_len", "limit_type", "rec_width"})

    @classmethod
    def files(cls, **options: Any) -> Mapping[str, float] | None:
        """{}: the models ship with RapidOCR, and PaddleOCR downloads a few MB by itself."""
        return None if options.get("engine") == "paddleocr" else {}

    def __init__(
        self,
        engine: str | Engine = "rapidocr",
        rule: Literal["published", "cvtg2k", "longtext", "longtext_zh"] = "published",
        workers: Count = 1,
        **engine_options: Any,
    ) -> None:
        self.engines: list[Any] = [engine]
        self.alphabet = partial(alphabet, str(engine), engine_options.get("lang", "en"))
        if isinstance(engine, str):
            self.engines = [ENGINES[engine](**engine_options) for _ in range(workers)]
        self.rule = RULES[rule]
        self.settings = {"engine": self.engines[0].name, "rule": rule}

    @classmethod
    def check_options(cls, engine: str | Engine = "rapidocr", **options: Any) -> None:
        """Raise ValueError for an engine that does not take these options; imports no engine."""
        if isinstance(engine, str):
            if engine not in ENGINES:
                raise ValueError(f"no OCR engine {engine!r}; use one of {list(ENGINES)}.")
            engine_options = {name: options[name] for name in options.keys() - {"rule", "workers"}}
            check_call(f"OCR engine {engine!r}", ENGINES[engine], engine_options)

    @classmethod
    def image_cost(cls, *, workers: int = 1, **options: Any) -> Cost | None:
        """`cost`, shared by the workers; None for a model behind an endpoint."""
        cost = None if options.get("engine") == "vlm" else super().image_cost(**options)
        return cost and replace(cost, seconds=cost.seconds / workers)

    @classmethod
    def packages(cls, engine: str | Engine = "rapidocr", **options: Any) -> tuple[str, ...]:
        known = {"rapidocr": ("rapidocr", "onnxruntime"), "paddleocr": ("paddleocr", "paddle")}
        return known.get(engine, ()) if isinstance(engine, str) else ()

    @classmethod
    def check_prompts(cls, prompts: Sequence[str], metadata: Metadata, **options: Any) -> None:
        """Raise ValueError for the first prompt that has no target text, or whose target has
        letters that the engine cannot write."""
        rule = RULES[options.get("rule", "published")]
        engine = str(options.get("engine", "rapidocr"))
        letters = partial(alphabet, engine, options.get("lang", "en"))
        for number, (prompt, meta) in enumerate(zip(prompts, metadata, strict=True), 1):
            try:
                rule.texts(prompt, meta, letters)
            except ValueError as error:
                raise ValueError(f"number {number} of {len(prompts)}: {error}") from None

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B, on the CPU; reasons say what was read."""
        pairs = zip(prompts, metadata, strict=True)
        targets = [self.rule.texts(*pair, self.alphabet) for pair in pairs]
        pages = self._read([to_uint8(image) for image in images])
        rows = []
        reasons = {}
        for row, (texts, lines, meta) in enumerate(zip(targets, pages, metadata, strict=True)):
            wanted, read = self.rule.compared(texts, lines)
            rows.append(self.rule.score(wanted, read, {"regions": len(texts), **meta}))
            if self.rule.several:
                wanted = " ".join(texts)
                read = " ".join(text for text, _ in lines)
            reasons[row] = f"read {repr(read) if read else 'nothing'} for {wanted!r}"
        return Scores.of_rows(rows, reasons)

    def resize_factor(self, height: int, width: int) -> float:
        limit = getattr(self.engines[0], "longest", None)
        return limit / max(height, width) if limit else 1.0

    def _read(self, pictures: Sequence[np.ndarray]) -> list[list[OcrLine]]:
        """The lines of each picture; every worker has an engine of its own."""
        free = list(self.engines)

        def read(picture: np.ndarray) -> list[OcrLine]:
            engine = free.pop()  # never empty: there are as many threads as engines
            try:
                return engine.read(picture)
            finally:
                free.append(engine)

        with ThreadPoolExecutor(len(self.engines)) as pool:  # the engines release the GIL
            return list(pool.map(read, pictures))
