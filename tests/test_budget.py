"""`flowalign doctor --hours`: what it proposes fits, by the doctor's own prediction."""

import re
import shlex
from pathlib import Path
from typing import Any

import fakes
import pytest
from accelerate.state import AcceleratorState

from flowalign import config
from flowalign.commands.cli import main
from flowalign.commands.doctor import advise
from flowalign.commands.doctor.advise import Device, Forecast
from flowalign.commands.doctor.pace import PHASES, Pace
from flowalign.config.safe_yaml import dump_yaml

ROOT = Path(__file__).parent.parent
ORDER = [cut.key for cut in advise.CUTS]
RATE = 1e-6  # TFLOP/s: a slow machine, so that a small run takes many hours


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def big(model: str, folder: Path, kind: str) -> dict[str, Any]:
    """A run of many images, that every cut of its kind shortens."""
    more = ["rollout.prompts=512", "rollout.group_size=16", "rollout.steps=8", "train.updates=400"]
    run = {
        "grpo": fakes.settings,
        "nft": lambda *given: fakes.forward(*given, "nft.noise_levels=6"),
        "opd": fakes.distillation,
    }[kind](model, folder / "run", *more)
    return run.model_dump(mode="json", exclude_unset=True)


def doctor(path: Path, capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, list[str]]:
    """Its exit status, and what it printed."""
    rate = ["--no-model", "--tflops", str(RATE), "--memory", "80"]
    status = main(["doctor", "--config", str(path), *rate, *given])
    AcceleratorState._reset_state(reset_partial_state=True)
    return status, capsys.readouterr().out.splitlines()


def hours(lines: list[str]) -> float:
    (text,) = re.findall(r" time: ([0-9.]+) h", "\n".join(lines))
    return float(text)


