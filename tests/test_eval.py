"""Evaluation: scores become rows, rows a table; models are compared on the same noise."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakes
import pytest
import torch
from PIL import Image

from flowalign.backbone import Backbone
from flowalign.backbone.placement import Placement
from flowalign.backbone.text import TextEncoder
from flowalign.commands.evaluate import main
from flowalign.config import SamplingConfig
from flowalign.eval import suite
from flowalign.eval.fidelity import distance, enough, frechet
from flowalign.eval.geneval import summarize
from flowalign.eval.scores import from_row, to_row
from flowalign.eval.stats import NO_ERROR, average, difference, lost, rows_of
from flowalign.eval.suite import Benchmark, ImageSet, JudgedImages
from flowalign.eval.table import metric_table
from flowalign.rewards import RewardBase
from flowalign.system.images import pixels_of
from flowalign.types import EvalImage, EvalReport, EvalRow, ImageScore, PromptBatch, Scores

NAN = math.nan
NONE = PromptBatch([], [], [])


class Judge(RewardBase):
    """A reward that is known by its part `correct`, if by any; it finds every image right."""

    def __init__(self, headline: str | None = "correct") -> None:
        self.headline = headline

    def __call__(self, images, prompts, metadata) -> Scores:
        ones = torch.ones(len(images))
        return Scores.of(images.mean(dim=(1, 2, 3)), correct=ones)


GENEVAL = Benchmark("geneval", NONE, Judge())
OCR = Benchmark("ocr", NONE, Judge(None))


def judged(tags: str, correct: list[float], value: list[float] | None = None):
    """Scores as `judge_set` gives them, one a letter of `tags` (a space = no tag)."""
    values = value or correct
    scores = []
    for i, tag in enumerate(tags):
        image = EvalImage(i, 0, f"p{i}", {"tag": tag} if tag != " " else {})
        scores.append(ImageScore(image, values[i], {"correct": correct[i]}))
    return scores


def named(rows: list[EvalRow]) -> dict[str, EvalRow]:
    return {row.metric: row for row in rows}


def test_overall_is_the_unweighted_mean_of_the_tags_as_the_official_summary_has_it():
    images = judged("aaaab", [1, 1, 1, 0, 0])
    rows = named(rows_of(GENEVAL, images))
    assert (rows["a"].mean, rows["a"].n, rows["b"].mean) == (0.75, 4, 0)
    assert rows["overall"].mean == 0.375 and rows["correct"].mean == 0.6
    verdicts = [
        {"tag": i.image.metadata["tag"], "prompt": i.image.prompt, "correct": i.value}
        for i in images
    ]
    assert rows["overall"].mean == summarize(verdicts)["overall"]
    assert list(rows) == ["reward", "correct", "overall", "a", "b"]


def test_an_invalid_image_is_left_out_and_not_scored_zero():
    rows = named(rows_of(GENEVAL, judged("aabb", [1, NAN, NAN, NAN], [0.5, NAN, 0.25, NAN])))
    assert (rows["reward"].mean, rows["reward"].n) == (0.375, 2)
    assert (rows["correct"].mean, rows["correct"].n) == (1.0, 1)
    assert (rows["overall"].mean, rows["overall"].n) == (1.0, 1)  # tag b is unknown, not wrong
    assert rows["b"].n == 0 and math.isnan(rows["b"].mean) and math.isnan(rows["a"].stderr)


def test_the_headline_is_overall_or_the_part_or_the_value():
    tagged, plain = judged("ab", [1, 0]), judged("  ", [1, 0], [0.5, 0.25])
    mixed = [row for rows in (rows_of(GENEVAL, tagged), rows_of(OCR, plain)) for row in rows]
    assert suite.headline(EvalReport(mixed), [GENEVAL, OCR]).mean == (0.5 + 0.375) / 2
    assert math.isnan(named(rows_of(GENEVAL, tagged))["overall"].low)  # has no error
    report = EvalReport(rows_of(GENEVAL, plain))
    assert "overall" not in named(report.rows) and suite.headline(report, [GENEVAL]).mean == 0.5


@pytest.mark.parametrize("tags", ["ab", "  "])
def test_a_reward_that_failed_on_everything_has_no_headline_but_a_report(tags: str):
    # a reward that raised gives no parts
    images = [replace(score, parts={}) for score in judged(tags, [NAN, NAN])]
    report = EvalReport(rows_of(GENEVAL, images))
    assert math.isnan(suite.headline(report, [GENEVAL]).mean)
    assert "| geneval | correct | 0 | – |" in metric_table({"base": report.rows}).markdown()


def test_only_the_judge_says_how_often_an_image_counts():
    """By its part `weight`, which is no metric; metadata changes nothing."""
    about = {"index": 0, "copy": 0, "metadata": {"skills": ["part", "part"], "weight": 9}}
    rows = [
        {**about, "prompt": "a", "reason": None, "value": 1.0, "part": 1.0},
        {**about, "prompt": "b", "reason": "r", "value": 0.0, "weight": 3.0, "part": 0.0},
    ]
    images = [from_row(row) for row in rows]
    assert [to_row(image) for image in images] == rows
    assert {row.metric: row.mean for row in rows_of(OCR, images)} == {"reward": 0.25, "part": 0.25}
    once = [from_row({**row, "weight": None}) for row in rows]
    assert [row.mean for row in rows_of(OCR, once)] == [0.5, 0.5]


def test_an_evaluation_that_lost_too_many_images_says_which_and_why():
    images = judged("aaaab", [1, 1, NAN, 1, 0])
    images[2] = replace(images[2], reason="ValueError: no opinion")
    assert lost(GENEVAL, images, 0.2) == ""
    said = lost(GENEVAL, images, 0.19)
    assert all(text in said for text in ("geneval", "1 of 5", "no opinion"))
    assert lost(OCR, judged("  ", [NAN, NAN]), 1.0)  # nothing is no result, whatever is allowed
    tag = judged("a" * 99 + "b", [*[1.0] * 99, NAN])
    assert "'b'" in lost(GENEVAL, tag, 0.5)  # an overall of fewer tags is another number


def test_what_is_missing_is_told_of_every_number():
    rows = named(rows_of(OCR, judged("   ", [1.0, NAN, NAN], [0.5, NAN, 0.25])))
    assert (rows["reward"].n, rows["reward"].total) == (2, 3)
    overall = named(rows_of(GENEVAL, judged("aab", [1, NAN, 0])))["overall"]
    assert (overall.n, overall.total) == (2, 3)
    both = average([rows["reward"], overall])
    assert (both.n, both.total) == (4, 6)
    gap = difference(OCR, judged("  ", [1, NAN]), judged("  ", [1, 1]))
    assert (gap.n, gap.total) == (1, 2)
    features, reference = torch.arange(60.0)[:, None], torch.zeros(9, 1)
    features[5] = NAN
    measured = distance(features, each(features), reference)
    assert (measured.row.n, measured.row.total) == (59, 60)
    wide = features[: enough(1)].repeat(1, 60)
    few = distance(wide, each(wide), reference)
    assert math.isnan(few.value) and math.isnan(few.row.stderr)


def test_the_difference_of_overall_is_that_of_the_two_overalls():
    before, after = judged("aaab", [1, 0, 0, 0]), judged("aaab", [1, 1, 0, 1])
    row = difference(GENEVAL, before, after)
    a, b = (named(rows_of(GENEVAL, images))["overall"].mean for images in (before, after))
    assert row.metric == "overall" and row.mean == pytest.approx(b - a)
    with pytest.raises(ValueError, match="argument 2 is"):
        difference(GENEVAL, before[:2], after)


def each(features: torch.Tensor) -> list[str]:
    """A prompt of its own for every image."""
    return list(map(str, range(len(features))))


def shift(features: torch.Tensor, reference: torch.Tensor) -> float:
    """A distance whose error is known: how far the means are apart."""
    return float((features.mean() - reference.mean()).abs())


def test_the_error_of_a_distance_is_that_of_its_images_and_its_difference_is_paired(monkeypatch):
    monkeypatch.setattr("flowalign.eval.fidelity.frechet", shift)
    draws = torch.Generator().manual_seed(0)
    features, reference = torch.randn(400, 1, generator=draws), torch.zeros(10, 1)
    prompts = each(features)
    far, near = (distance(features + d, prompts, reference) for d in (3, 1))
    assert far.row.mean == pytest.approx(3 + float(features.mean()), abs=1e-5)
    assert far.row.stderr == pytest.approx(1 / 20, rel=0.4)  # 1 / sqrt(400); 20 groups
    # Student's t with 19 degrees of freedom
    assert far.row.high - far.row.mean == pytest.approx(2.093 * far.row.stderr, rel=1e-3)
    gap = far.minus(near).row
    assert gap.mean == pytest.approx(2, abs=1e-5) and gap.stderr < 1e-5 and gap.n == 400


def test_the_error_of_the_frechet_distance_is_its_spread_over_samples():
    draws = torch.Generator().manual_seed(0)
    reference = torch.randn(5000, 3, generator=draws)
    samples = [torch.randn(200, 3, generator=draws) + 0.5 for _ in range(200)]
    spread = torch.tensor([frechet(sample, reference) for sample in samples]).std()
    errors = [distance(sample, each(sample), reference).row.stderr for sample in samples[:20]]
    assert sum(errors) / len(errors) == pytest.approx(float(spread), rel=0.25)


def test_the_error_of_a_distance_is_over_prompts(monkeypatch):
    """Four equal images of a prompt say no more than one, wherever they stand."""
    monkeypatch.setattr("flowalign.eval.fidelity.frechet", shift)
    features = torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    reference, prompts = torch.zeros(10, 1), each(features)
    once = distance(features, prompts, reference).row
    for four, texts in (
        (features.repeat(4, 1), prompts * 4),
        (features.repeat_interleave(4, 0), [p for p in prompts for _ in range(4)]),
    ):
        row = distance(four, texts, reference).row
        assert (row.mean, row.stderr) == pytest.approx((once.mean, once.stderr), rel=1e-5)


def judge(backbone: Backbone, benchmark: Benchmark, *args: Any, **options: Any) -> JudgedImages:
    return suite.judge_set(backbone, ImageSet.of(benchmark), *args, **options)[0]


@pytest.fixture(scope="module")
def backbone(random_model: str) -> Backbone:
    return fakes.backbone(random_model)


def test_an_image_depends_neither_on_the_batch_nor_on_who_samples_it(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
):
    words = ["a", "b", "c", "d", "e"]
    benchmark = Benchmark("x", PromptBatch(words, ["x"] * 5, [{}] * 5), Judge(), 3)

    def run(size: int, world: int = 1, rank: int = 0) -> JudgedImages:
        processes: Any = SimpleNamespace(num_processes=world, process_index=rank)
        settings = SamplingConfig(steps=2, guidance=1.0, seed=7, batch_size=size)
        return judge(backbone, benchmark, settings, processes, keep=3, features=fakes.mean_colour)

    single = run(6)
    images = [score.image for score in single.scores]
    assert [(image.index, image.copy) for image in images] == list(product(range(5), range(3)))
    assert [image.prompt for image in images] == [word for word in words for _ in range(3)]
    assert len(single.pictures) == 9 and single.features is not None
    monkeypatch.setattr(suite, "gather_object", lambda objects: objects)
    for world in (2, 8):  # of eight processes, five have nothing to do
        shares = [run(6, world, rank) for rank in range(world)]
        assert [s for share in shares for s in share.scores] == single.scores  # not merely close
        assert [picture for share in shares for picture in share.pictures] == single.pictures
        features = [share.features for share in shares if share.features is not None]
        assert torch.equal(torch.cat(features), single.features)
    other = run(15)
    values = [torch.tensor([s.value for s in judged.scores]) for judged in (other, single)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(other.features, single.features)


def test_features_are_those_of_the_images_and_nan_where_there_is_no_image(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
):
    mark = Benchmark("x", PromptBatch(["a", "b"], ["x"] * 2, [{}] * 2), Judge())
    images = torch.randint(256, (2, 3, 8, 8)) / 255
    images[1, 0, 0, 0] = NAN
    monkeypatch.setattr(suite, "generate", lambda *args: images)
    settings = SamplingConfig(steps=2, guidance=1.0, seed=7, batch_size=2)
    result = judge(backbone, mark, settings, keep=2, features=fakes.mean_colour)
    assert result.features is not None and bool(result.features[1].isnan().all())
    torch.testing.assert_close(result.features[0], images[0].mean((1, 2)))
    torch.testing.assert_close(pixels_of(result.pictures[0]), images[0], rtol=0, atol=0.5 / 255)
    assert judge(backbone, mark, settings).features is None


@pytest.fixture
def config(tmp_path: Path, random_model: str) -> Path:
    """An evaluation of the random base and of an adapter that changes nothing (B = 0)."""
    model = fakes.backbone(random_model)
    model.add_adapter("fresh", rank=2, alpha=2.0)
    model.save_adapter("fresh", tmp_path / "adapter")
    return fakes.evaluation(
        random_model, tmp_path, ['a "A"', 'a "B"', 'a "C"'],
        {"limit": 2, "reward": {"name": "fakes:Faulty", "options": {"rows": [1]}}},
        models={"fresh": str(tmp_path / "adapter"), "base": None}, max_invalid_share=0.5,
    )  # fmt: skip


@pytest.mark.usefixtures("drawn")
def test_the_command_writes_results_table_and_grid(config: Path) -> None:
    assert main(["--config", str(config)]) == 0
    folder = config.parent / "out"
    results = json.loads((folder / "results.json").read_text())
    models = results["models"]
    code = results["benchmarks"]["red"].pop("code")
    assert code.keys() == {"fakes:Faulty"}
    assert results["benchmarks"] == {
        "red": {"reward": "Faulty", "headline": None, "average": "average"}
    }
    assert list(models) == ["fresh", "base"] and models["base"]["settings"]["steps"] == 2
    first, second = models["fresh"]["images"]["red"]
    assert second["value"] is None and first["value"] == models["base"]["images"]["red"][0]["value"]
    (gain, both) = models["base"]["difference"]
    assert (gain["benchmark"], gain["mean"], gain["n"]) == ("red", 0, 1)
    assert both["benchmark"] == "average" and models["fresh"]["difference"] == []
    assert models["fresh"]["average"]["mean"] == first["value"]
    assert models["base"]["fidelity"] is None
    table = (folder / "table.md").read_text()
    assert "| base − fresh | +0.00000 (n 1 of 2) |" in table
    assert table.count(NO_ERROR.format("red")) == 2  # below scores and differences
    assert (folder / "grid.png").stat().st_size > 1000
    assert "base − fresh" in (folder / "report.html").read_text()
    shown = sorted(str(path.relative_to(folder)) for path in folder.glob("images/**/*.png"))
    assert shown == [f"images/{m}/red/0000{i}_0.png" for m in ("base", "fresh") for i in (0, 1)]


def test_a_model_is_sampled_at_its_own_guidance(config: Path):
    assert main(["--config", str(config), "guidance={base: 3}"]) == 0
    models = json.loads((config.parent / "out" / "results.json").read_text())["models"]
    assert models["base"]["settings"]["guidance"] == 3
    first, second = (models[name]["images"]["red"][0]["value"] for name in ("fresh", "base"))
    assert first != second
    table = (config.parent / "out" / "table.md").read_text()
    assert f"guidance {models['fresh']['settings']['guidance']:g}, 3 for base" in table


@pytest.fixture
def fidelity() -> list[str]:
    """Overrides: a distance between mean colours of 30 images."""
    return ["fidelity.features=fakes:mean_colour", "benchmarks.0.limit=30"]


def test_fidelity_is_a_column_and_it_is_paired(config: Path, fidelity: list[str]):
    references = config.parent / "clean" / "below"
    references.mkdir(parents=True)
    for index in range(30):  # of any size: they are cropped to the model's
        Image.new("RGB", (40 + index, 50), (255, 255, 255)).save(references / f"{index}.png")
    (config.parent / "prompts.txt").write_text("\n".join(f"a {i}" for i in range(30)))
    where = f"fidelity.reference={config.parent / 'clean'}"
    compare = "compare={base: [fresh]}"
    assert main(["--config", str(config), *fidelity, where, compare]) == 0
    results = json.loads((config.parent / "out" / "results.json").read_text())
    row = results["models"]["base"]["fidelity"]
    assert (row["benchmark"], row["metric"], row["n"]) == ("fidelity", "frechet", 30)
    assert 0 < row["mean"] < 1 and 0 < row["stderr"] < 0.1
    gap = results["compare"]["base"]["fresh"][1]
    assert (gap["benchmark"], gap["mean"], gap["stderr"]) == ("fidelity", 0, 0)
    table = (config.parent / "out" / "table.md").read_text()
    assert "|  | red | fidelity ↓ |\n" in table and "base minus others" in table


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reference=adapter", "reference: 'adapter': the folder holds no"),
        ("reference=tiny", "reference: 'tiny' needs prompts of the tiny"),
        ("reference=clean", "reference: 2 images are too few for a distance"),
        ("features=fakes:nothing", "features: features 'fakes:nothing'"),
    ],
)
def test_fidelity_that_cannot_be_measured_is_refused(
    config: Path, fidelity: list[str], override: str, said: str, capsys, monkeypatch
):
    monkeypatch.chdir(config.parent)
    (config.parent / "clean").mkdir()
    for index in range(2):
        Image.new("RGB", (32, 32)).save(config.parent / "clean" / f"{index}.png")
    assert main(["--config", str(config), *fidelity, f"fidelity.{override}"]) == 2
    assert f"fidelity.{said}" in capsys.readouterr().err
    assert not (config.parent / "out").exists()


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every time that a text encoder is brought to the device, or encodes a text."""
    events: list[str] = []
    to_device, encode = Placement._to_device, TextEncoder._encode
    monkeypatch.setattr(
        Placement, "_to_device", lambda self: [events.append("brought"), to_device(self)]
    )
    monkeypatch.setattr(
        TextEncoder,
        "_encode",
        lambda self, texts: [events.extend(["encode"] * len(texts)), encode(self, texts)][1],
    )
    return events


