"""Several texts in one image: CVTG-2K and LongText-Bench, on recorded answers and end to end."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_vlm import asked, serve  # noqa: F401

from flowalign.eval.scores import image_score
from flowalign.eval.stats import rows_of
from flowalign.rewards import RewardSpec, build, describe, score
from flowalign.rewards.ocr import OCR, OcrLine
from flowalign.training.data import load_prompts
from flowalign.types import EvalImage, EvalRow, Metadata, PromptBatch

GOLDEN = json.loads((Path(__file__).parent / "golden" / "long_text.json").read_text("utf-8"))
CVTG, LONG = GOLDEN["cvtg2k"]["images"], GOLDEN["longtext"]["images"]
BENCH: Any = SimpleNamespace(name="text", headline=None)


class Recorded:
    """Reads the recorded lines; the brightness of an image is its number."""

    name = "recorded"

    def __init__(self, lines: list[list[str]]) -> None:
        self.lines = lines

    def read(self, image: np.ndarray) -> list[OcrLine]:
        return [(text, 0.9) for text in self.lines[int(image[0, 0, 0])]]


def rows(rule: str, lines: list[list[str]], prompts: list[str], metadata: Metadata) -> Any:
    """The scores of the images of an evaluation, and the benchmark's rows."""
    images = torch.arange(float(len(lines)))[:, None, None, None].expand(-1, 3, 4, 4) / 255
    reward = build("ocr", engine=Recorded(lines), rule=rule)
    scores = score(reward, images, prompts, metadata)
    found = []
    for i, prompt in enumerate(prompts):
        numbers = {"value": float(scores.value[i])}
        numbers |= {name: float(part[i]) for name, part in scores.parts.items()}
        found.append(image_score(EvalImage(i, 0, prompt, metadata[i]), numbers, None))
    return found, {row.metric: row for row in rows_of(BENCH, found)}


def cvtg(folder: Path, cases: list[dict[str, Any]]) -> PromptBatch:
    """The cases as CVTG-2K publishes them: a file for each number of regions."""
    (folder / "CVTG").mkdir(parents=True)
    for area in range(2, 6):
        lines = [
            {"index": i, "prompt": c["prompt"], "carrier_list": ["sign"] * area}
            for i, c in enumerate(cases)
            if c["area"] == area
        ]
        (folder / "CVTG" / f"{area}.json").write_text(json.dumps({"data_list": lines}))
    return load_prompts(folder, "cvtg2k")


def means(found: dict[str, EvalRow], *names: str) -> list[float]:
    return [found[name].mean for name in names]


def test_cvtg2k_counts_words_as_the_official_script_does(tmp_path: Path) -> None:
    batch = cvtg(tmp_path / "cvtg2k", CVTG)
    by_prompt = {case["prompt"]: case for case in CVTG}
    cases = [by_prompt[prompt] for prompt in batch.prompts]
    lines = [case["lines"] for case in cases]
    images, found = rows("cvtg2k", lines, batch.prompts, batch.metadata)
    for image, case in zip(images, cases, strict=True):
        assert image.value == pytest.approx(case["correct"] / case["total"], abs=1e-6)
        assert image.parts["ned"] == pytest.approx(sum(case["ned"]) / case["total"], abs=1e-6)
        assert image.weight["value"] == case["total"]
    overall, areas = GOLDEN["cvtg2k"]["overall"], GOLDEN["cvtg2k"]["areas"]
    assert means(found, "reward", "ned") == pytest.approx(
        [overall["word_accuracy"], overall["ned"]], abs=1e-6
    )
    for area, numbers in areas.items():
        assert means(found, f"regions_{area}", f"regions_{area}_ned") == pytest.approx(
            [numbers["word_accuracy"], numbers["ned"]], abs=1e-6
        )
    plain = sum(image.value for image in images) / len(images)
    assert found["reward"].mean != pytest.approx(plain, abs=1e-3)  # words count, not images