def cuts(lines: list[str]) -> list[str]:
    return shlex.split(lines[-2])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("nft", marks=pytest.mark.slow),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("grpo", "opd")),
    ],
)
def test_a_run_is_cut_in_the_order_of_the_table_until_it_fits(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "big.yaml"
    path.write_text(dump_yaml(big(random_model, tmp_path, kind)))
    status, lines = doctor(path, capsys)
    whole = hours(lines)
    assert status == 0 and whole > advise.LONG  # a note
    for share in (0.3, 0.004):
        status, lines = doctor(path, capsys, "--hours", str(share * whole))
        assert status == 1
        keys = [text.partition("=")[0].replace(f"{kind}.", "{stage}.") for text in cuts(lines)]
        assert len(set(keys)) == len(keys) and keys == sorted(keys, key=ORDER.index)
        status, after = doctor(path, capsys, "--hours", str(share * whole), *cuts(lines))
        least = 0 if keys[-1] in ("rollout.window", "student.noise_levels.select") else 0.7
        assert status == 0 and least * share * whole < hours(after) <= share * whole
    assert len(keys) > 2
    status, lines = doctor(path, capsys, "--hours", str(1e-6 * whole))
    assert status == 1 and any("the least" in line for line in lines)


@pytest.mark.slow
def test_what_the_hours_and_the_memory_ask_for_is_one_line(random_model, tmp_path, capsys) -> None:
    path = tmp_path / "big.yaml"
    path.write_text(dump_yaml(big(random_model, tmp_path, "nft")))
    changes = ["rollout.prompts=32", "optimizer.micro_batch=64"]
    whole = hours(doctor(path, capsys, *changes)[1])
    given = ["--memory", "0.675", "--hours", str(whole / 10), *changes]
    status, lines = doctor(path, capsys, *given)
    assert status == 1 and any("does not fit" in line for line in lines)
    keys = [text.partition("=")[0] for text in cuts(lines)]
    assert {"rollout.prompts", "model.gradient_checkpointing"} <= set(keys)
    status, lines = doctor(path, capsys, *given, *cuts(lines))
    assert status == 0, lines


@pytest.mark.slow
def test_the_stages_of_a_recipe_share_the_hours(random_model, tmp_path, capsys) -> None:
    nft = big(random_model, tmp_path, "nft")
    model = nft.pop("model")
    short = {**nft, "train": {"updates": 2}}
    (task,) = nft["tasks"]
    marks = [{"name": "red", "prompts": task["prompts"], "reward": task["reward"]}]
    table = {"stage": "eval", "models": {"one": "stage:long"}, "benchmarks": marks}
    table["sampling"] = {"guidance": 1.0}  # as it is trained
    stages = {"long": {**nft, "set": ["train.updates=300"]}, "short": short, "table": table}
    data = {"stage": "recipe", "output": str(tmp_path / "all"), "model": model, "stages": stages}
    path, variant = tmp_path / "recipe.yaml", tmp_path / "variant.yaml"
    path.write_text(dump_yaml(data))
    variant.write_text("nft: {rollout: {prompts: 256}}")
    given = ["--variant", str(variant)]
    whole = hours(doctor(path, capsys, *given)[1])
    given += ["--hours", str(whole / 10)]
    status, lines = doctor(path, capsys, *given)
    assert status == 1
    (text,) = cuts(lines)  # the others are short
    assert text.startswith('stages.long.set=["train.updates=300", ')
    status, lines = doctor(path, capsys, *given, text)
    assert status == 0 and hours(lines) <= whole / 10


MODELS: dict[str, Any] = {}  # what was measured of them: of one base, in all tests


def planned(stage: Any, device: Device, pace: Pace | None = None) -> Forecast:
    return Forecast("run", stage, device, models=MODELS).predicted().timed(pace)


def check_proposal(stage: Any, device: Device, limit: float, capsys: Any) -> list[str]:
    """What is proposed for so many hours, by the doctor's own prediction of it: it fits, it ends in
    time, nothing more is proposed; and the hours before the cuts are those of a run that fits."""
    whole = planned(stage, device)
    assert not advise.within(stage, [whole], limit)
    lines = capsys.readouterr().out.splitlines()
    changes = shlex.split(lines[-1])
    data = stage.model_dump(mode="json")
    for_memory = [change for change, _ in whole.advice]
    fitting = planned(config.parse(data, for_memory, stage=type(stage)), device)
    assert whole.fitting.hours == pytest.approx(fitting.hours)
    assert hours(lines) == pytest.approx(fitting.hours, abs=0.01)
    cut = planned(config.parse(data, changes, stage=type(stage)), device)
    assert not cut.too_large
    if least := re.findall(r"([0-9.]+) h are the least", "\n".join(lines)):
        assert cut.hours == pytest.approx(float(least[0]), abs=0.01) and cut.hours > limit
        return changes
    assert 0 < cut.hours <= limit
    assert advise.within(cut.stage, [cut], limit)
    assert "=" not in capsys.readouterr().out
    return changes


SMALL = [  # a run whose peak is its weights
    "alarm=null", "evaluation=null", "model.gradient_checkpointing=true",
    "model.offload_text_encoders=true", "model.dtype=bfloat16", "model.decode_batch=1",
    "optimizer.micro_batch=1", "rollout.batch_size=1", "rollout.prompts=16",
]  # fmt: skip


@pytest.mark.parametrize("gpu", ["4090", pytest.param("h100", marks=pytest.mark.slow)])
def test_a_proposal_is_a_fixed_point_of_the_prediction(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str
) -> None:
    """With the slower rate of 4 bits, which the memory asks for."""
    run = config.parse(big(random_model, tmp_path, "nft"), SMALL)
    whole = planned(run, Device(1, gpu))
    packed = whole.after("model.quantization=nf4")
    assert packed.hours > 1.2 * whole.hours
    room = 0.3 * whole.estimate.peak + 0.7 * packed.estimate.peak
    size = (room + advise.CUDA_CONTEXT) / advise.USABLE_SHARE / advise.GIB
    changes = check_proposal(run, Device(1, gpu, size), 0.5 * packed.hours, capsys)
    assert changes[0] == "model.quantization=nf4" and len(changes) > 1


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["4090", "a100-40gb", "h100"])
@pytest.mark.parametrize(
    "family", ["sd35_medium", "flux", "flux2", "qwen_image", "sana", "z_image"]
)
def test_a_proposal_for_a_family_is_a_fixed_point(
    family: str, gpu: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # no prompt set is here: they are taken to be long enough
    MODELS.clear()
    for name in ("teacher_ocr_nft", "student_flow_opd"):
        run = config.load(ROOT / "configs" / family / f"{name}.yaml")
        whole = planned(run, Device(1, gpu)).fitting
        if whole.too_large:
            continue
        for share in (0.5, 0.05):
            check_proposal(run, Device(1, gpu), share * whole.hours, capsys)


def test_a_pace_that_was_measured_is_that_of_the_weights(random_model: str, tmp_path: Path) -> None:
    pace = Pace(dict.fromkeys([*PHASES, "rewards"], 1e12), "measured here")
    run = planned(config.parse(big(random_model, tmp_path, "nft")), Device(1), pace)
    packed = run.after("model.quantization=nf4")
    assert packed.pace and packed.pace.rates["sampling"] == pytest.approx(1e12 / 1.5)
    assert packed.after("model.quantization=null").hours == pytest.approx(run.hours)


@pytest.mark.parametrize(("prompts", "noted"), [(512, False), (16, True)])
def test_judges_that_are_not_trained_take_a_twentieth_of_a_run_at_most(
    random_model: str, tmp_path: Path, prompts: int, noted: bool
) -> None:
    judge = {"name": "pickscore", "options": {"model": "tiny"}}
    watch = {"name": "others", "prompts": "tiny/ocr_val", "limit": 400, "reward": judge}
    run = big(random_model, tmp_path, "nft")
    run["evaluation"] = {"every": 100, "watch": [watch]}
    run["tasks"][0]["validation"] = "tiny/preference_val"
    stage = config.parse(run, ["train.updates=10", f"rollout.prompts={prompts}"])
    pace = Pace(dict.fromkeys([*PHASES, "rewards"], 1e12), "measured here")
    findings = planned(stage, Device(1), pace).findings()
    assert any(found.key == "watch" for found in findings) == noted


def test_a_run_that_nothing_makes_fit_has_no_hours_and_says_what_is_large(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "big.yaml"
    path.write_text(dump_yaml(big(random_model, tmp_path, "nft")))
    status, lines = doctor(path, capsys, "--memory", "0.654", "--hours", "1e9")
    text = "\n".join(lines)
    assert status == 1 and "does not fit" in text and not re.search(r"time: [0-9.]+ h", text)
    (last,) = [line for line in lines if "no other setting helps" in line]
    assert "lora.rank" not in last and last.count("GiB") == 3


def test_hours_without_a_rate_are_a_fault(random_model, tmp_path, capsys) -> None:
    run = fakes.settings(random_model, tmp_path / "run")
    assert not advise.within(run, [Forecast("run", run, Device(1))], 1.0)
    assert "--tflops" in capsys.readouterr().out


def test_the_first_rows_of_a_set_that_may_be_sorted_do_not_stand_for_it(random_model, tmp_path):
    path = fakes.evaluation(random_model, tmp_path, ["a"], {"name": "plain"}, {"name": "tagged"})
    stage = config.load(path, ["benchmarks.1.prompts=tagged.jsonl"], stage=config.EvalStage)
    forecast = Forecast("table", stage, Device(1))
    _, limit = (cut for cut in advise.CUTS if cut.key.startswith("benchmarks"))
    assert advise._choices(limit, forecast)[0] == ["benchmarks.0.limit=128"]


def test_the_page_of_the_doctor_has_the_order_of_the_cuts() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [line.split("`")[1] for line in page.split("## Hours")[1].splitlines() if "| `" in line]
    assert rows[: len(ORDER)] == [key.format(stage="STAGE") for key in ORDER]
