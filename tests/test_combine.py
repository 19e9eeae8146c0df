"""Composed rewards: sums, gates, a common scale; rewards that see a whole group."""

import math

import fakes
import pytest
import torch

from flowalign import rewards
from flowalign.rewards import RewardSpec, build, score
from flowalign.rewards.combine import Weighted
from flowalign.types import Scores

RED = {"name": "fakes:redness"}
IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "b", "a", "b", "a", "c"]
METADATA = [{}] * 6
REDNESS = fakes.redness(IMAGES, PROMPTS, METADATA).value


def brightness(images, prompts, metadata):
    return Scores.of(images.mean((1, 2, 3)))


def refusing(images, prompts, metadata):
    """Says nothing of the second image."""
    value = brightness(images, prompts, metadata).value
    value[1] = math.nan
    return Scores.of(value)


def signs(images, prompts, metadata):
    return Scores.of(-torch.ones(len(images)))


def zero(images, prompts, metadata):
    return Scores.of(torch.zeros(len(images)))


def contrast(images, prompts, metadata):
    """How much brighter than the group's mean; shows what it was called with."""
    assert len(set(prompts)) == 1, "more than one prompt at a time"
    value = images.mean((1, 2, 3))
    return Scores.of(value - value.mean(), size=torch.full_like(value, len(images)))


contrast.groupwise = True


def offline(images, prompts, metadata):
    """A service that is down, and counts who asks."""
    offline.asked += 1
    raise ConnectionError("nobody there")


offline.groupwise = True
offline.asked = 0


def spec(name, **options):
    return {"name": f"test_combine:{name}", "options": options}


def ask(reward, images=IMAGES):
    return score(reward, images, PROMPTS, METADATA)


def test_a_weighted_sum_is_the_sum_and_shows_its_components():
    bright = brightness(IMAGES, PROMPTS, METADATA).value
    terms = [RED | {"weight": 2.0}, spec("brightness") | {"weight": -0.5}]
    found = ask(build("weighted", rewards=terms))
    assert torch.allclose(found.value, 2 * REDNESS - 0.5 * bright)
    assert torch.equal(found.parts["fakes:redness"], REDNESS)
    assert torch.equal(found.parts["fakes:redness/red"], IMAGES[:, 0].mean((1, 2)))


def test_an_image_that_one_component_failed_on_is_invalid_with_its_reason():
    found = ask(build("weighted", rewards=[RED, spec("refusing") | {"label": "shy"}]))
    assert found.valid.tolist() == [True, False, True, True, True, True]
    assert found.reasons == {1: "shy: returned nan"}
    assert math.isnan(found.value[1])


def test_a_product_needs_every_component():
    """RED * sqrt(brightness); what is negative counts as 0, so that two make no good image. What a
    component fails on is invalid."""
    bright = brightness(IMAGES, PROMPTS, METADATA).value
    terms = [spec("brightness") | {"weight": 0.5}, spec("refusing")]
    found = ask(build("product", rewards=terms))
    expected = bright.sqrt() * bright
    expected[1] = math.nan
    torch.testing.assert_close(found.value, expected, equal_nan=True)
    assert not found.valid[1]
    assert set(found.parts) == {"test_combine:brightness", "test_combine:refusing"}
    signed = ask(build("product", rewards=[RED, RED | {"label": "again"}, spec("brightness")]))
    torch.testing.assert_close(signed.value, REDNESS.clamp(min=0).square() * bright)
    negative = (REDNESS < 0).nonzero().flatten().tolist()
    assert negative and list(signed.reasons) == negative and bool(signed.valid.all())
    torch.testing.assert_close(signed.parts["again"], REDNESS)  # as it is
    assert not RewardSpec("product").may_be_sum  # gdpo would take it for one


@pytest.mark.parametrize(("name", "nothing"), [("product", 1.0), ("weighted", 0.0)])
def test_a_weight_of_zero_takes_a_component_out_of_the_value(name: str, nothing: float):
    """Where it is 0, below 0 or invalid, too; it is shown all the same."""
    idle = [spec(n) | {"weight": 0.0} for n in ("refusing", "signs", "zero")]
    found = ask(build(name, rewards=[*idle, spec("brightness")]))
    torch.testing.assert_close(found.value, brightness(IMAGES, PROMPTS, METADATA).value)
    assert bool(found.valid.all())
    assert math.isnan(found.parts["test_combine:refusing"][1])
    assert found.parts["test_combine:signs"].tolist() == [-1.0] * 6
    assert list(found.reasons) == [1] and not found.failures
    assert ask(build(name, rewards=idle)).value.tolist() == [nothing] * 6


