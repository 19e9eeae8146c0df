"""The OCR rules agree with the peers' answers; engines get BGR, and read small signs."""

import json
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowalign.rewards import build, check, ocr_engines
from flowalign.rewards.ocr import OCR, strict_reward, target_of, text_reward, to_uint8
from flowalign.rewards.ocr_engines import PaddleOCREngine, RapidOCREngine

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ocr_reward.json").read_text())
SCORED = [case for case in GOLDEN["cases"] if "reward" in case["image"]]
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
TINY = {"upscale": 2, "limit_side_len": 128, "limit_type": "max", "rec_width": 128}


class FakeEngine:
    """Says one word for every image; a black image breaks it."""

    name = "fake"

    def __init__(self, text):
        self.text = text

    def read(self, image):
        if image.max() == 0:
            raise RuntimeError("engine died")
        return [(self.text, 0.9)] if self.text else []


@pytest.mark.parametrize("case", SCORED, ids=lambda case: f"{case['id']}-{case['kind']}")
def test_published_rule_is_the_peers(case):
    lone_quote = case["kind"] == "one_quote_only"  # we refuse to guess where its target ends
    target = case["prompt"].split('"')[1] if lone_quote else target_of(case["prompt"])
    assert text_reward(target, case["lines"]) == pytest.approx(case["image"]["reward"], abs=1e-12)


@pytest.mark.parametrize("prompt", ["no quotes", 'a 5" screen', 'a sign ""', 'a sign "  "'])
def test_prompts_without_a_target_are_refused(prompt):
    with pytest.raises(ValueError, match="quotes"):
        target_of(prompt)


@pytest.mark.parametrize("rule", [text_reward, strict_reward])
def test_blank_targets_are_refused(rule):
    with pytest.raises(ValueError, match="blank"):
        rule(" ", [("a", 0.9)])


def test_strict_rule_does_not_pay_for_surplus_text():
    lines = [("OPEN", 0.9), ("DAILY", 0.9)]
    assert text_reward("Open", lines) == 1
    assert strict_reward("Open", lines) == pytest.approx(4 / 9)
    assert strict_reward("Open", [("o pen", 0.9), ("DAILY", 0.0)]) == 1
    assert strict_reward("Open", None) == 0


def test_a_failed_engine_and_a_missing_target_are_invalid_but_no_text_is_zero():
    images = torch.ones(3, 3, 8, 8)
    images[1] = 0
    prompts, metadata = ['a sign "Hi"', 'a sign "Hi"', "nothing"], [{}, {}, {}]
    scores = OCR(FakeEngine("hi"))(images, prompts, metadata)
    assert scores.valid.tolist() == [True, False, False]
    assert scores.value[0] == 1 and scores.value[1:].isnan().all()
    assert "engine died" in scores.reasons[1] and "quotes" in scores.reasons[2]
    nothing = OCR(FakeEngine(""))(images[:1], prompts[:1], metadata[:1])
    assert nothing.valid.tolist() == [True] and nothing.value.tolist() == [0]


def test_metadata_target_wins_and_exact_is_reported():
    images = torch.ones(2, 3, 8, 8)
    reward = OCR(FakeEngine("bus stop"))
    scores = reward(images, ['"Taxi"', '"Taxi"'], [{"target": "Bus"}, {"target": "Bus Stop"}])
    assert scores.value.tolist() == [1, 1]
    assert scores.parts["exact"].tolist() == [0, 1]


def test_pixels_with_nan_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(torch.full((3, 2, 2), float("nan")))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "rapid"}, "rapidocr"),
        ({"rule": "lenient"}, "published"),
        ({"upscal": 2}, "upscale"),
    ],
)
def test_wrong_options_are_refused_without_an_engine(options, said, monkeypatch):
    monkeypatch.setattr(ocr_engines, "_import", None)
    with pytest.raises(ValueError, match=said):
        check("ocr", options)
    check("ocr", {"engine": "paddleocr", "device": "cpu", "rule": "strict"})


