"""`flowalign doctor --config`: sound runs pass, each planted fault is named."""

from pathlib import Path

import fakes
import pytest
from accelerate.state import AcceleratorState
from PIL import Image

from flowalign import config
from flowalign.backbone.adapters import read_lora, write_lora
from flowalign.checks import Launch, stage_problems
from flowalign.commands import recipe
from flowalign.commands.cli import main
from flowalign.commands.doctor import live

TINY = sorted(Path(__file__).parent.parent.glob("configs/tiny/[!_]*.yaml"))
EVALUATED = [
    "tasks.0.validation=tiny/geneval_test",
    "evaluation={every: 2, prompts: 4}",
    "model.max_sequence_length=64",
]


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)


def faults(findings):
    return [finding for finding in findings if finding.level == "fault"]


def advised(run):
    """All that the doctor finds in a config."""
    return stage_problems(run, Launch(advise=True))


def is_one(found, key, text):
    """Whether there is one problem, of this key, and it says this."""
    return [problem.key for problem in found] == [key] and text in found[0].text


@pytest.mark.slow
@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_shipped_config_has_no_fault(path, tmp_path, monkeypatch):
    """Pairs are where one makes them."""
    monkeypatch.chdir(tmp_path)
    fakes.write_pairs(tmp_path / "outputs" / "tiny" / "pairs", size=(96, 96))
    launch = Launch(resume=False, advise=True)
    _, problems = recipe.stages_and_problems(
        config.load(path, stage=config.Stage), path.parent, launch
    )
    assert [problem for problem in problems if problem.level != "note"] == []


@pytest.mark.parametrize("kind", ["grpo", "opd", "sft", "ode", "dpo"])
def test_a_sound_run_has_no_fault_with_its_model(random_model, tmp_path, kind):
    if kind == "grpo":
        run = fakes.settings(random_model, tmp_path / "run")
    elif kind == "dpo":
        run = fakes.pairs(random_model, tmp_path / "run")
    else:
        more = ["rollout.kind=ode", "student.weighting=velocity"] if kind == "ode" else []
        stage = "sft" if kind == "sft" else "opd"
        run = fakes.distillation(random_model, tmp_path / "run", *more, stage=stage)
    findings, pace = live.examine_stage(run)
    assert faults(findings) == []
    assert pace and min(pace.rates.values()) > 0
    kinds = {finding.key for finding in findings}
    assert ("ratio" in kinds) == (kind == "grpo")
    assert "update" in kinds


# Faults of the numbers -------------------------------------------------------------------------


FAULTS = [
    ([*EVALUATED, "evaluation.guidance=4.5"], "guidance", "evaluation.guidance = 1.0"),
    ([*EVALUATED, "evaluation.steps=2"], "schedule", "2 steps"),
    (["rollout.noise_level=1e-4"], "noise", "steps [0, 1, 2]"),
    (["grpo.clip_range=0.2"], "clip", "grpo.clip_range = 0.2"),
    (["grpo.clip_range=1e-8"], "clip", "grpo.clip_range = 1e-08"),
    (["ema={}", "train.updates=16"], "ema", "64%"),
    (["model.max_sequence_length=4"], "length", "100% of the prompts of task 'red'"),
    (["tasks.0.validation={folder}/prompts.txt", *EVALUATED[1:]], "validation", "4 of 4 prompts"),
]


