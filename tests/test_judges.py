"""Several judges of the same images, which are sampled once."""

import json
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import Rows
from torch import Tensor

from flowalign.commands.evaluate import main
from flowalign.config import SamplingConfig
from flowalign.eval import suite
from flowalign.eval.suite import Benchmark, ImageSet
from flowalign.rewards.base import Wrapped
from flowalign.system.signals import Interrupted
from flowalign.types import Scores

PROMPTS = [f'a "{letter}"' for letter in "ABCDE"]


class Colour:
    """How much of a channel an image has; counts what it was asked, and may be interrupted."""

    asked: dict[str, list[str]] = {}
    stop: Callable[[str], bool] = staticmethod(lambda channel: False)

    def __init__(self, channel: str) -> None:
        self.channel = channel

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        if Colour.stop(self.channel):
            raise Interrupted.by(signal.SIGINT)
        Colour.asked.setdefault(self.channel, []).extend(prompts)
        return Scores.of(images[:, "rgb".index(self.channel)].mean((1, 2)))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """{channel: the prompts that its judge was asked about}."""
    prompts: dict[str, list[str]] = {}
    monkeypatch.setattr(Colour, "asked", prompts)
    return prompts


def spec(channel: str) -> dict[str, Any]:
    return {"name": "test_judges:Colour", "options": {"channel": channel}}


def command(folder: Path, model: str) -> Callable[..., int]:
    """evaluate(*overrides): the command on one benchmark; its output is folder/out."""
    mark = {"name": "x", "images": 2, "reward": None}
    path = fakes.evaluation(model, folder, PROMPTS, mark, report={"images": 1})
    return lambda *overrides: main(["--config", str(path), *overrides])


@pytest.fixture
def evaluate(tmp_path: Path, random_model: str) -> Callable[..., int]:
    return command(tmp_path, random_model)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, random_model: str) -> dict[str, list]:
    """The rows of two judges in one uninterrupted evaluation."""
    folder = tmp_path_factory.mktemp("fresh")
    assert command(folder, random_model)(BOTH) == 0
    return rows(folder / "out")


RED = f"benchmarks.0.reward={spec('r')}"
BOTH = f"benchmarks.0.rewards={{red: {spec('r')}, blue: {spec('b')}}}"


def rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads((folder / "results.json").read_text())["models"]["base"]["images"]


def test_each_judge_is_a_column_and_each_image_is_sampled_once(
    evaluate: Callable[..., int], tmp_path: Path, sampled: list[str], asked: dict[str, list[str]]
):
    assert evaluate(BOTH) == 0
    assert sampled == PROMPTS and list(asked) == ["r", "b"]
    assert asked["r"] == asked["b"] == [prompt for prompt in PROMPTS for _ in range(2)]
    both, table = rows(tmp_path / "out"), (tmp_path / "out" / "table.md").read_text()
    assert list(both) == ["x_red", "x_blue"] and "|  | x_red | x_blue | average |" in table
    assert "5 prompts of x with 2 images each: 2 Euler" in table
    assert "its error is over prompts, also where benchmarks share images" in table
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == ["grid.png"]
    assert (tmp_path / "out" / "report.html").read_text().count("base64,") == 2  # not 4


def test_a_judge_that_comes_later_scores_the_images_that_are_kept(
    evaluate: Callable[..., int], tmp_path: Path, sampled: list[str], asked: dict[str, list[str]],
    fresh: dict[str, list],
):  # fmt: skip
    assert evaluate(RED, "keep_images=true") == 0
    assert rows(tmp_path / "out")["x"] == fresh["x_red"]  # a judge is not disturbed by another
    sampled.clear()
    asked.clear()
    assert evaluate(BOTH, "keep_images=true") == 0
    assert sampled == [] and list(asked) == ["b"]  # the first one's rows are there, too
    assert rows(tmp_path / "out") == fresh


def test_fidelity_counts_an_image_once(evaluate: Callable[..., int], tmp_path: Path):
    from PIL import Image

    (tmp_path / "white").mkdir()
    for index in range(20):
        white = Image.new("RGB", (32, 32), (255, 255, 200 + index))
        white.save(tmp_path / "white" / f"{index}.png")
    (tmp_path / "prompts.txt").write_text("\n".join(f"a {i}" for i in range(10)))
    fidelity = f"fidelity={{features: 'fakes:mean_colour', reference: {tmp_path / 'white'}}}"
    numbers = []
    for judges in (RED, BOTH):
        folder = tmp_path / str(len(numbers))
        assert evaluate(judges, fidelity, f"output={folder}") == 0
        results = json.loads((folder / "results.json").read_text())
        numbers.append(results["models"]["base"]["fidelity"])
    assert numbers[0]["n"] == 20 and numbers[0] == numbers[1]


def test_judges_take_turns_and_one_that_hangs_costs_the_others_nothing(random_model: str):
    under_way: list[str] = []

    def judge(name: str, slow: bool) -> Wrapped:
        def reward(images: Tensor, prompts: Sequence[str], metadata: Any) -> Scores:
            if slow and fakes.PROMPTS[0] in prompts:
                ended.wait(20)
                return Scores.of([0.0] * len(images))
            assert under_way == []  # nobody else is at it
            under_way.append(name)
            scores = fakes.redness(images, prompts, metadata)
            under_way.pop()
            return scores

        return Wrapped(reward)

    ended = threading.Event()
    batch = fakes.batch(3)
    judges = tuple(Benchmark(n, batch, judge(n, n == "slow"), 1, "x") for n in ("slow", "quick"))
    results = suite.judge_set(
        fakes.backbone(random_model), ImageSet("x", batch, 1, judges),
        SamplingConfig(steps=2, guidance=1.0, seed=7, batch_size=1),
        seconds=0.3,
    )  # fmt: skip
    ended.set()
    values = torch.tensor([[score.value for score in judged.scores] for judged in results])
    assert values.isfinite().tolist() == [[False, True, True], [True, True, True]]
    assert values[0, 1:].tolist() == values[1, 1:].tolist()


def test_a_run_watches_several_judges_of_images_that_are_sampled_once(
    random_model: str, tmp_path: Path, sampled: list[str]
):
    prompts = tmp_path / "prompts.txt"
    judges = "{a: {name: 'fakes:constant'}, b: {name: 'fakes:redness'}}"
    watch = f"{{name: other, prompts: {prompts}, limit: 3, rewards: {judges}}}"
    given = [f"tasks.0.validation={prompts}", f"evaluation={{every: 1, watch: [{watch}]}}"]
    settings = fakes.settings(random_model, tmp_path / "run", *given, "train.updates=1")
    fakes.wired(settings).run()
    scored = [row for row in fakes.lines(tmp_path / "run") if "eval/headline" in row]
    assert len(scored) == 2 and len(sampled) == 2 * (len(fakes.PROMPTS) + 3)
    for row in scored:
        assert row["eval/other_a/reward"] == 0.5 != row["eval/other_b/reward"]
        assert row["eval/headline"] == row["eval/red/reward"]
    first, last = (row["watched/other_b"] for row in scored)
    assert first == 0 and last == pytest.approx(
        scored[1]["eval/other_b/reward"] - scored[0]["eval/other_b/reward"]
    )
