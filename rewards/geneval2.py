"""GenEval 2 as a reward: Soft-TIFA (arXiv 2512.16853; facebookresearch/GenEval2).

A prompt has questions about its image. The score of one is the sum of the probabilities of the
first token of each accepted spelling of the answer; an image is worth the mean of its scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowalign.backbone.placement import Placement
from flowalign.backbone.pretrained import load_complete
from flowalign.rewards.base import RewardBase, question_counts
from flowalign.rewards.options import Device, Pretrained, hub_files, located
from flowalign.system.escape import shown
from flowalign.system.images import to_uint8
from flowalign.system.packages import require
from flowalign.types import Metadata, Scores

JUDGE = "Qwen/Qwen3-VL-8B-Instruct"  # the benchmark's own judge
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
YES, NO = ["Yes", "yes", " yes", " Yes"], ["No", "no", " no", " No"]
SKILLS = {"object", "attribute", "count", "position", "verb"}


def spellings(question: str, answer: str) -> list[str]:
    """The accepted spellings of an answer. ValueError for a number other than one to ten."""
    if not question.startswith("How many"):
        return YES
    if answer not in WORDS:
        raise ValueError(f"{question!r} has the answer {answer!r}, which is none of {WORDS}")
    texts = answer, answer.capitalize(), str(WORDS.index(answer) + 1)
    return [*texts, *(f" {text}" for text in texts)]


def first_tokens(tokenizer: Any) -> dict[str, int]:
    """{spelling: its first token} of all spellings, and of those of no."""
    texts = [*YES, *NO, *(text for word in WORDS for text in spellings("How many", word))]
    return {text: tokenizer.encode(text, add_special_tokens=False)[0] for text in texts}


def question_score(table: Any, first: Mapping[str, Any], question: str, answer: str) -> float:
    """The score by a table {token: its probability}. A token counts once for each spelling that
    begins with it, by `first`: the score may exceed 1."""
    return sum(float(table[first[text]]) for text in spellings(question, answer))


def soft_tifa(scores: Sequence[float]) -> tuple[float, float]:
    """(AM, GM): the arithmetic and the geometric mean of the scores of an image's questions."""
    return fmean(scores), 0.0 if 0 in scores else math.exp(fmean(map(math.log, scores)))


def questions(metadata: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(skill, question, answer) of a line of GenEval 2. Raises an error for other metadata."""
    skills, count = metadata["skills"], metadata["atom_count"]
    if not skills or not SKILLS.issuperset(skills) or type(count) is not int:
        raise ValueError(f"want `skills` of {sorted(SKILLS)} and a number as `atom_count`")
    pairs = zip(skills, metadata["vqa_list"], strict=True)
    return [(skill, text, answer) for skill, (text, answer) in pairs if spellings(text, answer)]


class Local:
    """A vision-language model of transformers, asked one question at a time, as officially, so
    that an answer depends on nothing else."""

    def __init__(self, model: str, *place: Any) -> None:
        require("torchvision", "a local judge of reward geneval2 needs")
        folder, at = located(model)
        self.processor: Any = AutoProcessor.from_pretrained(folder, **at)
        kind = AutoModelForImageTextToText
        self.network: Any = load_complete(kind, folder, dtype="auto", **at)
        self.placement = Placement(self.network, *place)
        self.first = first_tokens(self.processor.tokenizer)
        commit = getattr(self.network.config, "_commit_hash", None)
        self.settings = {"engine": "transformers, full softmax", "model": model, "revision": commit}

    def decide(self, images: Tensor, questions: Sequence[tuple[int, str]]) -> list[str]:
        """ "yes" or "no": the likelier one to begin the answer, in any of its spellings."""
        yes, no = ([self.first[text] for text in texts] for texts in (YES, NO))
        answers = self.ask(images, questions)
        return ["yes" if p[yes].sum() > p[no].sum() else "no" for p in answers]

    @torch.no_grad()
    def ask(self, images: Tensor, questions: Sequence[tuple[int, str]]) -> Iterator[Tensor]:
        """The probability of every token to be the first of each answer: [V], on the CPU.
        questions: row of images [B,3,H,W], question."""
        form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        more = {"max_new_tokens": 1, "do_sample": False}
        more |= {"output_logits": True, "return_dict_in_generate": True}
        with self.placement:
            for row, text in questions:
                image = {"type": "image", "image": Image.fromarray(to_uint8(images[row]))}
                chat = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
                inputs = self.processor.apply_chat_template(chat, return_tensors="pt", **form)
                answer = self.network.generate(**inputs.to(self.placement.device), **more)
                yield answer.logits[0][0].float().softmax(-1).cpu()


class AskedReward(RewardBase):
    """A vision-language model answers the questions in a prompt's metadata.

    prompt_set: the set that `flowalign data fetch` writes. questions: reads one of its lines, or
    raises an error.
    """

    choice = ("model", JUDGE)
    choices: Mapping[str, str] = {JUDGE: "Apache-2.0"}
    downloads = {JUDGE: 17.5}
    reads = {"model": (JUDGE, hub_files)}
    prompt_set: str
    questions: Callable[[Mapping[str, Any]], Any]

    def counts(
        self, metadata: Mapping[str, Any], parts: Mapping[str, float]
    ) -> Mapping[str, float]:
        return question_counts(metadata, parts)

    @classmethod
    def check_prompts(cls, prompts: Sequence[str], metadata: Metadata, **options: Any) -> None:
        """Raise ValueError for the first prompt whose metadata is not of the judge's form."""
        for prompt, meta in zip(prompts, metadata, strict=True):
            try:
                cls.questions(meta)
            except Exception as error:  # whatever JSON can cause
                text = f"prompt {shown(repr(prompt))}: {error!r:.300}; want a line of the file that"
                raise ValueError(
                    f"{text} `flowalign data fetch {cls.prompt_set}` writes."
                ) from None


class GenEval2(AskedReward):
    """Soft-TIFA of an image whose metadata is a line of GenEval 2. Options:
    docs/rewards/geneval2.md.

    value: the GM. parts: "gm" again, "am", the mean score of each skill, and the GM under the
    number of atoms.
    """

    name = prompt_set = "geneval2"
    licence = "its prompts: CC BY-NC 4.0"
    headline = "gm"
    questions = staticmethod(questions)

    def __init__(
        self,
        model: Pretrained = JUDGE,
        *,
        device: Device = None,
        offload: bool = False,
    ) -> None:
        self.judge = Local(model, device, offload)
        self.settings = self.judge.settings

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        all_questions = [
            (row, *question) for row, meta in enumerate(metadata) for question in questions(meta)
        ]
        texts = [(row, f"{question} Answer in one word.") for row, _, question, _ in all_questions]
        answers: list[list[tuple[str, float]]] = [[] for _ in metadata]  # (skill, score)
        for (row, skill, *pair), table in zip(
            all_questions, self.judge.ask(images, texts), strict=True
        ):
            answers[row].append((skill, question_score(table, self.judge.first, *pair)))
        rows = []
        for meta, pairs in zip(metadata, answers, strict=True):
            am, gm = soft_tifa([score for _, score in pairs])
            skills = {skill: fmean(s for name, s in pairs if name == skill) for skill, _ in pairs}
            atoms = f"atoms_{meta['atom_count']:02}"
            rows.append({"value": gm, "am": am, "gm": gm, atoms: gm} | skills)
        return Scores.of_rows(rows, {})
