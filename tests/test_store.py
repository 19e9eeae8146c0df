"""Images and rows that are kept: what is there is not made again, another run's is refused."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakes
import pytest
import torch
from fakes import Rows
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.commands.evaluate import main
from flowalign.config import SamplingConfig
from flowalign.eval import suite
from flowalign.eval.store import Store
from flowalign.eval.suite import Benchmark, ImageSet
from flowalign.rewards import RewardBase
from flowalign.rewards.base import Wrapped
from flowalign.system.images import pixels_of
from flowalign.system.signals import Interrupted
from flowalign.types import PromptBatch, Scores

PROMPTS = [f'a "{letter}"' for letter in "ABCDE"]


class Watched(RewardBase):
    """Redness that remembers what it was asked, fails on some prompts, and is interrupted, or kills
    its process, at the call `stop`. Set on the class, as a config's options are part of a run."""

    stop, how = 0, "interrupt"
    calls = 0
    asked: list[str] = []
    failing: tuple[str, ...] = ()

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        Watched.calls += 1
        if Watched.calls == Watched.stop:
            if Watched.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Interrupted.by(signal.SIGINT)
        Watched.asked += prompts
        scores = fakes.redness(images, prompts, metadata)
        ill = torch.tensor([prompt in Watched.failing for prompt in prompts], device=images.device)
        return Scores.of(scores.value.masked_fill(ill, torch.nan), red=scores.parts["red"])


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("stop", 0), ("calls", 0), ("asked", []), ("failing", ())):
        monkeypatch.setattr(Watched, name, value)


@pytest.fixture(scope="module")
def backbone(random_model: str) -> Backbone:
    return fakes.backbone(random_model)


def benchmark(images: int = 1, reward: Any = None) -> Benchmark:
    batch = PromptBatch(PROMPTS, ["x"] * 5, [{"tag": p} for p in PROMPTS])
    return Benchmark("x", batch, reward or Watched(), images)


def store(folder: Path, *, rank: int = 0, saved: set[int] | None = None, **scores: Any) -> Store:
    result = Store(folder, {"seed": 7}, {"x": scores}, rank=rank, saved_prompts=saved)
    result.check()
    result.prepare()
    return result


def judge(backbone: Backbone, mark: Benchmark, size: int = 2, **options: Any) -> suite.JudgedImages:
    settings = SamplingConfig(steps=2, guidance=1.0, seed=7, batch_size=size)
    return suite.judge_set(backbone, ImageSet.of(mark), settings, **options)[0]


def test_a_copy_has_its_own_noise_and_the_first_is_that_of_a_run_with_one(backbone: Backbone):
    one, three = judge(backbone, benchmark(), keep=5), judge(backbone, benchmark(3), 6, keep=2)
    # about: the kernels of some machines round other batch sizes otherwise
    firsts = [score.value for score in three.scores[::3]]
    assert firsts == pytest.approx([score.value for score in one.scores], abs=1e-4)
    assert len(three.pictures) == 6
    for a, b in zip(three.pictures[::3], one.pictures[0:3:2], strict=True):  # prompts 0 and 2
        assert (pixels_of(a) - pixels_of(b)).abs().max() < 1.1 / 255
    assert len({score.value for score in three.scores}) == 15


def test_a_groupwise_reward_sees_all_images_of_a_prompt_at_once(backbone: Backbone, tmp_path: Path):
    groups: list[list[str]] = []

    def spread(images: Tensor, prompts: Sequence[str], metadata: Any) -> Scores:
        groups.append(list(prompts))
        return Scores.of(images.mean((1, 2, 3)) - images.mean())

    spread.groupwise = True  # type: ignore[attr-defined]
    mark, kept = benchmark(3, Wrapped(spread)), store(tmp_path / "s")
    whole = judge(backbone, mark, 4, store=kept)
    assert groups == [[prompt] * 3 for prompt in PROMPTS]
    (rows,) = kept.score_folder("x").glob("rows.*")
    rows.write_text("\n".join(rows.read_text().splitlines()[:-1]))  # one of E's is lost
    again = judge(backbone, mark, 4, store=store(tmp_path / "s"))
    assert groups[5:] == [['a "E"'] * 3] and again.scores == whole.scores


