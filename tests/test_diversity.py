"""Diversity over seeds: known cases of the Vendi score, its features, its columns in a table; and
similarity to the images of a folder."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from PIL import Image
from small_models import clip_folder, pictures, shake
from torch.nn.functional import normalize
from transformers import CLIPImageProcessor, Dinov2Config, Dinov2Model

from flowalign import rewards
from flowalign.commands.evaluate import main
from flowalign.rewards.clip import Clip, image_encoder
from flowalign.rewards.preference import Diversity, Similarity, vendi
from flowalign.system.images import read_image, stacked, to_uint8

PROMPTS = ["a cat", "a dog", "a cat", "a fish", "a bird"]  # one twice


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_vendi_score_of_equal_and_of_orthogonal_images(count: int):
    assert vendi(normalize(torch.ones(count, 8), dim=1)) == pytest.approx(1)
    assert vendi(torch.eye(8)[:count]) == pytest.approx(count)
    assert vendi(torch.eye(8)[:count].repeat(3, 1)) == pytest.approx(count)  # each three times


@pytest.mark.parametrize("cosine", [-1.0, -0.3, 0.0, 0.5, 0.99])
def test_the_vendi_score_of_two_images(cosine: float):
    """K / 2 has the eigenvalues (1 + c) / 2 and (1 - c) / 2."""
    pair = torch.tensor([[1, 0], [cosine, math.sqrt(1 - cosine**2)]], dtype=torch.float64)
    shares = [(1 + cosine) / 2, (1 - cosine) / 2]
    entropy = -sum(share * math.log(share) for share in shares if share)
    assert vendi(pair) == pytest.approx(math.exp(entropy), rel=1e-6)


def test_the_reward_is_the_mean_distance_and_its_part_the_vendi_score():
    images, _ = pictures(4, 32, 32)
    scores = Diversity("fakes:mean_colour")(images, ["a"] * 4, [{}] * 4)
    vectors = normalize(fakes.mean_colour(images), dim=1)
    pairs = [1 - vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
    assert scores.value.mean() == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4)
    assert scores.parts["vendi"].tolist() == pytest.approx([vendi(vectors)] * 4)
    with pytest.raises(ValueError, match="copies"):
        Diversity("fakes:mean_colour")(images[:1], ["a"], [{}])


def test_similarity_is_the_mean_cosine_to_the_images_of_a_folder(tmp_path: Path):
    references, _ = pictures(3, 32, 32)
    for number, image in enumerate(references):
        file = tmp_path / f"{number}" / "a.png"  # in subfolders, of several sizes
        file.parent.mkdir()
        size = 32 + 8 * number
        Image.fromarray(to_uint8(image)).resize((size, size), 0).save(file)
    images, _ = pictures(4, 32, 48)
    found = Similarity(str(tmp_path), model="fakes:mean_colour")(images, PROMPTS[:4], [{}] * 4)
    read = [stacked(read_image(file)) for file in sorted(tmp_path.rglob("*.png"))]
    vectors = normalize(torch.cat([fakes.mean_colour(image) for image in read]), dim=1)
    cosines = normalize(fakes.mean_colour(images), dim=1) @ vectors.T
    assert found.value.tolist() == pytest.approx(cosines.mean(1).tolist(), abs=1e-6)


def test_similarity_refuses_a_folder_without_images_and_a_file_that_is_none(tmp_path: Path):
    with pytest.raises(ValueError, match="`images`"):
        rewards.RewardSpec("similarity", {"images": str(tmp_path)}).check()
    (tmp_path / "a.png").write_text("no image")
    rewards.RewardSpec("similarity", {"images": str(tmp_path)}).check()
    with pytest.raises(ValueError, match=r"a\.png"):
        rewards.build("similarity", images=str(tmp_path), model="fakes:mean_colour")


def dino_folder(folder: Path) -> Path:
    """A small random DINOv2 as transformers saves one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Dinov2Model(Dinov2Config(**sizes, image_size=28, patch_size=14))  # type: ignore[arg-type]
    shake(model)
    model.save_pretrained(folder)
    square = {"height": 28, "width": 28}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square).save_pretrained(folder)
    return folder


def test_features_are_those_of_dinov2_or_of_clip(tmp_path: Path):
    images, pils = pictures(3, 40, 40)
    name, encode = image_encoder(str(dino_folder(tmp_path / "dino")))
    values = CLIPImageProcessor.from_pretrained(name)(pils, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        token = Dinov2Model.from_pretrained(name)(values).last_hidden_state[:, 0]
    assert torch.allclose(encode(images), normalize(token, dim=1), atol=1e-3)
    _, encode = image_encoder(name := str(clip_folder(tmp_path / "clip")))
    assert torch.equal(encode(images), Clip(name).image_features(images))


@pytest.fixture
def evaluate(tmp_path: Path, random_model: str) -> Callable[..., int]:
    mark = {"name": "x", "images": 3}
    path = fakes.evaluation(random_model, tmp_path, PROMPTS, mark, report={"images": 1})
    return lambda *overrides: main(["--config", str(path), *overrides])


JUDGE = "benchmarks.0.rewards.diversity"
MEASURED = f"{JUDGE}={{name: diversity, options: {{model: 'fakes:mean_colour'}}}}"


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "results.json").read_text())["models"]


def test_diversity_is_two_columns_of_the_images_that_are_there(
    evaluate: Callable[..., int], tmp_path: Path, sampled: list[str]
):
    assert evaluate(MEASURED, "models={base: null, again: null}", "sampling.batch_size=100") == 0
    assert sampled == PROMPTS * 2
    table, models = (tmp_path / "out" / "table.md").read_text(), result(tmp_path)
    assert "|  | x | x_diversity | x_diversity_vendi | average |" in table
    rows = {(row["benchmark"], row["metric"]): row for row in models["base"]["rows"]}
    assert models["base"]["average"]["mean"] == rows["x", "reward"]["mean"]  # of scores alone
    score = rows["x_diversity", "vendi"]
    assert 1 < score["low"] < score["mean"] < score["high"] <= 3 and score["n"] == 15
    gaps = models["again"]["difference"]
    assert [(gap["metric"], gap["mean"], gap["stderr"]) for gap in gaps[1:3]] == [
        ("reward", 0, 0), ("vendi", 0, 0)
    ]  # fmt: skip


def test_a_prompt_that_is_listed_twice_has_two_groups_of_images(
    evaluate: Callable[..., int], tmp_path: Path
):
    """In one batch as in several."""
    rows = []
    for size in (100, 3):
        assert evaluate(MEASURED, f"sampling.batch_size={size}", f"output={tmp_path}/{size}") == 0
        models = json.loads((tmp_path / str(size) / "results.json").read_text())["models"]
        rows.append([row["vendi"] for row in models["base"]["images"]["x_diversity"]])
    assert rows[0] == pytest.approx(rows[1], rel=1e-4)
    assert rows[0][0] == rows[0][2] != rows[0][6]  # 0: the first cat, 6: the second
