"""`flowalign data reword`: prompts in other words, by a language model, with their metadata."""

import json
from pathlib import Path

import pytest
from test_vlm import serve as serve  # a fixture

from flowalign.commands.cli import main
from flowalign.training.data import load_prompts

ROWS = [
    {"prompt": "a photo of two dogs", "tag": "counting", "wordings": {"plain": "two dogs"}},
    {"prompt": 'a sign that says "KITE"', "target": "KITE"},
    {"prompt": "a photo of a cow", "tag": "single_object"},
]
ANSWERS = {"dogs": "Two dogs,\n in a photograph.", "KITE": '"KITE" on a board', "cow": ""}


def test_new_words_stand_beside_the_old_and_rows_without_them_are_left_out(
    tmp_path: Path, serve, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))

    def answer(request) -> str:
        said = request["messages"][0]["content"]
        return next(text for word, text in ANSWERS.items() if word in said)

    judge = serve(answer)
    words = ["data", "reword", str(file), "--url", judge.url, "--model", "m", "--name", "new"]
    assert main([*words, "--out", str(out)]) == 0
    assert "1 of 3 left out" in capsys.readouterr().err
    new = load_prompts(f"{out}#new", "t")
    assert new.prompts == ["Two dogs, in a photograph.", '"KITE" on a board']
    assert [row.get("tag") for row in new.metadata] == ["counting", None]
    assert new.metadata[0]["wordings"]["plain"] == "two dogs"


@pytest.mark.parametrize(
    ("answer", "more", "key"),
    [("a board", [], "KITE"), ("fine", ["--ask", "say it"], "--ask")],
)
def test_what_loses_the_quoted_text_or_the_prompt_is_refused(
    tmp_path: Path, serve, answer: str, more: list[str], key: str, capsys
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(json.dumps(ROWS[1]))
    url = serve(lambda request: answer).url
    words = ["data", "reword", str(file), "--url", url, "--model", "m", "--out", str(out), *more]
    assert main(words) == 2
    assert key in capsys.readouterr().err and not out.exists()