@pytest.mark.parametrize(("mode", "rule"), [("en", "longtext"), ("zh", "longtext_zh")])
def test_longtext_counts_words_or_characters_as_officially(mode: str, rule: str) -> None:
    cases = [case for case in LONG if case["mode"] == mode]
    lengths = ["short" if i % 3 else "long" for i in range(len(cases))]
    metadata = [{"text": c["text"], "length": n} for c, n in zip(cases, lengths, strict=True)]
    prompts = [f"prompt {i}" for i in range(len(cases))]
    images, found = rows(rule, [case["lines"] for case in cases], prompts, metadata)
    for image, case in zip(images, cases, strict=True):
        assert image.value == pytest.approx(case["match"] / case["gt"], abs=1e-6)
    assert found["reward"].mean == pytest.approx(GOLDEN["longtext"]["overall"][mode], abs=1e-6)
    short = [case for case, length in zip(cases, lengths, strict=True) if length == "short"]
    expected = sum(case["match"] for case in short) / sum(case["gt"] for case in short)
    assert found["length_short"].mean == pytest.approx(expected, abs=1e-6)


def test_an_unread_image_scores_0_and_a_failed_one_nothing() -> None:
    class Broken(Recorded):
        def read(self, image: np.ndarray) -> list[OcrLine]:
            if image.max() == 1:
                raise RuntimeError("engine died")
            return super().read(image)

    images = torch.tensor([0.0, 1 / 255])[:, None, None, None].expand(2, 3, 4, 4)
    reward = OCR(Broken([[], []]), rule="cvtg2k")
    scores = score(reward, images, ["a"] * 2, [{"target": ["Bus", "Stop"]}] * 2)
    assert scores.value[0] == 0 and scores.parts["ned"][0] == pytest.approx(0, abs=1e-4)
    assert math.isnan(scores.value[1]) and "engine died" in scores.reasons[1]


def test_texts_come_from_the_metadata_or_from_all_double_quotes() -> None:
    prompts = ['a "Bus" and a "Stop"', "no quotes", "no quotes"]
    metadata: Metadata = [{}, {"target": "Bus Stop"}, {"text": ["Bus", "Stop"]}]
    lines = [["stop", "BUS"]] * 3
    for rule in ("longtext", "cvtg2k"):
        images, found = rows(rule, lines, prompts, metadata)
        assert [image.value for image in images] == [1, 1, 1]
    assert (found["regions_1"].n, found["regions_2"].n) == (1, 2)
    assert describe(OCR(Recorded([]), rule="longtext"))["rule"] == "longtext"


@pytest.mark.parametrize(
    ("rule", "metadata", "key"),
    [
        ("cvtg2k", {}, "quotes"),
        ("cvtg2k", {"target": []}, "`target`"),
        ("cvtg2k", {"target": ["a", 1]}, "`target`"),
        ("longtext", {"text": "..."}, "`text`"),
        ("longtext", {"target": ["?!", "..."]}, "`target`"),  # nothing that the rule keeps
        ("longtext_zh", {"text": {"a": 1}}, "`text`"),
        ("published", {"target": ["a", "b"]}, "`target`"),  # that rule is of one text
    ],
)
def test_prompts_without_texts_are_refused(rule: str, metadata: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        RewardSpec("ocr", {"rule": rule}).check_prompts(["a sign"], [metadata])


def test_an_endpoint_reads_as_an_engine(serve) -> None:  # noqa: F811
    judge = serve(lambda request: "Bus\nStop")
    endpoint = {"url": judge.url, "model": "qwen", "retries": 0}
    reward = build("ocr", engine="vlm", rule="longtext", endpoint=endpoint)
    metadata = [{"text": ["bus stop"]}] * 3
    scores = score(reward, torch.rand(3, 3, 24, 40), ["a"] * 3, metadata)
    assert scores.value.tolist() == [1, 1, 1]
    assert asked(judge.requests[0])[1].shape == (24, 40, 3)  # the image as it is
    assert judge.requests[0]["max_tokens"] == 1024 and "qwen" in describe(reward)["engine"]
    judge.reply = lambda request: (500, b"no")
    assert score(reward, torch.rand(1, 3, 8, 8), ["a"], metadata[:1]).valid.tolist() == [False]


def test_a_folder_of_cvtg2k_is_one_set_with_its_texts(tmp_path: Path) -> None:
    batch = cvtg(tmp_path / "cvtg2k", CVTG)
    assert len(batch) == len(CVTG)
    areas = [len(metadata["carrier_list"]) for metadata in batch.metadata]
    assert areas == sorted(areas)
    assert all(isinstance(metadata["target"], list) for metadata in batch.metadata)
    RewardSpec("ocr", {"rule": "cvtg2k"}).check_prompts(batch.prompts, batch.metadata)
    one = load_prompts(tmp_path / "cvtg2k" / "CVTG" / "2.json", "t")
    assert one.prompts == batch.prompts[: len(one)]