def test_the_text_of_an_evaluation_is_encoded_at_once_and_not_per_batch(
    random_model: str, visits: list[str]
) -> None:
    """The three encoders come once, for two evaluations, in which each text is encoded once."""
    backbone = fakes.backbone(random_model, offload_text_encoders=True)
    _ = backbone.text.negative
    words = [f"a {letter}" for letter in "ABCDEFGHI"]
    mark = Benchmark("x", PromptBatch(words, ["x"] * 9, [{}] * 9), Judge())
    settings = SamplingConfig(steps=2, guidance=4.5, seed=7, batch_size=2)
    visits.clear()
    first, second = (judge(backbone, mark, settings, keep=9) for _ in range(2))
    assert (visits.count("brought"), visits.count("encode")) == (3, 9)
    assert first == second


def test_the_parts_of_a_product_are_columns_that_do_not_count_twice(random_model, tmp_path):
    scaled = {"reward": {"name": "fakes:constant"}, "median": 0.5, "spread": 1}
    parts = [{"name": "fakes:redness", "label": "red"}, {"name": "normalized", "options": scaled}]
    both = {"name": "both", "reward": {"name": "product", "options": {"rewards": parts}}}
    path = fakes.evaluation(random_model, tmp_path, ["a", "b"], both, {"name": "red"})
    assert main(["--config", str(path)]) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    assert "|  | both | both_red | both_normalized | red | average |" in table
    assert "both: product of redness and normalized of constant" in table
    models = json.loads((tmp_path / "out" / "results.json").read_text())["models"]
    means = {(row["benchmark"], row["metric"]): row["mean"] for row in models["base"]["rows"]}
    average = (means["both", "reward"] + means["red", "reward"]) / 2
    assert models["base"]["average"]["mean"] == pytest.approx(average)
