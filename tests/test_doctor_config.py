"""`flowalign doctor --config`: sound runs pass, each planted fault is named."""

import json
from pathlib import Path

import fakes
import pytest
import torch
from accelerate.state import AcceleratorState
from test_doctor import of_the_batch  # noqa: F401 (a reward that is planted by its name)

from flowalign import config
from flowalign.adapters.files import read_lora, write_lora
from flowalign.cli import main
from flowalign.doctor import live, plan

TINY = sorted(Path(__file__).parent.parent.glob("configs/tiny/*.yaml"))
EVALUATED = [
    "tasks.0.validation=tiny/geneval_test",
    "evaluation={every: 2, prompts: 4}",
    "model.max_sequence_length=64",
]


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)


def faults(found):
    return [finding.text for finding in found if finding.level == "fault"]


def stages(path):
    root = config.load(path, stage=config.Stage)
    if isinstance(root, config.RecipeStage):
        from flowalign.recipe import plan as plan_recipe

        return list(plan_recipe(root, path.parent).values())
    return [root]


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_shipped_config_has_no_fault(path):
    for stage in stages(path):
        if isinstance(stage, config.TrainingStage):
            assert faults(plan.examine(stage)) == []


@pytest.mark.parametrize("kind", ["grpo", "opd", "sft", "ode"])
def test_a_sound_run_has_no_fault_with_its_model(random_model, tmp_path, kind):
    if kind == "grpo":
        found = fakes.settings(random_model, tmp_path / "run")
    else:
        more = ["rollout.kind=ode", "student.weighting=velocity"] if kind == "ode" else []
        stage = "sft" if kind == "sft" else "opd"
        found = fakes.distillation(random_model, tmp_path / "run", *more, stage=stage)
    seen = live.examine(found)
    assert faults(seen.findings) == []
    assert seen.rate and seen.rate > 0
    said = " ".join(finding.text for finding in seen.findings)
    assert ("ratio: within" in said) == (kind in ("grpo", "opd"))
    assert ("teacher 'even'" in said) == (kind != "grpo")
    assert "update: two of them change the velocity" in said


# Faults of the numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.attention=flash"], "attention: model.attention 'flash'"),
        (["model.attention=no_such"], "attention: model.attention 'no_such'"),
        ([*EVALUATED, "evaluation.guidance=4.5"], "guidance: trained at 1.0, evaluated at 4.5"),
        ([*EVALUATED, "evaluation.steps=2"], "schedule: evaluated with 2 steps"),
        (["rollout.noise_level=1e-4"], "noise: steps [0, 1, 2]"),
        (["grpo.clip_range=0.2"], "clip: grpo.clip_range = 0.2: log-probs are means"),
        (["grpo.clip_range=1e-8"], "clip: grpo.clip_range = 1e-08"),
        (["ema={}", "train.updates=16"], "ema: 64% of the average"),
        (["model.max_sequence_length=4"], "length: 100% of the prompts of task 'red'"),
    ],
)
def test_a_fault_of_the_config_is_named(random_model, tmp_path, changes, said):
    sound = fakes.settings(random_model, tmp_path / "run", *EVALUATED[1:], *EVALUATED[:1])
    assert faults(plan.examine(sound)) == []
    found = faults(plan.examine(fakes.settings(random_model, tmp_path / "run", *changes)))
    assert len(found) == 1 and found[0].startswith(said)


def test_an_average_that_is_never_taken_is_no_fault(random_model, tmp_path):
    """The run returns its adapter then."""
    found = fakes.settings(random_model, tmp_path / "run", *EVALUATED, "ema.every=50")
    assert not [text for text in faults(plan.examine(found)) if text.startswith("ema")]


def test_validation_prompts_that_are_trained_on_are_named(random_model, tmp_path):
    changes = [*EVALUATED, f"tasks.0.validation={tmp_path / 'prompts.txt'}"]
    found = fakes.settings(random_model, tmp_path / "run", *changes)
    (text,) = faults(plan.examine(found))
    assert text.startswith("validation: 4 of 4 prompts") and fakes.PROMPTS[0] in text


def test_absorbed_guidance_must_not_be_applied_again_in_the_evaluation(random_model, tmp_path):
    changes = ["rollout.guidance=4.5", "student.guidance=1.0"]
    raw = fakes.distillation(random_model, tmp_path / "run", *changes).model_dump(mode="json")
    assert faults(plan.examine(config.parse(raw))) == []
    for task in raw["tasks"]:
        task["validation"] = "tiny/geneval_test"
    raw["model"]["max_sequence_length"] = 64
    (text,) = faults(plan.examine(config.parse(raw | {"evaluation": {"every": 2}})))
    assert text.startswith("guidance: trained at 1.0, evaluated at 4.5")