def test_a_model_that_samples_nothing_is_not_predicted(tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    made = {"theirs": {"images": str(tmp_path)}}
    path = fakes.evaluation("somebody/large", tmp_path, ["a"], models=made)
    assert main(["doctor", "--config", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "GiB a process" not in printed and "memory:" not in printed and "somebody" not in printed


def test_a_fault_of_the_config_is_named(random_model, tmp_path):
    for more in ([], ["ema.every=50"]):  # which is never averaged: the run returns its adapter
        sound = fakes.settings(random_model, tmp_path / "run", *EVALUATED, *more)
        assert faults(advised(sound)) == []
    half = advised(fakes.settings(random_model, tmp_path / "run", "model.dtype=float16"))
    assert is_one([p for p in half if p.level == "note"], "dtype", "bfloat16")
    for changes, kind, key in FAULTS:
        given = [change.replace("{folder}", str(tmp_path)) for change in changes]
        found = faults(advised(fakes.settings(random_model, tmp_path / "run", *given)))
        assert is_one(found, kind, key), (changes, found)


# Faults of the adapters ------------------------------------------------------------------------


def test_a_teacher_that_equals_the_base_is_named(random_model, tmp_path):
    run = fakes.distillation(random_model, tmp_path / "run")
    assert faults(advised(run)) == []
    lora = read_lora(run.inputs["teachers.odd"])
    weights = {key: weight * (".lora_B" not in key) for key, weight in lora.weights.items()}
    write_lora(run.inputs["teachers.odd"], weights, lora.metadata)
    assert is_one(faults(advised(run)), "teachers.odd", "equals the base")


# Faults that only the model shows --------------------------------------------------------------


@pytest.mark.slow
def test_few_bits_and_other_batches_make_a_ratio_that_is_not_one(random_model, tmp_path):
    def ratio(*changes: str) -> list[str]:
        run = fakes.settings(random_model, tmp_path / "run", "model.dtype=bfloat16", *changes)
        return [p.text for p in faults(live.examine_stage(run)[0]) if p.key == "ratio"]

    assert ratio("optimizer.micro_batch=8") == []
    (text,) = ratio("rollout.batch_size=8", "optimizer.micro_batch=1")
    assert "rollout.batch_size" in text and "optimizer.micro_batch" in text


@pytest.mark.slow
def test_an_adapter_that_was_trained_with_dropout_drops_nothing_here(random_model, tmp_path):
    adapter = fakes.teachers(random_model, tmp_path)["odd"]
    lora = read_lora(adapter)
    write_lora(adapter, lora.weights, {**lora.metadata, "lora_dropout": 0.5})
    run = fakes.settings(random_model, tmp_path / "run", f"lora.init={adapter}")
    assert "ratio" not in [problem.key for problem in faults(live.examine_stage(run)[0])]


def test_a_fault_of_a_reward_is_named(random_model, tmp_path):
    run = fakes.settings(random_model, tmp_path / "run", "tasks.0.reward.name=fakes:constant")
    first = faults(live.examine_stage(run)[0])[0]
    assert first.key == "reward 'fakes:constant' of task 'red'" and "constant" in first.text


def test_a_learning_rate_that_blows_up_is_named(random_model, tmp_path):
    run = fakes.distillation(random_model, tmp_path / "run", "optimizer.lr=10.0")
    assert "update" in [problem.key for problem in faults(live.examine_stage(run)[0])]


@pytest.mark.parametrize(("scale", "level"), [("1.0", "fault"), ("4.5", None), ("6.0", "note")])
def test_a_mixture_of_scales_is_named(random_model, tmp_path, scale, level):
    changes = ["rollout.guidance=4.5", f"teachers.odd.guidance={scale}"]
    run = fakes.distillation(random_model, tmp_path / "run", alone="odd").model_dump(mode="json")
    findings = advised(config.parse(run, changes))
    about = [f for f in findings if f.key == "guidance" and f.text.startswith("teachers.odd")]
    levels = [finding.level for finding in about]
    assert levels == ([level] if level else [])


# The command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_tells_all_and_ends_by_its_findings(random_model, tmp_path, capsys):
    path = str(tmp_path / "config.yaml")
    Path(path).write_text(config.to_yaml(fakes.settings(random_model, tmp_path / "run")))
    assert main(["doctor", "--config", path, "--trust"]) == 0  # its reward is fakes:redness
    printed = capsys.readouterr().out
    for text in ("torch ", "device ", "ratio: ", "peak in update", "on 1 x measured"):
        assert text in printed
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # nothing is left behind
    assert main(["doctor", "--config", path, "--no-model", "--memory", "0.654"]) == 1
    assert "fault  memory: does not fit" in capsys.readouterr().out
    assert main(["doctor", "--config", path, "rollout.groupsize=2"]) == 2
    assert "`group_size`" in capsys.readouterr().err  # the key that was meant