def test_what_a_store_holds_is_neither_sampled_nor_scored_again(
    backbone: Backbone, tmp_path: Path, sampled: list[str]
):
    kept: Any = {"keep": 3, "features": fakes.mean_colour}
    first = judge(backbone, benchmark(2), **kept, store=store(tmp_path / "s"))
    assert sampled == PROMPTS and len(Watched.asked) == 10
    names = [f"{p:05}_{c}.png" for p in range(5) for c in range(2)]
    assert sorted(path.name for path in tmp_path.glob("s/*.png")) == names
    done: list[int] = []
    more = {**kept, "advance": done.append}
    again = judge(backbone, benchmark(2), **more, store=store(tmp_path / "s"))
    assert sampled == PROMPTS and len(Watched.asked) == 10 and sum(done) == 10
    assert again.scores == first.scores and again.pictures == first.pictures
    assert again.features is not None and first.features is not None
    assert torch.equal(again.features, first.features)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_an_image_that_is_not_whole_is_sampled_again_with_its_batch(
    backbone: Backbone, tmp_path: Path, sampled: list[str], how: str
):
    first = judge(backbone, benchmark(), keep=5, store=store(tmp_path))
    path = tmp_path / "00002_0.png"
    intact = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(intact[: len(intact) * 2 // 3])
    sampled.clear()
    again = judge(backbone, benchmark(), keep=5, store=store(tmp_path))
    assert sampled == PROMPTS[2:4]  # the same arithmetic
    assert again == first and path.read_bytes() == intact


@pytest.mark.parametrize(("how", "asked"), [("cut", 3), ("gone", 5), ("garbage", 0)])
def test_a_row_that_is_not_whole_is_scored_again(
    backbone: Backbone, tmp_path: Path, sampled: list[str], how: str, asked: int
):
    first = judge(backbone, benchmark(), store=store(tmp_path))
    (rows,) = tmp_path.glob("*/rows.0.jsonl")
    data = rows.read_bytes()
    garbage = b'{"index": 0}\n[[[[\nnull\n\xff\n' + data
    rows.write_bytes({"cut": data[: len(data) * 2 // 3], "gone": b"", "garbage": garbage}[how])
    sampled.clear()
    Watched.asked.clear()
    for _ in range(2):
        assert judge(backbone, benchmark(), store=store(tmp_path)).scores == first.scores
    assert sampled == [] and len(Watched.asked) == asked


def test_without_its_images_a_store_samples_only_what_has_no_row(
    backbone: Backbone, tmp_path: Path, sampled: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Watched, "stop", 3)
    with pytest.raises(KeyboardInterrupt):
        judge(backbone, benchmark(), store=store(tmp_path / "s", saved={0}))
    assert [path.name for path in tmp_path.glob("s/*.png")] == ["00000_0.png"]
    sampled.clear()
    again = judge(backbone, benchmark(), store=store(tmp_path / "s", saved={0}))
    assert sampled == PROMPTS[4:] and again.scores == judge(backbone, benchmark()).scores


def test_the_number_of_processes_may_change_and_nothing_is_counted_twice(
    backbone: Backbone, tmp_path: Path, sampled: list[str], monkeypatch: pytest.MonkeyPatch
):
    plain = judge(backbone, benchmark())
    with monkeypatch.context() as patch:
        patch.setattr(suite, "gather_object", lambda own: own)
        for rank in (1, 2):  # the first of three was killed before it began
            three: Any = SimpleNamespace(num_processes=3, process_index=rank)
            judge(backbone, benchmark(), accelerator=three, store=store(tmp_path / "s", rank=rank))
    lost, twice = (tmp_path / "s").glob("scores_*/rows.*.jsonl")
    (lost.parent / "rows.7.jsonl").write_text(twice.read_text() + twice.read_text())
    sampled.clear()
    again = judge(backbone, benchmark(), store=store(tmp_path / "s"))
    assert sampled == PROMPTS[:2] and again.scores == plain.scores


def test_a_batch_that_was_cut_off_is_scored_as_a_whole_so_that_the_bits_are_the_same(
    backbone: Backbone, tmp_path: Path
):
    from flowalign.rewards import build

    mark = benchmark(reward=build("pickscore", model="tiny", device="cpu"))
    whole = judge(backbone, mark, 5, store=store(tmp_path / "s"))
    (rows,) = (tmp_path / "s").glob("scores_*/rows.0.jsonl")
    lines = rows.read_text().splitlines()[1:]
    for left in range(5):
        rows.write_text("\n".join(lines[:left]))
        again = judge(backbone, mark, 5, store=store(tmp_path / "s"))
        assert [s.value for s in again.scores] == [s.value for s in whole.scores]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, random_model: str) -> Path:
    """A finished evaluation of the random base and of an adapter that changes the images."""
    folder = tmp_path_factory.mktemp("evaluation") / "here"
    folder.mkdir()
    save_adapter(random_model, folder / "adapter", seed=1)
    fakes.evaluation(
        random_model, folder, PROMPTS, {"images": 2, "reward": {"name": "test_store:Watched"}},
        models={"base": None, "tuned": str(folder / "adapter")}, report={"images": 1},
        keep_images=True,
    )  # fmt: skip
    assert main(["--config", str(folder / "eval.yaml")]) == 0
    shutil.copytree(folder, folder.parent / "finished")
    return folder


@pytest.fixture
def config(finished: Path, watched: None) -> Path:
    """The config of that evaluation, whose files are as they were."""
    shutil.rmtree(finished)
    shutil.copytree(finished.parent / "finished", finished)
    Watched.calls = 0
    return finished / "eval.yaml"


def save_adapter(model: str, folder: Path, seed: int) -> None:
    fakes.adapted(model, "a", rank=2, alpha=2.0, seed=seed).save_adapter("a", folder)


def files(folder: Path) -> dict[str, bytes]:
    """What a reader takes from an evaluation: its numbers, tables and images."""
    names = ["results.json", "table.md", *(p.relative_to(folder) for p in folder.rglob("*.png"))]
    return {str(name): (folder / name).read_bytes() for name in sorted(map(str, names))}


def test_an_interrupted_command_continues_and_leaves_the_files_of_an_uninterrupted_one(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command, out = ["--config", str(config)], config.parent / "out"
    intact = files(out)
    shutil.rmtree(out)
    monkeypatch.setattr(Watched, "stop", 5)  # of 3 batches each: the second model's second
    assert main(command) == 130
    assert "The same command continues" in capsys.readouterr().err
    assert not (out / "results.json").exists()
    assert main(command) == 0
    assert files(out) == intact
    assert sorted(Watched.asked) == sorted(PROMPTS * 4)  # each image was scored once


@pytest.mark.slow
def test_an_evaluation_that_lost_images_fails_and_then_scores_no_others(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two of ten images; no table compares them, and the others' scores are kept."""
    command, out = ["--config", str(config)], config.parent / "out"
    intact = files(out)
    shutil.rmtree(out)
    monkeypatch.setattr(Watched, "failing", (PROMPTS[3],))
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "2 of 10" in error and "max_invalid_share" in error
    assert not (out / "results.json").exists()
    assert main([*command, "max_invalid_share=0.2"]) == 0
    assert "(n 8 of 10)" in (out / "table.md").read_text()
    Watched.asked.clear()
    monkeypatch.setattr(Watched, "failing", ())
    assert main(command) == 0
    assert Watched.asked == [PROMPTS[3]] * 4  # of both models
    assert files(out) == intact


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("sampling.seed=1", "sampling.seed was 1234 there, and is 1 here"),
        ("model.dtype=bfloat16", "model.dtype was 'float32' there, and is 'bfloat16' here"),
        ("benchmarks.0.images=1", "images was 2 there, and is 1 here"),
        ("models.base=ADAPTER", "adapter was None there, and is '"),
    ],
)
def test_images_of_another_run_are_refused(config: Path, override: str, difference: str, capsys):
    intact = files(config.parent / "out")
    override = override.replace("ADAPTER", str(config.parent / "adapter"))
    assert main(["--config", str(config), override]) == 2
    error = capsys.readouterr().err
    assert error.count(difference) == 1 and "Give another `output`, or delete " in error
    assert files(config.parent / "out") == intact


def test_a_changed_adapter_and_changed_prompts_are_refused(config: Path, random_model, capsys):
    save_adapter(random_model, config.parent / "adapter", seed=2)
    assert main(["--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert "tuned" in error and "adapter was '" in error and "base/red" not in error
    save_adapter(random_model, config.parent / "adapter", seed=1)  # the very same again
    (config.parent / "prompts.txt").write_text("\n".join(PROMPTS[::-1]))
    assert main(["--config", str(config)]) == 2
    assert capsys.readouterr().err.count("prompts.0 was 'a \"A\"' there") == 1


@pytest.mark.slow
def test_a_larger_limit_continues_and_a_smaller_one_takes_the_first(
    config: Path, sampled: list[str]
):
    """Where the first prompts fill complete batches, to the last bit."""
    command, out = ["--config", str(config)], config.parent / "out"
    intact = files(out)
    shutil.rmtree(out)
    assert main([*command, "benchmarks.0.limit=4"]) == 0  # 2 prompts a batch
    few = files(out)
    sampled.clear()
    assert main(command) == 0
    assert sampled == PROMPTS[4:] * 2 and files(out) == intact
    sampled.clear()
    assert main([*command, "benchmarks.0.limit=4"]) == 0
    pages = ("results.json", "table.md")
    assert sampled == [] and [files(out)[name] for name in pages] == [few[name] for name in pages]


def test_changed_metadata_is_scored_again_on_the_same_images(config: Path, sampled: list[str]):
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    path = config.parent / "prompts.jsonl"
    command = ["--config", str(config), f"benchmarks.0.prompts={path}"]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(command) == 0
    Watched.asked.clear()
    lines[1]["tag"] = "b"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(command) == 0
    assert sampled == [] and set(Watched.asked) == set(PROMPTS[:2])  # its batch
    models = json.loads((config.parent / "out" / "results.json").read_text())["models"]
    tags = [row["metadata"].get("tag") for row in models["base"]["images"]["red"]]
    assert tags == [None, None, "b", "b", *[None] * 6]