# Faults of the adapters ------------------------------------------------------------------------


def taught(model, folder, **kw):
    found = fakes.distillation(model, folder / "run", **kw)
    assert isinstance(found, config.OpdStage)
    return found


def replanted(folder, change):
    """Rewrite a saved adapter: change(weights, metadata)."""
    lora = read_lora(folder)
    change(lora.weights, lora.metadata)
    write_lora(folder, lora.weights, lora.metadata)


def zero(weights, metadata):
    for key, weight in weights.items():
        if ".lora_B" in key:
            weight.zero_()


def narrow(weights, metadata):
    for key, weight in weights.items():
        if ".lora_A" in key:
            weights[key] = weight[:, :-8].contiguous()


def endless(weights, metadata):
    next(iter(weights.values()))[0, 0] = torch.inf


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (zero, "teachers.odd: equals the base"),
        (narrow, "teachers.odd: an adapter of another base: its layer transformer_blocks.0"),
        (endless, "teachers.odd: its weights are not finite"),
    ],
)
def test_a_fault_of_a_teacher_is_named(random_model, tmp_path, change, said):
    found = taught(random_model, tmp_path)
    assert faults(plan.examine(found)) == []
    replanted(found.teachers["odd"].adapter, change)
    (text,) = faults(plan.examine(found))
    assert text.startswith(said)


def test_a_teacher_of_another_base_by_its_own_word_is_refused(random_model, tmp_path, capsys):
    found = taught(random_model, tmp_path)
    change = {"base_model_name_or_path": "someone/else"}
    replanted(found.teachers["odd"].adapter, lambda weights, metadata: metadata.update(change))
    path = written(found, tmp_path)
    assert main(["doctor", "--config", path, "--no-model"]) == 1
    assert "was trained on 'someone/else'" in capsys.readouterr().out


def test_a_teacher_that_is_the_students_start_is_named(random_model, tmp_path):
    found = taught(random_model, tmp_path, alone="odd")
    start = found.teachers["odd"].adapter
    again = config.parse(found.model_dump(mode="json"), [f"lora.init={start}"])
    (text,) = faults(plan.examine(again))
    assert text.startswith("teachers.odd: it is the student's start")


# Faults that only the model shows --------------------------------------------------------------


def test_few_bits_and_other_batches_make_a_ratio_that_is_not_one(random_model, tmp_path):
    def ratio(*changes: str) -> list[str]:
        run = fakes.settings(random_model, tmp_path / "run", "model.dtype=bfloat16", *changes)
        return [text for text in faults(live.examine(run).findings) if text.startswith("ratio")]

    assert ratio() == []
    (text,) = ratio("rollout.batch_size=8", "optimizer.micro_batch=1")
    assert "let rollout.batch_size equal optimizer.micro_batch" in text


def test_an_adapter_that_was_trained_with_dropout_drops_nothing_here(random_model, tmp_path):
    adapter = fakes.teachers(random_model, tmp_path)["odd"]
    replanted(adapter, lambda weights, metadata: metadata.update(lora_dropout=0.5))
    run = fakes.settings(random_model, tmp_path / "run", f"lora.init={adapter}")
    assert not any(text.startswith("ratio") for text in faults(live.examine(run).findings))


@pytest.mark.parametrize(
    ("reward", "said"),
    [("fakes:constant", "constant: every image"), ("test_doctor:of_the_batch", "one by one")],
)
def test_a_fault_of_a_reward_is_named(random_model, tmp_path, reward, said):
    found = fakes.settings(random_model, tmp_path / "run", f"tasks.0.reward.name={reward}")
    texts = faults(live.examine(found).findings)
    assert texts and texts[0].startswith(f"reward {reward!r} of task 'red': {said}")


def test_a_learning_rate_that_blows_up_is_named(random_model, tmp_path):
    found = fakes.distillation(random_model, tmp_path / "run", "optimizer.lr=10.0")
    assert any(text.startswith("update:") for text in faults(live.examine(found).findings))


def test_float16_is_noted(random_model, tmp_path):
    for dtype, expected in (("float16", 1), ("bfloat16", 0)):
        found = fakes.settings(random_model, tmp_path / "run", f"model.dtype={dtype}")
        notes = [f.text for f in plan.examine(found) if f.level == "note"]
        assert sum(text.startswith("dtype:") for text in notes) == expected


def test_keys_that_the_start_overrules_are_noted(random_model, tmp_path):
    init = fakes.teachers(random_model, tmp_path)["even"]
    for key, expected in (("", []), (", rank: 9", ["lora.rank"])):
        given = f"{{init: {init}{key}}}"
        found = fakes.settings(random_model, tmp_path / "run", f"lora={given}")
        notes = [f.text for f in plan.examine(found) if f.level == "note"]
        assert [text.split(":")[0] for text in notes if text.startswith("lora.")] == expected


