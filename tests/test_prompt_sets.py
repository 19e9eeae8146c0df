"""Generated prompts are what the official ones are, but for being others; a check finds faults."""

import hashlib
import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

from flowalign.commands.cli import main
from flowalign.commands.prompts import geneval, held_out, ocr
from flowalign.commands.prompts.held_out import digest
from flowalign.rewards import check_prompts
from flowalign.rewards.geneval import GenEval
from flowalign.rewards.geneval_judge import COLORS, NAMES, judge
from flowalign.rewards.ocr import target_of
from flowalign.training.data import load_prompts

SETS = [parent / "shared" / "data" for parent in Path(__file__).resolve().parents]
CENTER = {"left of": (1, 2), "right of": (3, 2), "above": (2, 1), "below": (2, 3)}
NUMBERS = {"two": 2, "three": 3, "four": 4}


def official(name: str) -> Path:
    paths = [folder / name for folder in SETS if (folder / name).is_file()]
    if not paths:
        pytest.skip(f"no ../shared/data/{name} to compare with")
    return paths[0]


def one_way_round(prompt: str) -> str:
    """The same text for a prompt of two objects and for it told the other way round."""
    if " and " in prompt:
        return " and ".join(sorted(prompt.removeprefix("a photo of ").split(" and ")))
    for here, there in (("right of", "left of"), ("below", "above")):
        if f" {here} " in prompt:
            first, second = prompt.removeprefix("a photo of ").split(f" {here} ")
            return f"{second} {there} {first}"
    return prompt.removeprefix("a photo of ")


def picture(prompt: str) -> tuple[dict[str, list[list[float]]], dict[str, list[str]]]:
    """Detections and colours of an image that shows just what the words of a prompt say."""
    boxes: dict[str, list[list[float]]] = {}
    colors: dict[str, list[str]] = {}
    words = prompt.removeprefix("a photo of ")
    relation = next((r for r in CENTER if f" {r} " in words), None)
    parts = words.split(f" {relation or 'and'} ")
    for place, part in enumerate(parts):
        first, rest = part.split(" ", 1)
        color = next((c for c in COLORS if rest.startswith(f"{c} ")), None)
        name = rest.removeprefix(f"{color} ") if color else rest
        count = NUMBERS.get(first, 1)
        if count > 1:
            name = name[:-1] if name[:-1] in NAMES else name.removesuffix("es")
        else:
            assert first == ("an" if rest[0] in "aeiou" else "a")
        assert name in NAMES
        x, y = (2, 2) if place or relation is None else CENTER[relation]
        boxes[name] = [
            [100 * x + 200 * i, 100 * y, 100 * x + 200 * i + 40, 100 * y + 40, 0.95]
            for i in range(count)
        ]
        colors[name] = [color or "white"] * count
    return boxes, colors


def test_a_picture_of_the_words_fulfils_the_metadata_and_others_do_not() -> None:
    rows = geneval.generate(1700, seed=3)
    pictures = [picture(row["prompt"]) for row in rows]
    assert [judge(r, *p).reason for r, p in zip(rows, pictures, strict=True)] == [""] * len(rows)
    GenEval.check_prompts([row["prompt"] for row in rows], rows)
    for row, (boxes, colors) in zip(rows, pictures, strict=True):
        assert not judge(row, {}, {}).correct
        if row["tag"] == "counting":  # one more, one less
            ((name, places),) = boxes.items()
            assert not judge(row, {name: [*places, [0, 0, 9, 9, 0.99]]}, colors).correct
            assert not judge(row, {name: places[1:]}, colors).correct
        elif row["tag"] == "position":  # seen in a mirror
            mirrored = {n: [[-b[2], -b[3], -b[0], -b[1], b[4]] for b in boxes[n]] for n in boxes}
            assert not judge(row, mirrored, colors).correct
        elif "color" in row["include"][0]:
            assert not judge(row, boxes, {name: ["gray"] for name in boxes}).correct


def test_every_17_rows_hold_the_mix_and_prompts_repeat_only_when_all_of_a_tag_are_used() -> None:
    rows = geneval.generate(17 * 200, seed=0)
    for start in range(0, len(rows), 17):
        assert Counter(row["tag"] for row in rows[start : start + 17]) == geneval.MIX
    counts = {tag: Counter(r["prompt"] for r in rows if r["tag"] == tag) for tag in geneval.MIX}
    assert set(counts["counting"].values()) == {6, 7} and len(counts["counting"]) == 160
    assert all(set(counts[tag].values()) == {1} for tag in geneval.MIX if tag != "counting")
    assert geneval.generate(100, seed=0) == rows[:100] != geneval.generate(100, seed=1)


@pytest.mark.parametrize("tag", ["position", "color_attr", "two_object"])
def test_a_test_prompt_is_kept_out_either_way_round(tag: str) -> None:
    before = geneval.generate(340, seed=0, held_out=())
    row = next(row for row in before if row["tag"] == tag)
    relation = r" (and|left of|right of|above|below) "
    first, word, second = re.split(relation, row["prompt"].removeprefix("a photo of "))
    words = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    test = f"A photo of {second}  {words.get(word, word)} {first}"
    after = geneval.generate(340, seed=0, held_out={digest(test)})
    others = [r["prompt"] for r in before if r["tag"] == tag and r != row]
    assert [r["prompt"] for r in after if r["tag"] == tag][: len(others)] == others
    assert row not in after


