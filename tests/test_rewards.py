"""Rewards are found by name, refused with a reason, and masked where they fail."""

import gc
import logging
import sys
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from flowalign.rewards import (
    Cost,
    RewardBase,
    RewardSpec,
    build,
    describe,
    names,
    register,
    score,
    scoring,
)
from flowalign.rewards.base import Wrapped
from flowalign.rewards.options import located
from flowalign.rewards.scoring import AsyncScorer
from flowalign.types import Detections, PromptBatch, Scores

IMAGES = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(4, 1, 1, 1).expand(4, 3, 2, 2)
PROMPTS, METADATA = ["a", "b", "c", "d"], [{}, {}, {}, {}]
DOG = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}


class Brightness:
    """A stranger's reward: mean brightness; dies of a batch that holds a prompt `poison`."""

    def __init__(self, scale: float = 1.0, poison: str = ""):
        self.scale, self.poison = scale, poison

    def __call__(self, images, prompts, metadata):
        if self.poison and self.poison in prompts:
            raise RuntimeError(f"cannot look at {self.poison}")
        return Scores.of(images.mean(dim=(1, 2, 3)) * self.scale, half=images.mean((1, 2, 3)) / 2)


class FakeDetector:
    """Finds one dog in every image, and two in images brighter than .25."""

    def __call__(self, images):
        dog, other = [0, 0, 4, 4, 0.95], [9, 9, 14, 14, 0.95]
        counts = [2 if image.mean() > 0.25 else 1 for image in images]
        return [Detections({"dog": [dog, other][:n]}, {"dog": ["red"] * n}) for n in counts]


@pytest.fixture
def stranger(monkeypatch):
    """A module of somebody else's, importable as `stranger`."""
    module = types.ModuleType("stranger")
    module.__dict__.update(Brightness=Brightness, FakeDetector=FakeDetector)
    monkeypatch.setitem(sys.modules, "stranger", module)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr("flowalign.rewards._registered", {})


def test_a_reward_by_decorator_may_be_a_class_or_a_function(registry):
    register("bright")(Brightness)

    @register("dark")
    def dark(images, prompts, metadata, bias=0.0):
        return Scores.of(bias - images.mean(dim=(1, 2, 3)))

    assert {"bright", "dark", "ocr", "geneval"} <= set(names())
    assert build("bright", scale=0.0)(IMAGES, PROMPTS, METADATA).value.tolist() == [0] * 4
    dimmed = build("dark", bias=1.0)(IMAGES, PROMPTS, METADATA).value
    assert torch.allclose(dimmed, torch.tensor([0.9, 0.8, 0.7, 0.6]))
    with pytest.raises(ValueError, match="bais"):
        RewardSpec("dark", {"bais": 1.0}).check()


def test_registering_again_is_fine_but_a_taken_name_is_refused(registry):
    register("bright")(Brightness)
    register("bright")(Brightness)
    with pytest.raises(ValueError, match="already registered"):
        register("bright")(FakeDetector)


def test_what_is_unknown_is_refused_with_a_suggestion(stranger):
    for name, options, said in (
        ("ocrr", {}, "'ocr'"),
        ("nowhere.at.all:Thing", {}, "'nowhere'"),
        ("stranger:Brightnes", {}, "Brightnes"),
        ("stranger:Brightness", {"scal": 1}, "'scale'"),
        ("geneval", {"detector": "tinny"}, "'tinny'"),
    ):
        with pytest.raises(ValueError, match=said):
            RewardSpec(name, options).check()
        with pytest.raises(ValueError, match=said):
            build(name, **options)


class Annotated:
    """A stranger's reward with annotations: of YAML's types, and of others."""

    def __init__(
        self,
        count: int = 1,
        scale: float | None = None,
        sizes: Sequence[int] = (1, 2),
        mode: Literal["a", "b"] = "a",
        json: Path = Path("x"),  # a name that pydantic's models have, too
        pair: tuple[int, int] = (1, 2),
    ):
        raise AssertionError("built")


def test_annotations_of_what_yaml_holds_are_checked_and_others_left_to_the_reward(registry):
    register("strict")(Annotated)
    RewardSpec("strict", {"json": "a/file", "pair": [1, 2], "scale": 2, "sizes": [3]}).check()
    RewardSpec("strict", {"count": 2, "scale": None, "mode": "b"}).check()  # builds nothing
    wrong = {"count": True, "scale": "2", "sizes": "12", "mode": "c"}
    with pytest.raises(ValueError) as caught:
        RewardSpec("strict", wrong).check()
    for name, value in wrong.items():
        assert f"`{name}` of reward 'strict' is {value!r}" in str(caught.value)