def test_the_median_is_worth_a_half_and_order_is_kept():
    median = float(REDNESS.quantile(0.5))
    found = ask(build("normalized", reward=RED, median=median, spread=0.05))
    assert torch.allclose(found.value, 1 / (1 + torch.exp(-(REDNESS - median) / 0.05)))
    assert torch.equal(found.value.argsort(), REDNESS.argsort())
    assert torch.equal(found.parts["raw"], REDNESS)
    at_median = build("normalized", reward=RED, median=float(REDNESS[0]), spread=1.0)
    assert float(ask(at_median).value[0]) == pytest.approx(0.5)


def test_a_groupwise_reward_sees_all_images_of_one_prompt_and_no_other():
    bright = IMAGES.mean((1, 2, 3))
    found = ask(build("test_combine:contrast"))
    assert found.parts["size"].tolist() == [3, 2, 3, 2, 3, 1]
    for rows in ([0, 2, 4], [1, 3], [5]):
        assert torch.allclose(found.value[rows], bright[rows] - bright[rows].mean())


def test_a_sum_with_a_groupwise_component_is_groupwise():
    both = Weighted([RED, spec("contrast")])
    assert both.groupwise and not Weighted([RED]).groupwise
    expected = REDNESS + ask(build("test_combine:contrast")).value
    assert torch.allclose(ask(both).value, expected)


def test_a_groupwise_reward_that_fails_masks_its_group_alone(caplog):
    def moody(images, prompts, metadata):
        if prompts[0] == "b":
            raise RuntimeError("not this one")
        return Scores.of(images.mean((1, 2, 3)))

    moody.groupwise = True
    found = ask(moody)
    assert found.valid.tolist() == [True, False, True, False, True, True]
    assert set(found.reasons.values()) == {"RuntimeError: not this one"}


def test_a_dead_service_is_asked_once_not_once_a_group():
    offline.asked = 0
    found = ask(offline)
    assert offline.asked == 1 and not found.valid.any() and len(found.reasons) == 6


def test_what_cannot_work_is_refused_before_any_model_is_loaded():
    ocr = {"name": "ocr"}
    cases = [
        ("weighted", {"rewards": []}, "`rewards`"),
        ("weighted", {"rewards": [{"name": "ocrr"}]}, "Did you mean 'ocr'"),
        ("weighted", {"rewards": [ocr | {"wieght": 1}]}, "`rewards.0.wieght`"),
        ("weighted", {"rewards": [ocr, ocr]}, "`label`"),
        ("weighted", {"rewards": [ocr | {"options": {"rule": "x"}}]}, "`rule` of reward 'ocr'"),
        ("normalized", {"reward": RED, "median": math.nan, "spread": 1.0}, "`median`"),
        ("normalized", {"reward": {}, "median": 0.0, "spread": 1.0}, "`reward.name`"),
        ("product", {"rewards": [{"name": "normalized"}]}, "`rewards.0`"),
        ("normalized", {"reward": RED, "median": 0.5, "spread": 0}, "`spread`"),
        ("diversity", {"model": "./nowhere"}, "`model`"),
    ]
    for name, options, said in cases:
        with pytest.raises(ValueError) as caught:
            RewardSpec(name, options).check()
        assert said in str(caught.value), options
        assert "Value error" not in str(caught.value)


def test_a_component_may_refuse_prompts():
    for name, options in (
        ("weighted", {"rewards": [RED, {"name": "ocr"}]}),
        ("normalized", {"reward": {"name": "ocr"}, "median": 0.5, "spread": 0.1}),
    ):
        with pytest.raises(ValueError, match="quotes"):
            RewardSpec(name, options).check_prompts(["no text here"], [{}])
    assert {"weighted", "normalized", "diversity"} <= set(rewards.names())
