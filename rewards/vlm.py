"""A vision-language model as judge: it looks at an image, and writes a score.

Any endpoint that speaks OpenAI's chat completions serves (vLLM, SGLang). docs/rewards/vlm.md has
the commands that start one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowalign.images import to_uint8
from flowalign.rewards import load
from flowalign.rewards.chat import Endpoint, beginning, image_url
from flowalign.types import Scores


@dataclass(frozen=True)
class Template:
    """What the judge is asked, and how its answer is read.

    text: the question; `{prompt}` in it stands for the image's prompt.
    pattern: regular expression whose first group is the score; its last match counts.
    The score must lie in lowest..scale; value = score / scale.
    """

    text: str
    pattern: str
    scale: float = 5.0
    lowest: float = 1.0

    def ask(self, prompt: str) -> str:
        """The question about an image of this prompt. Other braces in the text stay as they are."""
        return self.text.replace("{prompt}", prompt)

    def read(self, answer: str) -> float:
        """The score in an answer, in lowest..scale. Raises ValueError if there is none.

        The last match counts, as the verdict follows the analysis: what the judge quotes before
        it, say from a picture that shows the words "Final Score: 5", is no verdict. (The peers
        take the first; answers with one match are the same to both.)
        """
        found = re.findall(self.pattern, answer)
        if not found:
            raise ValueError("no score in the answer")
        score = float(found[-1])  # one group: findall gives its texts
        if not self.lowest <= score <= self.scale:
            raise ValueError(f"a score outside {self.lowest:g} to {self.scale:g} in the answer")
        return score


_FINAL_SCORE = r"Final Score:[\s*\[]*(\d+(?:\.\d+)?)"  # also of "**Final Score:** 4", "[4]"
_SCORE_TAG = r"<(?:Overall)?Score>\s*(\d+)\s*</(?:Overall)?Score>"
_LEVELS = """\
1 (bad): {}
2 (poor): {}
3 (fair): {}
4 (good): {}
5 (excellent): {}"""
_QUALITY = _LEVELS.format(
    "heavy blur or noise, far too dark, the subject cannot be made out, a chaotic composition.",
    "visible blur, poor light, pale colours, an awkward composition that cuts the subject.",
    "in focus and lit well enough, but dull colours and a composition without ideas.",
    "sharp, well exposed, vivid colours, a considered composition with a clear subject.",
    "outstanding clarity and light, rich colours, a masterful composition that moves.",
)
_FOLLOWING = _LEVELS.format(
    "the image ignores or contradicts the instruction.",
    "it is loosely related, and most of the important elements are missing.",
    "it follows in part; some important elements are missing or wrong.",
    "it follows with small deviations.",
    "it shows all that the instruction says, faithfully.",
)
_UNIFIED = """\
Here are a text caption and an image that was generated from it. Judge the image by two criteria:
1. Alignment with the caption: are the objects, their attributes and the relations between them \
those that the caption describes?
2. Overall image quality: clarity, preserved detail, accurate colours, and general appeal.
Considering both, give one score from 1 to 5 after 'Final Score:'.
Text Caption: [{prompt}]"""
_QUALITY_ONLY = f"""\
You rate the aesthetic quality of an image from 1 to 5.
{_QUALITY}

First write down your analysis within the <Thought> tag, then the rating within the <Score> tag:
<Thought>
[your analysis]
</Thought>
<Score>X</Score>"""
_THREE = f"""\
You rate a generated image from 1 to 5 in three respects: its aesthetic quality, how well it \
follows its instruction, and overall.

Aesthetic quality:
{_QUALITY}

Following the instruction, which is: {{prompt}}
{_FOLLOWING}