WRONG = {
    "aesthetic": [{"head": "nowhere.pth"}, {"head": None}],
    "clipscore": [{"batch_size": True}, {"device": "gpu"}, {"model": "no such model"}],
    "geneval": [{"reward": "lenient"}, {"detector_optoins": {}}],
    "hpsv2": [{"weights": "nowhere.pt"}, {"architecture": ""}],
    "imagereward": [{"weights": "ImageReward.pt"}, {"tokenizer": "no such folder"}],
    "ocr": [{"rule": "lenient"}, {"workers": 0}, {"limit_typ": "max"}],
    "pickscore": [{"normalizer": 0}, {"normalizer": float("nan")}, {"model": "./nowhere/at_all"}],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused_before_anything_is_loaded(name: str, tmp_path: Path):
    RewardSpec(name).check()
    for options in [*WRONG[name], *[{"model": str(tmp_path)}] * (name == "clipscore")]:
        ((key, value),) = options.items()
        with pytest.raises(ValueError) as caught:
            RewardSpec(name, options).check()
        said = str(caught.value)
        assert f"no option {key!r}" in said or f"`{key}" in said and repr(value) in said, options


def test_a_model_may_name_its_revision(tmp_path: Path):
    RewardSpec("clipscore", {"model": "owner/name@abc1"}).check()
    assert located("owner/name@abc1") == ("owner/name", {"revision": "abc1"})
    for model in ("owner/name", str(tmp_path)):
        assert located(model) == (model, {})


def test_one_bad_image_masks_only_itself_and_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        result = score(Brightness(poison="c"), IMAGES, PROMPTS, METADATA)
    assert result.valid.tolist() == [True, True, False, True]
    assert result.value[2].isnan()
    assert torch.allclose(result.value[[0, 1, 3]], torch.tensor([0.1, 0.2, 0.4]))
    assert torch.allclose(result.parts["half"][[0, 1, 3]], torch.tensor([0.05, 0.1, 0.2]))
    assert result.parts["half"][2].isnan()
    assert result.reasons == {2: "RuntimeError: cannot look at c"}
    assert len(caplog.records) == 1 and "cannot look at c" in caplog.text


def test_images_are_freed_as_soon_as_they_are_scored():
    """Without a garbage collection: they are large, and may lie on a GPU."""
    images = IMAGES.clone()
    alive = weakref.ref(images)
    gc.disable()
    try:
        score(Brightness(poison="c"), images, PROMPTS, METADATA)
        del images
        assert alive() is None
    finally:
        gc.enable()


def test_a_malformed_answer_makes_every_image_invalid():
    for answer, said in (
        (Scores.of([1.0, 2.0]), "4 images"),
        (Scores.of([1.0] * 4, half=torch.ones(3)), "half has shape"),
        ([1.0] * 4, "Scores.of"),
    ):
        reward: Any = lambda images, prompts, metadata: answer  # noqa: B023, E731
        result = score(reward, IMAGES, PROMPTS, METADATA)
        assert not result.valid.any() and result.value.isnan().all() and result.value.shape == (4,)
        assert all(said in result.reasons[row] for row in range(4)), said


def test_nan_infinity_and_a_false_valid_mask_their_image():
    value, valid = torch.tensor([0.5, float("nan"), float("inf"), 0.25]), torch.ones(4) > 0
    valid[3] = False
    answer = Scores(value, valid)
    result = score(lambda images, prompts, metadata: answer, IMAGES, PROMPTS, METADATA)
    assert result.valid.tolist() == [True, False, False, False]
    assert result.value[0] == 0.5 and result.value[1:].isnan().all()
    assert set(result.reasons) == {1, 2, 3}


def test_why_a_reward_failed_that_another_calls_is_told():
    def outer(images, prompts, metadata):
        return score(Brightness(poison="c"), images, prompts, metadata)

    def silent(images, prompts, metadata):
        return Scores.of(outer(images, prompts, metadata).value)

    for reward in (outer, silent):
        assert "cannot look at c" in score(reward, IMAGES, PROMPTS, METADATA).reasons[2]


def test_keyboard_interrupt_passes_and_unequal_inputs_are_the_callers_fault():
    def interrupted(images, prompts, metadata):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted, IMAGES, PROMPTS, METADATA)
    with pytest.raises(ValueError, match="3 prompts"):
        score(Brightness(), IMAGES, PROMPTS[:3], METADATA)


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt("mine")])
def test_a_reward_cannot_end_the_run(error):
    def ending(images, prompts, metadata):
        raise error

    scorer = AsyncScorer(lambda images, batch: score(ending, images, batch.prompts, batch.metadata))
    scorer.submit(IMAGES, PromptBatch(PROMPTS, ["x"] * len(PROMPTS), METADATA))
    scores = scorer.collect()
    assert not scores.valid.any()
    assert all(repr(error) in reason for reason in scores.reasons.values())


