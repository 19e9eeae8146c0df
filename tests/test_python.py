"""`flowalign.score`, `evaluate` and `train`: what the commands do, from Python."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from PIL import Image
from test_ocr import FakeEngine

import flowalign
from flowalign import config, rewards
from flowalign.rewards.ocr import OCR
from flowalign.system.images import to_uint8

SHADES = torch.tensor([0.2, 0.6, 1.0])[:, None, None, None].expand(3, 3, 8, 8) * torch.tensor(
    [1.0, 0.5, 0.0]
).view(3, 1, 1)
PROMPTS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fakes.AcceleratorState._reset_state(reset_partial_state=True)


def pictures() -> list[Image.Image]:
    return [Image.fromarray(to_uint8(image)) for image in SHADES]


def test_images_of_any_kind_are_scored_alike(tmp_path: Path, drawn: None) -> None:
    for number, picture in enumerate(pictures()):
        picture.save(tmp_path / f"{number}.png")
    expected = fakes.redness(SHADES, PROMPTS, []).value
    for images in (SHADES, list(SHADES), pictures(), tmp_path, str(tmp_path)):
        scored = flowalign.score(images, PROMPTS, "fakes:redness")
        torch.testing.assert_close(scored.scores.value, expected, rtol=0, atol=1 / 255)
    assert scored.plot().width > 100
    assert scored._repr_html_().count("<tr>") == 4 and "<th>red</th>" in scored._repr_html_()
    assert str(scored).startswith("| prompt | value | red |")
    many = flowalign.score(SHADES.repeat(8, 1, 1, 1), PROMPTS * 8, "fakes:redness").plot()
    assert 1 < many.width / many.height < 4  # three rows of eight
    same = rewards.score(fakes.redness, pictures(), PROMPTS)  # metadata is optional
    assert torch.equal(same.value, scored.scores.value)
    with pytest.raises(ValueError, match="sizes"):
        flowalign.score([*pictures(), Image.new("RGB", (4, 4))], [*PROMPTS, "d"], "fakes:redness")
    with pytest.raises(ValueError, match="2 prompts"):
        flowalign.score(pictures(), PROMPTS[:2], "fakes:redness")


def test_files_meet_prompts_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    shades = [number / 20 for number in range(1, 13)]
    for number, shade in enumerate(shades, 1):
        Image.new("RGB", (4, 4), (round(255 * shade), 0, 0)).save(tmp_path / f"img {number}.png")
    scores = flowalign.score(tmp_path, [str(shade) for shade in shades], "fakes:redness").scores
    assert scores.value.argsort().tolist() == [*range(12)]


@pytest.mark.parametrize(
    ("names", "is_clear"),
    [
        (["1", "2", "10"], True),
        (["7_1", "7_2", "7_10"], True),  # one number differs
        (["0001-983", "0002-12", "0010-555"], True),  # both orders are the same
        (["run2/1", "run2/10", "run10/2"], True),
        (["cat", "dog1", "dog2", "dog10"], True),
        (["seed2_1", "seed2_10", "seed10_2"], False),
        (["1-983", "2-12", "10-555"], False),
        (["0a1b", "00c12", "9f3"], False),
        (["1", "01", "2"], False),
    ],
)
def test_two_orders_of_images_are_refused(tmp_path: Path, names: list[str], is_clear: bool) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    with nullcontext() if is_clear else pytest.raises(ValueError, match="two orders"):
        assert len(flowalign.score(tmp_path, names, "fakes:redness").prompts) == len(names)


def test_a_reward_is_called_with_pil_images_and_without_metadata() -> None:
    clip: Any = rewards.build("pickscore", model="tiny")
    expected = clip(SHADES, PROMPTS, [{}] * 3).value
    assert torch.isfinite(expected).all()
    for images in (pictures(), tuple(pictures()), list(SHADES)):
        assert (clip(images, PROMPTS).value - expected).abs().max() < 1e-2
    alone = clip(pictures()[0], PROMPTS[0]).value
    torch.testing.assert_close(alone, expected[:1], rtol=0, atol=1e-2)
    ocr: Any = OCR(FakeEngine("CAT"))
    assert ocr(pictures()[0], 'a "cat"').value.tolist() == [1.0]


def test_metadata_stand_beside_the_prompt() -> None:
    def asked(images: Any, prompts: Any, metadata: Any) -> Any:
        return rewards.score(fakes.redness, images, prompts).of([row["x"] for row in metadata])

    rows = [{"prompt": prompt, "x": float(i)} for i, prompt in enumerate(PROMPTS)]
    assert flowalign.score(pictures(), rows, asked).scores.value.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_models_are_evaluated_and_a_mapping_is_trained(random_model: str, drawn: None) -> None:
    small: dict[str, Any] = {"sampling": {"steps": 2}, "report": {"images": 1}, "alarm": None}
    models = {"base": None, "ocr": "tiny/ocr"}
    table = flowalign.evaluate(models, PROMPTS, ["fakes:redness"], **small)
    assert set(table.results["models"]) == {"base", "ocr"} and table.plot().width > 100
    assert "<th>ocr</th>" in table._repr_html_()
    folder, heads, *_ = str(table).splitlines()
    assert folder == str(table.folder) and "| redness |" in heads
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    data = fakes.settings(random_model, Path("run"), "train.updates=1").model_dump(mode="json")
    data["tasks"][0]["prompts"] = [*fakes.PROMPTS]
    rows: list[dict[str, float]] = []
    run = flowalign.train(data, on_update=rows.append)
    assert [row["loss"] for row in rows] == [row["loss"] for row in run.metrics]
    assert [row["update"] for row in rows] == [1]
    assert run.adapter.is_dir() and run.plot().width > 100
    assert str(run).startswith("run")
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    typed = config.parse(data | {"tasks": config.read("run/config.yaml")["tasks"], "output": "two"})
    assert flowalign.train(typed).metrics[0]["loss"] == run.metrics[0]["loss"]
    with pytest.raises(config.ConfigError):
        flowalign.train({"stage": "nothing", "output": "two"})
