"""A Qwen3-VL of transformers, small and random, as judge.

Its processor needs torchvision. Without one the first test runs this file with that of
scripts/setup.sh.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from PIL import Image
from transformers.utils import is_torchvision_available
from vision_judge import qwen3_vl

from flowalign.commands.evaluate import main as evaluate
from flowalign.rewards import build, score
from flowalign.rewards.geneval2 import spellings

FOLDER = Path(__file__).parent
TORCHVISION = Path(sys.prefix) / "open_clip"
needs_torchvision = pytest.mark.skipif(not is_torchvision_available(), reason="no torchvision")
QUESTIONS = [
    ("count", "How many dogs are in the image?", "two"),
    ("object", "Are there any dogs in the image?", "Yes"),
    ("verb", "Are the dogs chasing the cat?", "Yes"),
]
LINE = {
    "atom_count": 3,
    "vqa_list": [[question, answer] for _, question, answer in QUESTIONS],
    "skills": [skill for skill, _, _ in QUESTIONS],
}


@pytest.mark.long
@pytest.mark.skipif(is_torchvision_available(), reason="the other tests run")
@pytest.mark.skipif(not TORCHVISION.is_dir(), reason="run scripts/setup.sh")
def test_this_file_with_torchvision() -> None:
    found = [str(TORCHVISION), str(FOLDER.parent), str(FOLDER)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "with_torchvision", "-p", "no:cacheprovider",
         "-W", "ignore", __file__],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return qwen3_vl(tmp_path_factory.mktemp("judge") / "qwen3_vl")


def probabilities(reward: Any, picture: Image.Image, text: str) -> torch.Tensor:
    """Of all tokens, by a forward pass of our own."""
    judge = reward.judge
    prompt = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        f"{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = judge.processor(images=[picture], text=[prompt], return_tensors="pt")
    with torch.no_grad():
        return judge.network(**inputs).logits[0, -1].softmax(-1)


@needs_torchvision
def test_a_score_is_the_full_softmax_at_the_first_tokens(model: str) -> None:
    reward = build("geneval2", model=model)
    images = torch.randint(0, 256, (2, 3, 64, 96), generator=torch.Generator().manual_seed(0)) / 255
    scores = score(reward, images, ["a", "b"], [LINE, LINE])
    assert scores.valid.all() and scores.value[0] != scores.value[1]
    encode = reward.judge.processor.tokenizer.encode  # type: ignore[attr-defined]
    for row in range(2):
        picture = Image.fromarray((images[row] * 255).round().byte().permute(1, 2, 0).numpy())
        for skill, question, answer in QUESTIONS:
            softmax = probabilities(reward, picture, f"{question} Answer in one word.")
            expected = sum(float(softmax[encode(text)[0]]) for text in spellings(question, answer))
            assert float(scores.parts[skill][row]) == pytest.approx(expected, rel=1e-4)
    alone = score(reward, images[1:], ["b"], [LINE])
    assert alone.value[0] == scores.value[1]  # whatever else was asked


@needs_torchvision
def test_it_is_a_benchmark(model: str, tmp_path: Path) -> None:
    """From the official form of a file to the tables, which name the judge."""
    mark = {"name": "geneval2", "reward": {"name": "geneval2", "options": {"model": model}}}
    lines = [{"prompt": f"a red star {i}", **LINE} for i in range(2)]
    assert evaluate(["--config", str(fakes.evaluation("tiny", tmp_path, lines, mark))]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    about = results["benchmarks"]["geneval2"]
    assert about["engine"].startswith("transformers") and about["model"] == model
    rows = results["models"]["base"]["images"]["geneval2"]
    assert all(0 < row["gm"] <= row["am"] < 1 and row["gm"] == row["atoms_03"] for row in rows)


@needs_torchvision
def test_a_local_judge_of_dpg_says_yes_where_yes_is_likelier_than_no(model: str) -> None:
    reward = build("dpg", model=model)
    encode = reward.judge.processor.tokenizer.encode  # type: ignore[attr-defined]
    texts = [f"Is the {thing} there?" for thing in ("dog", "cat", "red car", "tall tree", "sign")]
    rows = [[str(i), "0", "entity - whole (x)", text] for i, text in enumerate(texts, 1)]
    meta = {"questions": rows, "skills": ["entity - whole"] * len(rows)}
    images = torch.randint(0, 256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(2)) / 255
    scores = score(reward, images, ["a", "b"], [meta, meta])
    for row in range(2):
        picture = Image.fromarray((images[row] * 255).round().byte().permute(1, 2, 0).numpy())
        answers = []
        for text in texts:
            softmax = probabilities(reward, picture, f"{text} Answer yes or no.")
            forms = [[w, w.title(), f" {w}", f" {w.title()}"] for w in ("yes", "no")]
            yes, no = (sum(float(softmax[encode(form)[0]]) for form in some) for some in forms)
            answers.append(yes > no)
        assert float(scores.value[row]) == pytest.approx(sum(answers) / len(answers))