@pytest.mark.parametrize(
    ("kind", "value"), [("bounded", [1, 0]), ("published", [1, 0]), ("official", [1, 1])]
)
def test_geneval_scores_what_the_detector_found(stranger, kind, value):
    reward = build("geneval", detector="stranger:FakeDetector", reward=kind)
    scores = reward(IMAGES[1:3], PROMPTS[1:3], [DOG, DOG])
    assert scores.value.tolist() == value
    assert scores.parts["correct"].tolist() == [1, 1]


def test_a_reward_describes_itself_and_at_least_by_its_name():
    class Told(Brightness):
        name = "told"

        def describe(self):
            return {"engine": torch.float32, "scale": self.scale}

    class Broken(Brightness):
        def describe(self):
            return {}["engine"]

    told = {"name": "told", "engine": "torch.float32", "scale": 2.0}
    assert describe(Wrapped(Told(2.0))) == told
    assert describe(Wrapped(Brightness())) == {"name": "Brightness"}
    broken = {"name": "Broken", "describe": "KeyError: 'engine'"}
    assert describe(Wrapped(Broken())) == broken


def test_a_reward_says_what_differs_from_the_defaults(registry):
    @register("quiet")
    class Quiet(RewardBase):
        licence = "MIT"
        cost, downloads = Cost(flops=2.0), {"a/model": 0.5}

        def __call__(self, images, prompts, metadata):
            return Scores.of([0.0] * len(images))

    @register("duck")
    class Duck(Brightness):
        groupwise, headline, weights = True, "half", "not a sum of parts"
        columns = ("half",)

    quiet, duck = RewardSpec("quiet").build(), RewardSpec("duck").build()
    assert (quiet.groupwise, quiet.headline, quiet.weights) == (False, None, None)
    assert (duck.groupwise, duck.headline, duck.weights) == (True, "half", None)
    assert duck.columns == ("half",)
    assert RewardSpec("duck").groupwise and not RewardSpec("quiet").groupwise
    assert RewardSpec("quiet").cost == Cost(2.0) and RewardSpec("duck").cost is None
    assert RewardSpec("quiet", {"model": "other"}).cost is None
    assert RewardSpec("quiet", {"model": "tiny"}).downloads == {}
    assert RewardSpec("torch:rand", trusted=False).reward_class is RewardBase


class Placed:
    """A reward that says where it computes."""

    def __init__(self, *, device: str | None = None) -> None:
        self.device = device

    def __call__(self, images, prompts, metadata):
        return Scores.of([0.0] * len(images))


def test_a_run_tells_a_reward_its_device_unless_its_options_do():
    path = f"{__name__}:Placed"
    for given, device in ({}, "meta"), ({"device": None}, "meta"), ({"device": "cpu"}, "cpu"):
        assert vars(vars(RewardSpec(path, given).build("meta"))["reward"])["device"] == device
    part = {"name": path}
    for name, options in {
        "weighted": {"rewards": [part]},
        "normalized": {"reward": part, "median": 0.0, "spread": 1.0},
    }.items():
        reward = RewardSpec(name, options).build("meta")
        (inner, *_) = vars(reward)["components"].values()
        assert inner.reward.device == "meta"
        with pytest.raises(ValueError, match="device"):
            RewardSpec(name, {**options, "device": "nowhere"}).check()


class Meddling:
    """Leaves torch with another setting, where it is made or where it is called."""

    def __init__(self, call: bool, kind: str) -> None:
        self.call, self.kind = call, kind
        if not call:
            self.meddle()

    def meddle(self):
        settings = {
            "default_dtype": torch.float64, "default_device": "meta",
            "num_threads": torch.get_num_threads() + 1, "deterministic_debug_mode": "warn",
            "float32_matmul_precision": "medium", "grad_enabled": False,
        }  # fmt: skip
        getattr(torch, f"set_{self.kind}")(settings[self.kind])

    def __call__(self, images, prompts, metadata):
        value = images.double().mean((1, 2, 3))
        scores = Scores.of(value, half=value.half())
        if self.call:
            self.meddle()
        return scores


@pytest.mark.parametrize("call", [True, False])
@pytest.mark.parametrize(
    "kind", ["grad_enabled", "float32_matmul_precision", *scoring.TORCH_SETTINGS]
)
def test_what_a_reward_changes_in_torch_is_set_back(
    call: bool, kind: str, registry, monkeypatch, caplog
):
    monkeypatch.setattr(scoring, "_changers", set())
    register("meddling")(Meddling)
    read = torch.is_grad_enabled if "grad" in kind else getattr(torch, f"get_{kind}")
    before = read()
    reward = RewardSpec("meddling", {"call": call, "kind": kind}).build("cpu")
    for _ in range(2):
        scores = score(reward, IMAGES, PROMPTS, METADATA)
    assert read() == before
    assert scores.value.dtype == scores.parts["half"].dtype == torch.float32
    assert torch.allclose(scores.value, IMAGES.mean((1, 2, 3)))
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == ("grad" not in kind) and all(kind in text for text in said)  # once
