"""A vision-language model as judge: it looks at an image, and writes a score.

It is reached at any endpoint that speaks OpenAI's chat completions (vLLM, SGLang).
docs/rewards/vlm.md has the commands that start one.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from PIL import Image
from pydantic import AfterValidator, Field
from torch import Tensor

from flowalign.config.safe_yaml import load_yaml
from flowalign.rewards.base import RewardBase
from flowalign.rewards.options import Count, Divisor, Retries, Seconds, TokenEnv, Url, read_token
from flowalign.system.escape import shown
from flowalign.system.http import Client
from flowalign.system.images import png_base64, to_uint8
from flowalign.types import Metadata, Scores

MAX_ANSWER = 2**20  # of an answer
CONTENT = "text choices[0].message.content"
NO_TEXT = (  # what reading another answer raises
    json.JSONDecodeError, UnicodeError, LookupError, TypeError, AttributeError, RecursionError
)  # fmt: skip
# the tags of a part that drafts scores and quotes them; the text after it is the answer
THINKING = re.compile(r"[<\[◁](/?)think(?:ing)?[>\]▷]", re.IGNORECASE)


def _check_pattern(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    if groups != 1:
        raise ValueError("it needs one group, which is the score; write (?:...) for the others")
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]


@dataclass(frozen=True)
class Template:
    """The judge's question, and how to read its answer.

    text: the question; `{prompt}` in it stands for the image's prompt.
    pattern: regular expression whose one group is the score; its last match counts.
    The score must lie in lowest..scale; value = score / scale.
    """

    text: str
    pattern: str
    scale: float = 5.0
    lowest: float = 1.0

    def read(self, answer: str) -> float:
        """The score in an answer, in lowest..scale. Raises ValueError if there is none.

        The last match counts, as the verdict follows the analysis: what the judge quotes before
        it, say from a picture that shows the words "Final Score: 5", is no verdict. (The peers
        take the first; answers with one match are the same to both.)
        """
        scores = re.findall(self.pattern, answer)  # one group: the texts that it matched
        # ValueError for what is no number; some languages write 4,5
        score = float(scores[-1].replace(",", ".")) if scores else math.nan
        if not self.lowest <= score <= self.scale:
            text = repr(shown(answer, 160))
            raise ValueError(f"no score of {self.lowest:g} to {self.scale:g} in the answer {text}")
        return score


SPOKEN = load_yaml(Path(__file__).with_name("vlm_templates.yaml").read_text("utf-8"))
TEMPLATES = {name: Template(**fields) for name, fields in SPOKEN.items()}
LAST = "First write down"
STRICT = TEMPLATES["qwenvl"].text.replace(LAST, f"Be extremely strict.\n{LAST}")
TEMPLATES["qwenvl_strict"] = replace(TEMPLATES["qwenvl"], text=STRICT)


class VLM(RewardBase):
    """Reward in [0,1]: a vision-language model's score of an image for its prompt, over its scale.

    Options: docs/rewards/vlm.md. The temperature is 0. parts: "raw", the score.
    The templates ask what the peers ask (flow_grpo@ac4c86e and Flow-OPD@434ab16: rewards.py,
    qwenvl.py), in the same order and for the same form of answer, in words of our own: numbers
    are not exactly comparable with published ones. To use the official text, give it as template.
    If an answer has no score in it the image is invalid, and the answer's beginning the reason.
    (The peers score 0, below the scale's worst: an answer that breaks off then pulls the policy
    away from an image that was not judged.)
    Raises ConnectionError or TimeoutError if the endpoint answers nothing at all.
    """

    name = "vlm"

    def __init__(
        self,
        url: Url,
        model: Annotated[str, Field(min_length=1)],
        template: str = "unifiedreward",
        *,
        pattern: Pattern | None = None,
        scale: Divisor | None = None,
        image_size: Count | None = 512,
        concurrency: Count = 8,
        timeout: Seconds = 120.0,
        retries: Retries = 3,
        token_env: TokenEnv = None,
        max_tokens: Count = 2048,  # the verdict follows the analysis, so a cut answer has none
    ) -> None:
        self.template = _template(template, pattern, scale)
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.model = model
        self.image_size = image_size
        self.concurrency = concurrency
        self.max_tokens = max_tokens
        self.timeout = timeout
        self.retries = retries
        self.token_env = token_env  # no token kept
        self.settings = {
            "engine": "OpenAI chat completions",
            "model": model,
            "template": template if template in TEMPLATES else "own",
            **vars(self.template),
            "image_size": image_size,
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    @classmethod
    def check_options(cls, *_: Any, template: str = "unifiedreward", **options: Any) -> None:
        """Raise ValueError for a template that cannot work. Sends no request."""
        _template(template, options.get("pattern"), options.get("scale"))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1], B prompts -> Scores of B, on the CPU; failed ones say why."""
        questions = [(i, self.template.text.replace("{prompt}", p)) for i, p in enumerate(prompts)]
        scores = self._ask(images, questions, self.template.read, self.max_tokens)
        errors = {row: score for row, score in enumerate(scores) if isinstance(score, Exception)}
        reasons = {row: f"{type(error).__name__}: {error}" for row, error in errors.items()}
        raw = torch.tensor([math.nan if row in errors else s for row, s in enumerate(scores)])
        return Scores(raw / self.template.scale, torch.isfinite(raw), {"raw": raw}, reasons)

    def resize_factor(self, height: int, width: int) -> float:
        return self.image_size / max(height, width) if self.image_size else 1.0

    def say(
        self, images: Tensor, questions: Sequence[tuple[int, str]], max_tokens: int
    ) -> list[Any]:
        """The text of each answer, or its exception. questions: row of images [B,3,H,W], question.
        Raises ConnectionError or TimeoutError if the endpoint answers nothing at all."""
        return self._ask(images, questions, str.strip, max_tokens)

    def _ask(
        self,
        images: Tensor,
        questions: Sequence[tuple[int, str]],
        read: Callable[[str], Any],
        most: int,
    ) -> list[Any]:
        """What `read` makes of the text of each answer, or its exception. most: tokens of an
        answer."""
        picture = functools.cache(lambda row: image_url(images[row], self.image_size))

        def ask(question: tuple[int, str]) -> Any:
            content = [
                {"type": "image_url", "image_url": {"url": picture(question[0])}},
                {"type": "text", "text": question[1]},
            ]
            return complete(client, self.url, self.model, content, most, read)

        token = read_token(self.token_env) if self.token_env else None
        limits = {"timeout": self.timeout, "retries": self.retries, "max_bytes": MAX_ANSWER}
        with Client(**limits, token=token) as client:
            return client.map(ask, questions, self.concurrency)