@pytest.mark.parametrize("by", ["adapter", "guidance"])
def test_a_teacher_that_scores_less_than_the_students_start_is_named(random_model, tmp_path, by):
    """Whichever of the two is redder: as a teacher it is sound, as a student it is made worse."""
    ours = fakes.teachers(random_model, tmp_path)
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("\n".join(f"a sign of {i}" for i in range(24)))
    told = {}
    for first, second in (("even", "odd"), ("odd", "even")):
        start, teacher = (ours[first], ours[second]) if by == "adapter" else (ours["odd"],) * 2
        scales = {"even": 1.0, "odd": 4.5}
        guidance = [] if by == "adapter" else [
            f"rollout.guidance={scales[first]}", f"teachers.odd.guidance={scales[second]}",
        ]  # fmt: skip
        run = fakes.distillation(random_model, tmp_path / "run", alone="odd").model_dump(
            mode="json"
        )
        for task in run["tasks"]:
            task["validation"] = str(held_out)
        given = [f"lora.init={start}", f"teachers.odd.adapter={teacher}", *guidance]
        found = live.examine(config.parse(run, given)).findings
        told[first] = [f for f in found if f.text.startswith("worth")]
    assert all(len(each) == 2 for each in told.values())  # one a task
    bad = [first for first, each in told.items() if {f.level for f in each} == {"fault"}]
    good = [first for first, each in told.items() if {f.level for f in each} == {"ok"}]
    assert len(bad) == len(good) == 1


@pytest.mark.slow
def test_the_tiny_ocr_teacher_at_another_scale_than_its_student_is_named(tmp_path):
    data = {
        "stage": "opd",
        "output": str(tmp_path / "run"),
        "model": {"id": "tiny", "height": 64, "width": 64, "max_sequence_length": 16},
        "lora": {"init": "tiny/ocr"},
        "teachers": {"ocr": {"adapter": "tiny/ocr", "guidance": 1.0}},
        "tasks": [
            config.load(TINY[0].parent / "teacher_ocr.yaml").tasks[0].model_dump(mode="json")
        ],
    }
    texts = faults(live.examine(config.parse(data)).findings)
    assert len(texts) == 1 and texts[0].startswith("worth: on task 'ocr'")


@pytest.mark.parametrize(("scale", "level"), [("1.0", "fault"), ("4.5", None), ("6.0", "note")])
def test_a_mixture_of_scales_is_named(random_model, tmp_path, scale, level):
    changes = ["rollout.guidance=4.5", f"teachers.odd.guidance={scale}"]
    run = fakes.distillation(random_model, tmp_path / "run", alone="odd").model_dump(mode="json")
    found = plan.examine(config.parse(run, changes))
    told = [f.level for f in found if f.text.startswith("guidance: teachers.odd")]
    assert told == ([level] if level else [])


# The command -----------------------------------------------------------------------------------


def written(found, folder):
    path = folder / "config.yaml"
    path.write_text(config.to_yaml(found))
    return str(path)


def test_the_command_tells_all_and_ends_by_its_findings(random_model, tmp_path, capsys):
    path = written(fakes.settings(random_model, tmp_path / "run"), tmp_path)
    assert main(["doctor", "--config", path]) == 0
    said = capsys.readouterr().out
    for text in ("torch ", "device: ", "ratio: within", "all that and update", "device-hours"):
        assert text in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # nothing is left behind
    assert main(["doctor", "--config", path, "--no-model", "--memory", "0.654"]) == 1
    assert "memory: does not fit" in capsys.readouterr().out
    assert main(["doctor", "--config", path, "rollout.copys=2"]) == 2
    assert "did you mean" in capsys.readouterr().err.lower()


def test_a_recipe_is_examined_stage_by_stage(random_model, tmp_path, capsys):
    stage = fakes.settings(random_model, tmp_path / "run").model_dump(mode="json")
    for key in ("output", "model"):
        stage.pop(key)
    model = {"id": random_model, "height": 32, "width": 32, "max_sequence_length": 16}
    merge = {"stage": "merge", "adapters": ["stage:one", "stage:one"]}
    two = {key: value for key, value in stage.items() if key != "lora"}
    data = {
        "stage": "recipe",
        "output": str(tmp_path / "all"),
        "model": model,
        "stages": {"one": stage, "merge": merge, "two": {**two, "lora": {"init": "stage:merge"}}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(data))
    assert main(["doctor", "--config", str(path), "--no-model"]) == 0
    said = capsys.readouterr().out
    assert "one (grpo)" in said and "two (grpo)" in said
