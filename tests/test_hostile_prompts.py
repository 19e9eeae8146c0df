"""Prompt files that a stranger made: they are read, or refused with PromptError, in time."""

import os
import time
from pathlib import Path

import pytest
from generated import nothing_else

from flowalign.training.data import PromptError, load_prompts

FILES = {  # each was a traceback, a hang, or silently something else
    "deep JSON": ("a.jsonl", '{"prompt": "a", "x": ' + "[" * 100_000),
    "not a number": ("a.jsonl", '{"prompt": "a", "x": NaN}'),
    "half a character": ("a.jsonl", '{"prompt": "\\ud800"}'),
    "a header that does not end": ("a.csv", 'prompt,"te\nxt'),
    "a cell that does not end": ("a.csv", 'prompt\n"a'),
    "a very long cell": ("a.csv", "prompt,b\na," + "x" * 200_000),
    "one column twice": ("a.csv", "prompt,prompt\na,b\n"),
    "no header": ("a.csv", ""),
}


@pytest.mark.parametrize("kind", FILES)
def test_no_prompts(kind: str, tmp_path: Path):
    name, text = FILES[kind]
    path = tmp_path / name
    path.write_text(text)
    began = time.process_time()
    with nothing_else(tmp_path), pytest.raises(PromptError) as raised:
        load_prompts(path, "task")
    assert time.process_time() - began < 5
    assert str(path) in str(raised.value) and len(str(raised.value)) < 2000
    str(raised.value).encode()


PATHS = ["~nouser/a.txt", "a\0b.txt", "x" * 300 + ".txt", "a/" * 3000, "/dev/zero", "/dev/stdin"]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_no_prompt_set(path: str):
    with pytest.raises(PromptError):
        load_prompts(path, "task")


def test_a_pipe_is_no_prompt_set(tmp_path: Path):
    """To open one waits for a writer, for ever."""
    os.mkfifo(tmp_path / "a.txt")
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(PromptError):
            load_prompts(path, "task")
