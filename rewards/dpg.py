"""DPG-Bench as a reward (arXiv 2403.05135; TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import AfterValidator
from torch import Tensor

from flowalign.rewards.geneval2 import JUDGE, AskedReward, Local
from flowalign.rewards.options import Device, check_call, check_model
from flowalign.rewards.vlm import VLM
from flowalign.system.devices import resolve
from flowalign.system.escape import shown
from flowalign.system.images import to_uint8
from flowalign.system.packages import require
from flowalign.types import Metadata, Scores

Judge = Annotated[str, AfterValidator(lambda m: m if m == "mplug" else check_model(m))]
Question = tuple[list[int], str, str]  # its parents, which make sense of it; category; text


def questions(metadata: Mapping[str, Any]) -> dict[int, Question]:
    """{number: question} of a prompt of dpg_bench.csv. Raises an error for other metadata."""
    by_number = {}
    pairs = zip(metadata["questions"], metadata["skills"], strict=True)
    for (number, needs, _, text), skill in pairs:
        parents = [int(n) for n in needs.split(",") if int(n)]
        by_number[int(number)] = parents, skill.strip(), text.strip()
    if not by_number:
        raise ValueError("no questions")
    return by_number


def with_dependencies(
    yes: Mapping[int, float], by_number: Mapping[int, Question], rule: str
) -> list[float]:
    """The scores of an image's questions: 0 for a child of a question whose score is 0.

    "official": in one pass, so that a 0 is not passed on by a parent that comes after its child;
    KeyError if a parent is missing. "corrected": in any order.
    """
    official = rule == "official"
    scores = dict(yes)
    for _ in range(1 if official else len(scores)):
        for number, (parents, _, _) in by_number.items():
            if any((scores[n] if official else scores.get(n, 1)) == 0 for n in parents):
                scores[number] = 0.0
    return list(scores.values())


class DPG(AskedReward):
    """DPG-Bench's score of an image whose metadata is a prompt of dpg_bench.csv. Options:
    docs/rewards/dpg.md.

    value: the mean of `with_dependencies`. parts: the share of yes in each category, and in the
    category before its dash. Rule "official" gives parts only for the last image of a prompt, with
    "left_out" = 1 where the first question was not asked.
    """

    name = "dpg"
    prompt_set = "dpg_bench"
    choices = {**AskedReward.choices, "mplug": "MIT (its code)"}
    questions = staticmethod(questions)

    def __init__(
        self,
        model: Judge = JUDGE,
        *,
        endpoint: Mapping[str, Any] | None = None,
        rule: Literal["corrected", "official"] = "corrected",
        device: Device = None,
        offload: bool = False,
    ) -> None:
        self.rule = rule
        self.groupwise = rule == "official"  # to know a prompt's last image
        if endpoint is not None:
            self.judge: Any = VLM(**{"model": model, **endpoint, "image_size": None})
            about = {"engine": "OpenAI chat completions", "model": self.judge.model}
        elif model == "mplug":
            package = require("dpg_evaluator", "the model mplug of reward dpg needs")
            self.judge = package.MPLUG(device=str(resolve(device)))
            about = {"engine": "mplug"}
        else:
            self.judge = Local(model, device, offload)
            about = {**self.judge.settings, "engine": "transformers, yes against no"}
        self.settings = {**about, "rule": rule}

    @classmethod
    def files(cls, **options: Any) -> Mapping[str, float] | None:
        return {} if options.get("endpoint") else super().files(**options)

    @classmethod
    def check_options(cls, *_: Any, **options: Any) -> None:
        """Raise ValueError for an endpoint that reward `vlm` would refuse."""
        if (endpoint := options.get("endpoint")) is not None:
            check_call("`endpoint` of reward 'dpg'", VLM, {"model": JUDGE, **endpoint})

    @classmethod
    def packages(cls, *_: Any, **options: Any) -> tuple[str, ...]:
        return ("dpg_evaluator",) if cls.chosen(**options) == "mplug" else ()

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        last = {prompt: row for row, prompt in enumerate(prompts)}
        rows = []
        reasons = {}
        for row, (prompt, meta) in enumerate(zip(prompts, metadata, strict=True)):
            by_number, answers = self._ask(images[row : row + 1], meta)
            try:
                yes = dict(zip(by_number, map(self._is_yes, answers), strict=True))
                scores = {"value": fmean(with_dependencies(yes, by_number, self.rule))}
            except Exception as error:
                rows.append({"value": math.nan})
                reasons[row] = f"{type(error).__name__}: {error}"
                continue
            if self.rule == "corrected" or last[prompt] == row:
                by_skill = defaultdict[str, list[float]](list)
                for number, (_, skill, _) in by_number.items():
                    for name in {skill, skill.split("-")[0].strip()}:
                        by_skill[name].append(yes[number])
                scores |= {name: fmean(answers) for name, answers in by_skill.items()}
                if self.rule == "official" and meta.get("first_row"):  # `_ask` skips it
                    scores["left_out"] = 1.0
            rows.append(scores)
        return Scores.of_rows(rows, reasons)

    def _ask(self, image: Tensor, metadata: Mapping[str, Any]) -> tuple[dict[int, Question], Any]:
        """The questions about an image [1,3,H,W], and the answers."""
        by_number = questions(metadata)
        if self.rule == "official" and metadata.get("first_row"):  # the official code skips it
            del by_number[next(iter(by_number))]
        texts = [text for _, _, text in by_number.values()]
        texts_to_ask = [(0, f"{text} Answer yes or no.") for text in texts]
        if isinstance(self.judge, VLM):
            return by_number, self.judge.say(image, texts_to_ask, max_tokens=8)
        if isinstance(self.judge, Local):
            return by_number, self.judge.decide(image, texts_to_ask)
        picture = Image.fromarray(to_uint8(image[0]))
        return by_number, [self.judge.vqa(picture, text) for text in texts]  # mPLUG: as officially

    def _is_yes(self, answer: str | Exception) -> float:
        if isinstance(answer, Exception):
            raise answer
        word = answer.strip().rstrip(".").lower()
        if self.rule == "corrected" and word not in ("yes", "no"):
            raise ValueError(f"{shown(repr(answer), 160)} is neither yes nor no")
        return float(word == "yes")
