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

from flowalign.rewards import RewardSpec, build, describe, ocr, score
from flowalign.rewards.ocr import (
    OCR,
    PaddleOCREngine,
    RapidOCREngine,
    target_of,
    text_reward,
)  # fmt: skip

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ocr_reward.json").read_text())
SCORED = [case for case in GOLDEN["cases"] if "reward" in case["image"]]
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
TINY = {"limit_side_len": 128, "rec_width": 128}


class FakeEngine:
    """Says one word for every image; a black image breaks it."""

    name = "fake"

    def __init__(self, text):
        self.text = text

    def read(self, image):
        if image.max() == 0:
            raise RuntimeError("engine died")
        return [(self.text, 0.9)] if self.text else []


def test_published_rule_is_the_peers():
    assert len(SCORED) > 20
    for case in SCORED:
        lone_quote = case["kind"] == "one_quote_only"  # we refuse to guess where its target ends
        target = case["prompt"].split('"')[1] if lone_quote else target_of(case["prompt"])
        expected = pytest.approx(case["image"]["reward"], abs=1e-12)
        assert text_reward(target, case["lines"]) == expected, case


def test_blank_targets_are_refused():
    for prompt in ("no quotes", 'a 5" screen', 'a sign ""', 'a sign "  "'):
        with pytest.raises(ValueError, match="quotes"):
            target_of(prompt)
    with pytest.raises(ValueError, match="' '"):
        text_reward(" ", [("a", 0.9)])
    prompt, fine = 'a sign that says "HI"', ({}, {"target": "OK"})
    for target in (" ", None, 10):
        with pytest.raises(ValueError, match="number 3 of 3: .*`target`"):
            RewardSpec("ocr").check_prompts([prompt] * 3, [*fine, {"target": target}])


def test_a_failed_engine_and_a_missing_target_are_invalid_but_no_text_is_zero():
    images = torch.ones(3, 3, 8, 8)
    images[1] = 0
    prompts, metadata = ['a sign "Hi"', 'a sign "Hi"', "nothing"], [{}, {}, {}]
    scores = score(OCR(FakeEngine("hi")), images, prompts, metadata)
    assert scores.valid.tolist() == [True, False, False]
    assert scores.value[0] == 1 and scores.value[1:].isnan().all()
    assert "engine died" in scores.reasons[1] and "quotes" in scores.reasons[2]
    nothing = OCR(FakeEngine(""))(images[:1], prompts[:1], metadata[:1])
    assert nothing.valid.tolist() == [True] and nothing.value.tolist() == [0]


@pytest.mark.parametrize(
    ("target", "read"),
    [
        ("CAFE\u0301", "CAFÉ"),
        ("CAFÉ", "CAFE\u0301"),
        ("OPEN\u00a0NOW", "OPEN NOW"),
        ("OP\u200bEN\u200f", "OPEN"),
        ("don’t", "don't"),
        ("“Hi” – wait…", '"Hi"- wait...'),
        ("１２３ ＳＡＬＥ", "123 SALE"),
        ("＂ＡＢ＂", '"ab"'),
        ("Room 13⅓", "ROOM 131/3"),  # a prompt of the published test set
    ],
)
def test_what_is_written_in_several_ways_is_compared_in_one(target, read):
    assert text_reward(target, [(read, 0.9)]) == 1
    parts = OCR(FakeEngine(read))(torch.ones(1, 3, 8, 8), ["a"], [{"target": target}]).parts
    assert parts["exact"].tolist() == [1]
    assert text_reward("don't", [("don’t", 0.9)]) == pytest.approx(0.8)  # ASCII: as published