def test_paddle_gets_bgr_and_its_3x_arguments(monkeypatch):
    asked = {}

    class FakePaddle:
        def __init__(self, **options):
            asked.update(options)

        def predict(self, image):
            asked["pixel"] = image[0, 0].tolist()
            return [{"rec_texts": ["Hi"], "rec_scores": [0.75]}]

    monkeypatch.setitem(sys.modules, "paddleocr", SimpleNamespace(PaddleOCR=FakePaddle))
    monkeypatch.setattr(ocr_engines, "version", lambda package: "3.7.0")
    engine = PaddleOCREngine(device="cpu")
    assert engine.read(np.full((4, 4, 3), [1, 2, 3], np.uint8)) == [("Hi", 0.75)]
    assert asked["pixel"] == [3, 2, 1]
    assert asked["use_textline_orientation"] is False and asked["text_rec_score_thresh"] == 0.5
    assert engine.name == "paddleocr 3.7.0 PP-OCRv4 en"


def test_a_missing_engine_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    with pytest.raises(ImportError, match=r"flowalign\[paddle\]"):
        PaddleOCREngine()


def test_rapidocr_gets_bgr_enlarged():
    engine = RapidOCREngine(upscale=2)
    asked = []

    def fake(image):
        asked.append(image)
        return SimpleNamespace(txts=None, scores=None)

    engine._ocr = fake
    assert engine.read(np.full((4, 6, 3), [1, 2, 3], np.uint8)) == []
    assert asked[0].shape == (8, 12, 3) and asked[0][0, 0].tolist() == [3, 2, 1]


def _sign(rng, word):
    """A 64x64 picture [3,64,64]: a board of 56x24 somewhere, with white capitals 14-20 px high."""
    image = Image.new("RGB", (64, 64), (rng.randint(200, 230),) * 3)
    draw, size = ImageDraw.Draw(image), rng.randint(14, 20)
    while draw.textlength(word, font=ImageFont.truetype(FONT, size)) > 54:
        size -= 1
    x, y = rng.randint(1, 7), rng.randint(1, 38)
    draw.rectangle([x, y, x + 55, y + 23], fill=rng.choice([(200, 30, 30), (30, 60, 190)]))
    font = ImageFont.truetype(FONT, size)
    draw.text((x + 28, y + 12), word, font=font, fill="white", anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_rapidocr_reads_small_signs():
    rng, words = random.Random(1), "CAT EXIT TAXI NO GO SALE HOT ICE JAZZ QUIZ WOW IN".split()
    images = torch.stack([_sign(rng, word) for word in words] + [torch.full((3, 64, 64), 0.8)])
    reward = build("ocr", **TINY)
    prompts = [f'a sign that says "{word}"' for word in [*words, "UP"]]
    scores = reward(images, prompts, [{}] * len(prompts))
    assert bool(scores.valid.all())
    assert scores.parts["exact"][:-1].mean() >= 0.9
    assert scores.value[-1] == 0
    assert isinstance(reward, OCR) and reward.engine.name.startswith("rapidocr 3")
    together = build("ocr", workers=2, **TINY)(images, prompts, [{}] * len(prompts))
    assert torch.equal(together.value, scores.value)


class Meeting:
    """An engine that answers only while another one reads as well."""

    name = "meeting"
    both = threading.Barrier(2, timeout=20)

    def read(self, image: np.ndarray) -> list[tuple[str, float]]:
        self.both.wait()
        return [(f"w{int(image[0, 0, 0])}", 1.0)]


def test_workers_read_at_once_and_each_image_keeps_its_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ocr_engines.ENGINES, "meeting", Meeting)
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 4, 4) / 255
    scores = OCR("meeting", workers=2)(images, [f'"w{i}"' for i in range(6)], [{}] * 6)
    assert scores.value.tolist() == [1.0] * 6
    with pytest.raises(ValueError, match="`workers` of reward ocr is 0; use 1 or more"):
        check("ocr", {"workers": 0})
