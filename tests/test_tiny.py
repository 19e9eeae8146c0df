"""The tiny world: what is drawn is judged right, what is broken wrong; splits do not overlap."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import mistakes
import numpy as np
import prompts
import pytest
import torch
from mistakes import RIGHT, WRONG, Rates
from torch import Tensor

from flowalign.backbone.tiny import PROMPTS
from flowalign.backbone.tiny.detector import TinyDetector
from flowalign.backbone.tiny.drawings import CLASSES, COLORS, STYLES
from flowalign.backbone.tiny.scenes import LETTERS, rendered
from flowalign.eval.geneval import judge
from flowalign.rewards import build
from flowalign.system.images import to_uint8

DETECTOR = TinyDetector()
ENGINE = {"engine": "rapidocr", "limit_side_len": 96, "limit_type": "max", "rec_width": 96}


def correct(image: Tensor, *metadata: Mapping[str, Any]) -> bool:
    """Whether an image fulfils any of these."""
    (seen,) = DETECTOR(image[None])
    return any(judge(row, seen.boxes, seen.colors).correct for row in metadata)


def drawn(tags: list[str], count: int, seed: int) -> list[tuple[dict[str, Any], Tensor]]:
    """`count` scenes of random prompts, the tags in turn."""
    rng = np.random.default_rng(seed)
    pools = {tag: prompts.every(tag) for tag in tags}
    picked = [pools[tags[i % len(tags)]] for i in range(count)]
    rows = [pool[rng.integers(len(pool))] for pool in picked]
    return list(zip(rows, rendered(rows, seed), strict=True))


@pytest.mark.slow
def test_every_drawing_is_told_in_every_style_and_colour() -> None:
    rows = [
        {"include": [{"class": c, "count": 1} | ({"color": color} if color else {})], "style": s}
        for c in CLASSES for s in STYLES for color in (None, *COLORS)
    ]  # fmt: skip
    for row, image in zip(rows, rendered(rows, 0), strict=True):
        (found,) = DETECTOR.describe(to_uint8(image))
        (clause,) = row["include"]
        assert (found.name, found.style) == (clause["class"], row["style"]) and found.score > 0.9
        assert found.color == clause.get("color", found.color)


@pytest.mark.slow
def test_what_is_drawn_is_judged_correct() -> None:
    found = [correct(image, row) for row, image in drawn(list(prompts.TAGS), 200, seed=0)]
    assert sum(found) >= 198


def blurred(image: Tensor) -> Tensor:
    soft = cv2.GaussianBlur(image.permute(1, 2, 0).numpy(), (0, 0), 7)
    return torch.from_numpy(soft).permute(2, 0, 1)


def halved(image: Tensor) -> Tensor:
    """The lower half of each place of a drawing gets the background's colour."""
    image = image.clone()
    for middle in (24, 48, 72):
        image[:, middle : middle + 20] = image[:, :1, :1].clone()
    return image


@pytest.mark.parametrize("breaking", [blurred, halved])
def test_drawings_that_are_none_any_more_are_rejected(breaking: Callable[[Tensor], Tensor]):
    found = [correct(breaking(image), row) for row, image in drawn(list(prompts.TAGS), 80, seed=1)]
    assert sum(found) <= 4


def test_a_missing_or_a_surplus_drawing_is_noticed() -> None:
    for row, image in drawn(["counting"], 30, seed=3):
        (clause,) = row["include"]
        for count in {clause["count"] - 1, clause["count"] + 1}:
            limit = [{"class": clause["class"], "count": count + 1}]
            other = {"include": [{**clause, "count": count}], "exclude": limit}
            assert not correct(image, other)
    for row, image in drawn(["colors"], 30, seed=2):
        name = "cake" if row["include"][0]["class"] != "cake" else "dog"
        assert not correct(image, {"include": [*row["include"], {"class": name, "count": 1}]})


