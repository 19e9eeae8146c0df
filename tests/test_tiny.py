"""The tiny world: what is drawn is judged right, what is broken wrong; splits do not overlap."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import mistakes
import numpy as np
import prompts
import pytest
import stream
import torch

from flowalign.backbone.tiny import PROMPTS, scenes
from flowalign.backbone.tiny.detector import TinyDetector
from flowalign.eval.geneval import judge
from flowalign.rewards import build

DETECTOR = TinyDetector()
ENGINE = {"engine": "rapidocr", "limit_side_len": 64, "limit_type": "max", "rec_width": 96}


def correct(image: np.ndarray, *metadata: Mapping[str, Any]) -> bool:
    """Whether an image fulfils any of these."""
    seen = DETECTOR.detect(image)
    return any(judge(row, seen.boxes, seen.colors).correct for row in metadata)


def drawn(tags: list[str], count: int, seed: int) -> list[tuple[dict[str, Any], np.ndarray]]:
    """`count` scenes of random prompts, the tags in turn."""
    rng = np.random.default_rng(seed)
    pools = {tag: prompts.geneval_prompts(tag) for tag in tags}
    picked = [pools[tags[i % len(tags)]] for i in range(count)]
    rows = [pool[rng.integers(len(pool))] for pool in picked]
    return [(row, scenes.render(row, rng)) for row in rows]


def test_what_is_drawn_is_judged_correct():
    found = [correct(image, row) for row, image in drawn(list(prompts.TAGS), 200, seed=0)]
    assert sum(found) >= 198


def blurred(image: np.ndarray) -> np.ndarray:
    return cv2.GaussianBlur(image, (0, 0), 7)


def striped(image: np.ndarray) -> np.ndarray:
    """Every second pair of rows gets the background's colour."""
    image = image.copy()
    image[(np.arange(len(image)) // 2) % 2 == 0] = image[0, 0]
    return image


@pytest.mark.parametrize("breaking", [blurred, striped])
def test_shapes_that_are_no_shapes_any_more_are_rejected(
    breaking: Callable[[np.ndarray], np.ndarray],
):
    found = [
        correct(breaking(image), row)
        for row, image in drawn(list(prompts.TAGS), 80, seed=1)
        if {clause["class"] for clause in row["include"]} != {"circle"}  # blurred, it stays round
    ]
    assert len(found) >= 60 and sum(found) <= len(found) * 0.05


def test_a_missing_or_a_surplus_shape_is_noticed():
    rng = np.random.default_rng(2)
    for row, _ in drawn(["counting", "two_object"], 60, seed=2):
        items = scenes.compose(row, rng)
        assert not correct(scenes.draw_shapes(items[:-1], rng), row)
    for row, image in drawn(["counting"], 30, seed=3):
        (clause,) = row["include"]
        if clause["count"] < 4:
            more = {"include": [{**clause, "count": clause["count"] + 1}]}
            assert not correct(image, more)


def test_a_wrong_colour_shape_or_place_is_noticed():
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for row, image in drawn(["colors", "color_attr"], 60, seed=4):
        first, *rest = row["include"]
        others = [{**first, "color": name} for name in scenes.COLORS if name != first["color"]]
        assert not correct(image, *({"include": [other, *rest]} for other in others))
    for row, image in drawn(["single_object"], 30, seed=5):
        others = [shape for shape in scenes.SHAPES if shape != row["include"][0]["class"]]
        assert not correct(image, *({"include": [{"class": x, "count": 1}]} for x in others))
    for row, image in drawn(["position"], 30, seed=6):
        reference, placed = row["include"]
        placed = {**placed, "position": [opposite[placed["position"][0]], 0]}
        assert not correct(image, {"include": [reference, placed]})


def test_no_held_out_combination_or_word_is_trained_on():
    trained, held = set(), set()
    for tag in (*prompts.TAGS, *prompts.SIMPLE):
        splits = prompts.geneval_splits(tag)
        assert sum(map(len, splits.values())) == len(prompts.geneval_prompts(tag))
        trained |= {prompts.facts(row) for row in splits["train"]}
        held |= {prompts.facts(row) for split in ("val", "test") for row in splits[split]}
        assert not {prompts.facts(row) for row in splits["val"]} & {
            prompts.facts(row) for row in splits["test"]
        }
    assert not trained & held
    held_out = set(prompts.TEST_WORDS) | set(prompts.VALIDATION_WORDS)
    assert not set(prompts.TEST_WORDS) & set(prompts.VALIDATION_WORDS)
    rng = np.random.default_rng(0)
    assert not held_out & {prompts.random_word(rng) for _ in range(20_000)}
    assert set("".join(held_out)) <= set(prompts.LETTERS)


@pytest.mark.parametrize("wrong", [False, True])
def test_pretraining_draws_nothing_that_is_held_out(wrong: bool):
    asked = {
        prompts.preference_prompt(row)["prompt"].removeprefix("one ")
        for tag in prompts.TAGS
        for split in ("val", "test")
        for row in prompts.geneval_splits(tag)[split]
    }
    source = stream.draws(5, wrong=wrong)
    for _ in range(300):
        text = next(source)[1]
        assert text.removeprefix("a photo of ") not in asked
        assert text.split('"')[1:2] != [] or "sign" not in text
        assert not set(text.split('"')[1:2]) & prompts.HELD_OUT


@pytest.mark.slow
def test_a_wrong_caption_is_wrong_and_a_bias_is_the_majority():
    rng = np.random.default_rng(6)
    for tag in prompts.TAGS:
        rows = prompts.geneval_splits(tag)["train"]
        biased = [row for row in rows if mistakes.bias(row) != row]
        fair = [row for row in rows if mistakes.bias(row) == row]
        rate = {
            name: np.mean(
                [
                    correct(scenes.draw_shapes(scenes.compose(seen, rng), rng), row)
                    for row in rng.choice(np.array(pool, dtype=object), 80)
                    for seen in [mistakes.mistaken(row, rng)]
                ]
            )
            for name, pool in {"biased": biased, "fair": fair}.items()
        }
        assert rate["biased"] < 0.5 < 0.8 < rate["fair"] < 0.97


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("task", ["geneval", "ocr", "preference"])
def test_a_task_has_400_distinct_prompts(task: str, split: str):
    assert len({row["prompt"] for row in shipped(f"{task}_{split}")}) == 400


def shipped(name: str) -> list[dict[str, Any]]:
    text = (PROMPTS / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("split", prompts.SIZES)
def test_the_shipped_prompts_are_those_that_the_module_writes(split: str):
    for task, rows in prompts.files(split).items():
        assert shipped(f"{task}_{split}") == rows and len(rows) == prompts.SIZES[split]


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_first_held_out_prompts_hold_the_tags_in_equal_shares(split: str):
    tags = [row["tag"] for row in shipped(f"geneval_{split}")]
    for count in (8, 40, 96):
        assert Counter(tags[:count]) == dict.fromkeys(prompts.TAGS, count // 4)


@pytest.mark.slow
def test_signs_are_read():
    rng = np.random.default_rng(8)
    rows = shipped("ocr_test")[:40]
    images = np.stack([scenes.render(row, rng) for row in rows])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    scores = build("ocr", **ENGINE)(pixels, [row["prompt"] for row in rows], rows)
    assert scores.valid.all() and scores.parts["exact"].sum() >= 38
