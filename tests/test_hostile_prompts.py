"""Prompt files that a stranger made: they are read, or refused with PromptError, in time."""

import json
import os
import time
from pathlib import Path

import pytest
from generated import examples, holds, json_values, nothing_else, texts
from hypothesis import strategies as st

from flowalign.training.data import PromptError, load_prompts, subset

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


SIGNS = ["\n", "\r\n", '"', ",", "prompt", "text,q", "item_id", "{", "}", "[", ":"]
pieces = texts | st.sampled_from(SIGNS)
rows = st.fixed_dictionaries(
    {"prompt": texts | json_values}, optional={"target": json_values, "tag": texts}
)
lines = st.lists(pieces, max_size=9).map("".join) | (rows | json_values).map(json.dumps)
written = st.lists(lines, max_size=5).map(lambda found: "\n".join(found).encode(errors="replace"))
written |= st.binary(max_size=60)


@pytest.mark.slow
@examples(1200)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt"])
def test_a_file_is_read_or_refused(count: int, suffix: str, tmp_path: Path):
    path = tmp_path / f"prompts{suffix}"
    path.touch()

    def read_or_refused(content: bytes) -> None:
        path.write_bytes(content)
        try:
            batch = load_prompts(path, "task")
        except PromptError as error:
            str(error).encode()
            return
        assert all(prompt.strip() for prompt in batch.prompts)
        json.dumps(batch.metadata, allow_nan=False).encode()
        assert len(subset(batch, 2)) == min(2, len(batch))

    holds(read_or_refused, count // 3, content=written)