@pytest.mark.parametrize(
    ("target", "letters"),
    [("ОТКРЫТО", "О Т К Р Ы"), ("한국", "한 국"), ("قهوة", "ق ه و ة"), ("ΚΑΦΕΝΕΙΟ", "Κ Α Φ Ε"),
     ("καφές", "έ"), ("שלום", "ש ל ו ם"), ("Đẹp", "ẹ"), ("กาแฟ", "ก า แ ฟ")],
)  # fmt: skip
def test_letters_that_the_engine_never_writes_are_refused_by_the_prompts_number(target, letters):
    prompts = ['a sign "OK"', "a sign"]
    with pytest.raises(ValueError, match=f"number 2 of 2: .*{letters}"):
        RewardSpec("ocr").check_prompts(prompts, [{}, {"target": target}])
    with pytest.raises(ValueError, match="number 2 of 2: "):
        RewardSpec("ocr", {"engine": "paddleocr"}).check_prompts(prompts, [{}, {"target": target}])
    vlm = {"engine": "vlm", "endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    RewardSpec("ocr", vlm).check_prompts(prompts, [{}, {"target": target}])  # which has no list


def test_letters_that_the_engine_writes_are_not_refused():
    targets = ["CAFE\u0301", "Łódź", "Straße", "α+β", "ΔT", "营业中", "１２", "20 €", "“wait…”"]
    RewardSpec("ocr").check_prompts(
        ["a sign"] * len(targets), [{"target": text} for text in targets]
    )


def test_a_call_refuses_letters_that_its_engine_lacks():
    metadata = [{"target": "OK"}, {"target": "ОК"}]  # the second is Cyrillic
    scores = score(build("ocr", **TINY), torch.ones(2, 3, 64, 64), ["a", "b"], metadata)
    assert scores.valid.tolist() == [True, False] and "О К" in scores.reasons[1]


@pytest.mark.parametrize(
    "prompt",
    ['a 12" poster that says "SALE"', 'a 12" by 8" sign', 'signs "Left" and "Right"',
     'a sign "A" of 5"', '\\"OPEN\\"'],
)  # fmt: skip
def test_quotes_that_do_not_say_which_text_is_meant_are_refused(prompt):
    with pytest.raises(ValueError, match="number 1 of 1: .*`target`"):
        RewardSpec("ocr").check_prompts([prompt], [{}])
    RewardSpec("ocr").check_prompts([prompt], [{"target": "SALE"}])


def test_metadata_target_wins_and_exact_is_reported():
    images = torch.ones(2, 3, 8, 8)
    reward = OCR(FakeEngine("bus stop"))
    scores = reward(images, ['"Taxi"', '"Taxi"'], [{"target": "Bus"}, {"target": "Bus Stop"}])
    assert scores.value.tolist() == [1, 1]
    assert scores.parts["exact"].tolist() == [0, 1]


def test_the_value_is_also_given_by_the_length_of_the_target():
    targets = ["a", "a b c", "abcd", "abcde", "abcd efgh", "abcdefghi"]
    images = torch.ones(len(targets), 3, 8, 8)
    scores = score(OCR(FakeEngine("a")), images, [f'"{t}"' for t in targets], [{}] * len(targets))
    found = {name: ~p.isnan() for name, p in scores.parts.items() if name != "exact"}
    assert {name: part.nonzero().flatten().tolist() for name, part in found.items()} == {
        "letters_01_to_04": [0, 1, 2], "letters_05_to_08": [3, 4], "letters_09_to_16": [5]
    }  # fmt: skip
    assert scores.parts["letters_05_to_08"][3] == scores.value[3]


PADDLE_3_7 = """
    use_doc_orientation_classify use_doc_unwarping use_textline_orientation text_rec_score_thresh
    text_det_limit_side_len text_det_limit_type text_det_box_thresh text_det_unclip_ratio
    lang ocr_version device cpu_threads
""".split()  # of what PaddleOCR 3.7.0 takes: its constructor's names, and _common_args.py's


@pytest.fixture
def paddle(monkeypatch):
    """What a stand-in for PaddleOCR 3.7 was asked; it refuses arguments that the real one does."""
    asked = {}

    class FakePaddle:
        def __init__(self, **options):
            assert set(options) <= set(PADDLE_3_7)
            asked.update(options)

        def predict(self, images):
            asked["pixel"] = images[0][0, 0].tolist()
            return [{"rec_texts": ["w1"], "rec_scores": [0.75]}]

    monkeypatch.setitem(sys.modules, "paddleocr", SimpleNamespace(PaddleOCR=FakePaddle))
    monkeypatch.setattr(ocr, "version", lambda package: "3.7.0")
    return asked


def test_paddle_gets_bgr_and_its_3x_arguments(paddle):
    engine = PaddleOCREngine(device="cpu")
    assert engine.read(np.full((4, 4, 3), [1, 2, 3], np.uint8)) == [("w1", 0.75)]
    assert paddle["pixel"] == [3, 2, 1]
    assert paddle["use_textline_orientation"] is False and paddle["text_rec_score_thresh"] == 0.5
    assert (paddle["lang"], paddle["ocr_version"]) == ("en", "PP-OCRv4")
    assert engine.name.startswith("paddleocr 3.7.0 paddle, PP-OCRv4 en, text_rec_score_thresh 0.5,")


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
    assert isinstance(reward, OCR) and reward.engines[0].name.startswith("rapidocr 3")
    said = describe(reward)
    assert (said["name"], said["rule"]) == ("ocr", "published")
    assert "PP-OCRv6 small, text_score 0.5, upscale 1, limit 128 min" in said["engine"]
    together = build("ocr", workers=2, **TINY)(images, prompts, [{}] * len(prompts))
    assert torch.equal(together.value, scores.value)


def test_rapidocr_reads_faint_red_only_in_its_channel_order():
    """Letters 16 of 255 redder than the board are seen, as blue ones they are not."""
    image = Image.new("RGB", (128, 48), (128, 128, 128))
    font = ImageFont.truetype(FONT, 20)
    ImageDraw.Draw(image).text((64, 24), "MARKET", font=font, fill=(144, 128, 128), anchor="mm")
    pixels = np.array(image)
    engine = RapidOCREngine(**{**TINY, "limit_type": "max"})
    assert [text for text, _ in engine.read(pixels)] == ["MARKET"]
    assert engine.read(np.ascontiguousarray(pixels[:, :, ::-1])) == []


class Meeting:
    """An engine that answers only while another one reads as well."""

    name = "meeting"
    both = threading.Barrier(2, timeout=20)

    def read(self, image: np.ndarray) -> list[tuple[str, float]]:
        self.both.wait()
        return [(f"w{int(image[0, 0, 0])}", 1.0)]


def test_workers_read_at_once_and_each_image_keeps_its_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ocr.ENGINES, "meeting", Meeting)
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 4, 4) / 255
    scores = OCR("meeting", workers=2)(images, [f'"w{i}"' for i in range(6)], [{}] * 6)
    assert scores.value.tolist() == [1.0] * 6