def test_a_wrong_colour_class_or_place_is_noticed() -> None:
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for row, image in drawn(["colors", "color_attr"], 60, seed=4):
        first, *rest = row["include"]
        others = [{**first, "color": name} for name in COLORS if name != first["color"]]
        assert not correct(image, *({"include": [other, *rest]} for other in others))
    for row, image in drawn(["single_object"], 30, seed=5):
        others = [name for name in CLASSES if name != row["include"][0]["class"]]
        assert not correct(image, *({"include": [{"class": x, "count": 1}]} for x in others))
    for row, image in drawn(["position"], 30, seed=6):
        reference, placed = row["include"]
        placed = {**placed, "position": [opposite[placed["position"][0]], 0]}
        assert not correct(image, {"include": [reference, placed]})


def test_no_held_out_combination_or_word_is_trained_on() -> None:
    asked = {split: set() for split in ("train", "val", "test", "official")}
    for tag in (*prompts.TAGS, *prompts.SIMPLE):
        splits = prompts.splits(tag)
        assert sum(map(len, splits.values())) == len(prompts.every(tag))
        for split, rows in splits.items():
            asked[split] |= {prompts.facts(row) for row in rows}
    assert sum(map(len, asked.values())) == len(set.union(*asked.values()))
    official = {prompts.facts(row) for row in shipped("geneval_official")}
    simple = {prompts.facts(row) for tag in prompts.SIMPLE for row in prompts.every(tag)}
    assert official == asked["official"] | (official & simple)
    assert not set(prompts.TEST_WORDS) & set(prompts.VALIDATION_WORDS)
    rng = np.random.default_rng(0)
    assert not prompts.HELD_OUT & {prompts.random_word(rng) for _ in range(5_000)}
    assert set("".join(prompts.HELD_OUT)) <= set(LETTERS)


@pytest.mark.parametrize("rates", [RIGHT, WRONG], ids=["right", "wrong"])
def test_pretraining_draws_nothing_that_is_held_out(rates: Rates) -> None:
    held_out = {
        row["text"]
        for tag in prompts.TAGS
        for split in ("val", "test", "official")
        for row in prompts.splits(tag)[split]
    }
    rng = np.random.default_rng(5)
    pools = {tag: prompts.splits(tag)["train"] for tag in mistakes.TAG_SHARES}
    for _ in range(2000):
        text, scene, _ = mistakes.captioned(rates, rng, pools)
        for opening in ("a photo of ", "a picture of ", "here is ", "drawing of "):
            text = text.split(opening)[-1]
        assert text not in held_out
        assert scene.get("target") not in prompts.HELD_OUT


def test_a_wrong_caption_is_wrong_and_a_bias_has_half_of_its_scenes() -> None:
    rng, always = np.random.default_rng(6), Rates(bias=1.0)
    for tag in prompts.TAGS:
        rows = prompts.splits(tag)["train"]
        rows = [rows[i] for i in rng.permutation(len(rows))[:400]]
        biased = [row for row in rows if mistakes.mistaken(row, always, rng) != row]
        fair = [row for row in rows if mistakes.mistaken(row, always, rng) == row]
        for pool, low, high in ((biased, 0.3, 0.6), (fair, 0.6, 0.95)):
            kept = [mistakes.mistaken(row, WRONG, rng)["include"] == row["include"] for row in pool]
            assert low < np.mean(kept) < high


def shipped(name: str) -> list[dict[str, Any]]:
    text = (PROMPTS / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("split", prompts.SIZES)
def test_the_shipped_prompts_are_those_that_the_module_writes(split: str) -> None:
    for task, rows in prompts.files(split).items():
        assert shipped(f"{task}_{split}") == rows
        if split != "train":
            assert len({row["prompt"] for row in rows}) == len(rows) == prompts.SIZES[split]


def test_a_test_prompt_has_every_wording_and_its_task_has_one_of_them() -> None:
    for task in ("geneval", "ocr", "preference"):
        for row in shipped(f"{task}_test"):
            assert row["prompt"] == row["wordings"][task]
            assert len(set(row["wordings"].values())) == len(prompts.WORDINGS)
        trained = [row["prompt"] for row in shipped(f"{task}_train")]
        assert not any(text.startswith("here is") for text in trained)


@pytest.mark.slow
def test_signs_are_read() -> None:
    rows = shipped("ocr_test")[:40]
    scores = build("ocr", **ENGINE)(rendered(rows, 8), [row["prompt"] for row in rows], rows)
    assert scores.valid.all() and scores.parts["exact"].sum() >= 38
