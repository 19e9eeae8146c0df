"""`flowalign data reword` rephrases prompts with a language model.

A model may have learnt a task only in the words of its training prompts. The new words are one more
entry in each row's `wordings`; `prompts: FILE#NAME` evaluates or trains on them. Metadata stay.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from flowalign.rewards.options import read_token
from flowalign.rewards.vlm import complete
from flowalign.system.http import Client
from flowalign.training.data import load_prompts, wordings_of

ASK = (
    "Say the following prompt for a text-to-image model in other words. Keep every object, number, "
    "colour and position, and every text in double quotes as it is. Answer with the new prompt "
    "alone.\n\n{prompt}"
)
MAX_TOKENS = 512
QUOTED = re.compile(r'"[^"]*"')


def reworded(text: str, answer: str) -> str:
    """The new prompt in an answer, on one line. Raises ValueError where it is empty or lacks a
    quoted text of the old one, which an image is judged by."""
    new = " ".join(answer.split())
    if lost := [quote for quote in QUOTED.findall(text) if quote not in new]:
        raise ValueError(f"it lacks {', '.join(lost)}")
    if not new:
        raise ValueError("it is empty")
    return new


def reword(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows to write. Prompts that could not be rephrased are left out, and counted. Raises
    ValueError if none could, or if `{prompt}` is missing in --ask."""
    ask = args.ask or ASK
    if "{prompt}" not in ask:
        raise ValueError("--ask: it holds no {prompt}.")
    batch = load_prompts(args.file, "")
    url = f"{args.url.rstrip('/')}/chat/completions"

    def say(text: str) -> str:
        question = ask.replace("{prompt}", text)
        return complete(client, url, args.model, question, MAX_TOKENS, lambda a: reworded(text, a))

    token = read_token(args.token_env) if args.token_env else None
    with Client(timeout=120.0, token=token) as client:
        answers = client.map(say, batch.prompts, args.concurrency)
    rows = []
    for text, row, new in zip(batch.prompts, batch.metadata, answers, strict=True):
        if isinstance(new, str):
            rows.append({"prompt": text, **row, "wordings": wordings_of(row) | {args.name: new}})
    if lost := [new for new in answers if isinstance(new, Exception)]:
        print(f"{len(lost)} of {len(answers)} left out, as {lost[0]}", file=sys.stderr)
    if not rows:
        raise ValueError(f"no prompt could be said in other words: {lost[0]}")
    return rows