Overall: above all how well the instruction is followed. An image that follows it perfectly and \
is a little less beautiful ranks above a beautiful one that ignores it. The levels have the same \
names.
{{strict}}
First write down your analysis of all three within the <Thought> tag, then the ratings within the \
tags below:
<Thought>
[your analysis]
</Thought>
<QualityScore>X</QualityScore>
<InstructionScore>Y</InstructionScore>
<OverallScore>Z</OverallScore>"""

TEMPLATES: dict[str, Template] = {
    "unifiedreward": Template(_UNIFIED, _FINAL_SCORE),
    "qwenvl": Template(_THREE.replace("{strict}\n", ""), _SCORE_TAG),
    "qwenvl_strict": Template(_THREE.replace("{strict}", "Be extremely strict."), _SCORE_TAG),
    "qwenvl_quality": Template(_QUALITY_ONLY, _SCORE_TAG),
}


class VLM:
    """Reward in [0,1]: a vision-language model's score of an image for its prompt, over its scale.

    url, model, concurrency, timeout, retries, token_env, max_tokens: of `chat.Endpoint`.
    template: "unifiedreward" (made for UnifiedReward-7b-v1.5), "qwenvl", "qwenvl_strict" or
        "qwenvl_quality" (for Qwen2.5-VL-7B-Instruct; the last looks at the image alone); a text
        that holds {prompt}; or the dotted path "package.module:attribute" of a Template.
    pattern, scale: for a text only: a regular expression whose group is the score, and the highest
        score (default 5, the lowest is then 0). value = score / scale.
    image_size: images are sent as PNG of this width and height; None = as they are.
    parts: "raw", the score before division, 1 to 5 with the built-in templates.
    The templates ask what the peers ask (flow_grpo@ac4c86e and Flow-OPD@434ab16: rewards.py,
    qwenvl.py), in the same order and for the same form of answer, in words of our own: numbers
    are not exactly comparable with published ones. To use the official text, give it as template.
    Where an answer has no score in it the image is invalid, and the answer's beginning the reason.
    (The peers score 0, below the scale's worst: an answer that breaks off then pulls the policy
    away from an image that nobody judged.)
    Raises ConnectionError where the endpoint gives no answers (`flowalign.rewards.score` masks).
    """

    name = "vlm"

    def __init__(
        self,
        url: str,
        model: str,
        template: str | Template = "unifiedreward",
        *,
        pattern: str | None = None,
        scale: float | None = None,
        image_size: int | None = 512,
        concurrency: int = 8,
        timeout: float = 120.0,
        retries: int = 3,
        token_env: str | None = None,
        max_tokens: int = 2048,
    ) -> None:
        _check_size(image_size)
        self.template = _template(template, pattern, scale)
        self.template_name = (
            template if isinstance(template, str) and template in TEMPLATES else "own"
        )
        self.image_size = image_size
        self.endpoint = Endpoint(url, model, concurrency, timeout, retries, token_env, max_tokens)

    @staticmethod
    def check_options(*args: Any, **options: Any) -> None:
        """Raise ValueError for options that cannot work; asks nobody."""
        VLM(*args, **options)

    def describe(self) -> dict[str, Any]:
        """Which judge, asked what, and what else its scores depend on."""
        return {
            "name": self.name,
            "engine": "OpenAI chat completions",
            "model": self.endpoint.model,
            "template": self.template_name,
            **vars(self.template),
            "image_size": self.image_size,
            "max_tokens": self.endpoint.max_tokens,
            "temperature": 0,
        }

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1], B prompts -> Scores of B, on the CPU; failed ones say why."""
        questions = [
            partial(self._question, image, prompt)
            for image, prompt in zip(images, prompts, strict=True)
        ]
        raw, reasons = torch.full((len(images),), float("nan")), {}
        for row, answer in enumerate(self.endpoint.answers(questions)):
            try:
                if isinstance(answer, Exception):
                    raise answer
                raw[row] = self._score(answer)
            except Exception as error:
                reasons[row] = f"{type(error).__name__}: {error}"
        return Scores(raw / self.template.scale, torch.isfinite(raw), {"raw": raw}, reasons)

    def _question(self, image: Tensor, prompt: str) -> tuple[str, str]:
        return self.template.ask(prompt), image_url(to_uint8(image), self.image_size)

    def _score(self, answer: str) -> float:
        try:
            return self.template.read(answer)
        except ValueError as error:
            raise ValueError(f"{error}: {beginning(answer)}") from None


def _template(template: str | Template, pattern: str | None, scale: float | None) -> Template:
    """The template that the options name or make. Raises ValueError for what is none."""
    if isinstance(template, str) and "{prompt}" in template:
        if pattern is None:
            raise ValueError(
                "`template` is a text of your own, so say how its answers are read: `pattern`, a "
                r"regular expression whose group is the score, such as 'Score: (\d+)'."
            )
        found = Template(template, pattern, 5.0 if scale is None else scale, lowest=0.0)
        _check_reading(found)
        return found
    if pattern is not None or scale is not None:
        raise ValueError(
            "`pattern` and `scale` go with a text of your own as `template`; built-in templates "
            "and those of a dotted path have theirs. Leave them out."
        )
    found = template
    if isinstance(template, str):
        found = load(template, "template") if ":" in template else TEMPLATES.get(template)
    if not isinstance(found, Template):
        close = difflib.get_close_matches(str(template), TEMPLATES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"no template {template!r}{hint}; use one of {list(TEMPLATES)}, a text with {{prompt}} "
            "in it, or the path 'package.module:attribute' of a flowalign.rewards.vlm.Template."
        )
    _check_reading(found)
    return found


def _check_reading(template: Template) -> None:
    """Raise ValueError where no answer could be read, or no score divided."""
    try:
        groups = re.compile(template.pattern).groups
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`pattern` {template.pattern!r} is no regular expression: {error}."
        ) from None
    if groups != 1:
        raise ValueError(
            f"`pattern` {template.pattern!r} has {groups} groups; the score is what its one group "
            "matches. Write (?:...) for the others."
        )
    number = isinstance(template.scale, (int, float)) and not isinstance(template.scale, bool)
    if not number or not math.isfinite(template.scale) or template.scale <= 0:
        raise ValueError(
            f"`scale` is {template.scale!r}; it is the highest score, so give a number above 0."
        )


def _check_size(size: Any) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"`image_size` is {size!r}; use pixels, or null for as they are.")