@pytest.mark.slow
def test_the_official_prompts_could_all_be_made_and_none_is() -> None:
    lines = official("geneval_evaluation_metadata.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert held_out.GENEVAL == {digest(row["prompt"]) for row in rows} and len(rows) == 553
    GenEval.check_prompts([row["prompt"] for row in rows], rows)
    wanted = {r["prompt"]: r for r in rows if r["tag"] != "single_object"}  # not in the mix
    for tag in geneval.TAGS.values():
        for number in range(prod(tag.sizes)):
            made = tag.row(number)
            if (there := wanted.pop(made["prompt"], None)) is not None:
                assert there == made and list(there) == list(made)
    assert wanted == {}
    test = {one_way_round(row["prompt"]) for row in rows}
    ours = [one_way_round(row["prompt"]) for row in geneval.generate(8500, seed=5)]
    assert test.isdisjoint(ours)


def test_an_ocr_prompt_has_one_pair_of_quotes_around_its_text() -> None:
    prompts = ocr.generate(2000, seed=1)
    assert len(set(prompts)) == 2000
    assert ocr.generate(300, seed=1) == prompts[:300] != ocr.generate(300, seed=2)
    for prompt in prompts:
        assert re.fullmatch(r'[A-Z][A-Za-z0-9 ,.-]*"[A-Za-z0-9 ]+"[a-z0-9A-Z ,.-]+\.', prompt)
        assert (text := target_of(prompt)) == text.strip() and "  " not in text


def test_generated_sets_stay_what_they_were_to_the_byte() -> None:
    """A set that somebody has trained on can be made again."""
    for prompts, expected in (
        (ocr.generate(200, seed=0), "3318604a59900950"),
        (ocr.validation(seed=0), "62319e5163fa74bc"),
        ([json.dumps(row) for row in geneval.generate(200, seed=0)], "c64e5dea57da5f5a"),
        ([json.dumps(row) for row in geneval.validation(seed=0)], "9f6e87a909d40d29"),
    ):
        text = "".join(f"{prompt}\n" for prompt in prompts)
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected, prompts[0]


def test_the_public_test_set_has_these_lengths_and_is_kept_out() -> None:
    targets = [target_of(p) for p in load_prompts(official("ocr_test.txt"), "ocr").prompts]
    assert Counter(map(len, targets)) == ocr.LENGTHS
    assert held_out.OCR == set(map(digest, targets))
    plain = {re.sub(r"\s", "", text).lower() for text in targets}
    ours = [re.sub(r"\s", "", target_of(prompt)).lower() for prompt in ocr.generate(3000, seed=0)]
    assert plain.isdisjoint(ours)


def test_held_out_texts_do_not_come_in_any_case() -> None:
    before = [target_of(prompt) for prompt in ocr.generate(200, seed=0)]
    without = {digest(text.upper()) for text in before[:50]}
    after = {target_of(prompt) for prompt in ocr.generate(200, seed=0, held_out=without)}
    assert after.isdisjoint(before[:50])


def test_a_colour_or_thing_that_the_judge_never_answers_is_refused() -> None:
    def checked(detector: str | None, **keys: Any) -> None:
        clause = {"class": "bench", "count": 1, **keys}
        options = {"detector": detector} if detector else {}
        check_prompts("geneval", options, ["a"], [{"include": [clause]}])

    checked(None, color="red")
    for word in ("crimson", "grey", "Red"):
        with pytest.raises(ValueError, match=f"'{word}'.*purple"):
            checked("mask2former", color=word)
    with pytest.raises(ValueError, match="white"):
        checked("tiny", **{"class": "dog"}, color="white")


def test_sets_from_the_command_line(tmp_path: Path, capsys) -> None:
    out, words = tmp_path / "data" / "train.jsonl", ["data", "generate", "geneval", "--out"]
    assert main([*words, str(out), "--count", "1020"]) == 0
    assert "1020 prompts, " in capsys.readouterr().out
    loaded = load_prompts(out, "geneval")
    aside = {digest(row["prompt"]) for row in geneval.validation(seed=0)}
    rows = geneval.generate(1020, 0, held_out.GENEVAL | aside)
    assert loaded.prompts == [row["prompt"] for row in rows]
    assert loaded.metadata == [{k: row[k] for k in row if k != "prompt"} for row in rows]
    assert main([*words, str(out), "--count", "17"]) == 2
    assert main([*words, str(out), "--count", "0"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["geneval", "ocr"])
def test_a_generated_set_comes_with_validation_prompts_that_neither_train_nor_test_has(
    tmp_path: Path, kind: str
) -> None:
    ending = "jsonl" if kind == "geneval" else "txt"
    out, more = tmp_path / f"{kind}_train.{ending}", ["--count", "2000"]
    assert main(["data", "generate", kind, "--out", str(out), *more]) == 0
    train = load_prompts(out, kind)
    val = load_prompts(tmp_path / f"{kind}_val.{ending}", kind)
    assert len(val) == len(set(val.prompts)) >= 128
    test = held_out.GENEVAL if kind == "geneval" else held_out.OCR
    if kind == "geneval":
        shown = [one_way_round(prompt) for prompt in val.prompts]
        assert set(shown).isdisjoint(map(one_way_round, train.prompts))
        assert test.isdisjoint(map(digest, val.prompts))
        tags = Counter(row["tag"] for row in val.metadata)
        assert tags.keys() == geneval.MIX.keys() and len(set(tags.values())) == 1
    else:
        texts = [set(map(digest, map(target_of, each.prompts))) for each in (val, train)]
        assert texts[0].isdisjoint(texts[1]) and texts[0].isdisjoint(test)
    val_file = tmp_path / f"{kind}_val.{ending}"
    before = val_file.read_bytes()
    assert main(["data", "generate", kind, "--out", str(out), "--count", "3000", "--force"]) == 0
    assert val_file.read_bytes() == before  # of the seed alone