def complete(
    client: Client, url: str, model: str, content: Any, most: int, read: Callable[[str], Any]
) -> Any:
    """What `read` makes of the text of a chat completion. content: the user's message. most: tokens
    of the answer. Raises ValueError for an answer without a text, and for one that was cut."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,  # the same image must get the same score
        "max_tokens": most,
    }
    answer = client.request("POST", url, json=body)
    try:
        choice = json.loads(answer)["choices"][0]
        if choice.get("finish_reason") == "length":
            raise ValueError(f"the answer was cut after {most} tokens; raise `max_tokens`")
        text = choice["message"]["content"]
        if isinstance(text, list):
            text = "".join(part["text"] for part in text if part["type"] == "text")
        *_, closes, verdict = ["/", *THINKING.split(text)]
        if not closes:
            raise ValueError(f"the answer ends inside its thinking: {shown(text, 160)!r}")
        return read(verdict)
    except NO_TEXT:
        beginning = client.clean(answer.decode("utf-8", "replace"))
        raise ValueError(f"no {CONTENT} in the answer {beginning!r}") from None


def image_url(image: Tensor, size: int | None) -> str:
    """An image [3,H,W] in [0,1] as the data URL of a PNG, resized to size x size if given."""
    picture = Image.fromarray(to_uint8(image))
    if size is not None and picture.size != (size, size):
        # bicubic to 512 x 512, whatever the aspect: as flow_grpo/rewards.py does
        picture = picture.resize((size, size), Image.Resampling.BICUBIC)
    return "data:image/png;base64," + png_base64(picture)


def _template(template: str, pattern: str | None, scale: float | None) -> Template:
    """The template that the options name or make. Raises ValueError for no valid template."""
    if template not in TEMPLATES and "{prompt}" not in template:
        raise ValueError(
            f"no `template` {template!r}; use one of {list(TEMPLATES)}, or a text with {{prompt}}."
        )
    if template in TEMPLATES and pattern is scale is None:
        return TEMPLATES[template]
    if template in TEMPLATES or pattern is None:
        raise ValueError("`pattern`, such as 'Score: (\\d+)', and `scale` go with a text of yours.")
    return Template(template, pattern, scale or 5.0, lowest=0.0)
