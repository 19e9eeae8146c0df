"""A right config is read as written; a wrong one is refused with everything wrong in it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from yaml import YAMLError

from flowalign import rewards
from flowalign.checks import Launch, check_stage
from flowalign.commands import cli, recipe
from flowalign.config import (
    ADAPTER,
    LABELS,
    STAGES,
    ConfigError,
    EvalStage,
    GrpoStage,
    RecipeStage,
    Stage,
    TrainingStage,
    label_of,
    load,
    overlay,
    parse,
    read,
    to_yaml,
)
from flowalign.config.safe_yaml import dump_yaml, load_yaml
from flowalign.system.hub_address import secrets

TINY = {"id": "tiny", "height": 96, "width": 96}
TASK = {"name": "ocr", "prompts": "a.txt", "validation": "b.txt", "reward": {"name": "ocr"}}


def raw(**sections: Any) -> dict[str, Any]:
    base = {"stage": "grpo", "output": "runs/x", "model": TINY, "tasks": [TASK]}
    return {**base, **sections}


SIGN = 'a sign that says "x"'
MARK = {"name": "ocr", "prompts": "b.txt", "reward": {"name": "ocr"}}
JUDGED = {"name": "ocr", "prompts": "b.txt", "rewards": {"a/b": {"name": "ocr"}}}


def raw_eval(**sections: Any) -> dict[str, Any]:
    base = {"stage": "eval", "output": "runs/x", "model": TINY, "benchmarks": [MARK]}
    return {**base, **sections}


def problems(data: Any, *overrides: str, stage: type[Stage] = TrainingStage) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(data, overrides, stage=stage)
    sentences = list(map(str, caught.value.problems))
    assert all(sentence in str(caught.value) for sentence in sentences)
    return sentences


def write(folder: Path, text: str) -> Path:
    (folder / "c.yaml").write_text(text)
    return folder / "c.yaml"


YAML = """
stage: grpo
output: runs/x
model: {id: tiny, revision: "1e5"}
tasks:
  - {name: ocr, prompts: a.txt, validation: b.txt, weight: 2, reward: {name: ocr}}
rollout: {window: [0, 5]}
optimizer: {lr: 1e-4, eps: 1E-8, betas: [0.8, 0.95]}
grpo: {clip_range: .5e-4}
train: {updates: 7}
ema: null
"""


def test_yaml_is_read_as_written(tmp_path: Path) -> None:
    config = load(write(tmp_path, YAML), stage=GrpoStage)
    assert (config.optimizer.lr, config.optimizer.eps, config.grpo.clip_range) == (1e-4, 1e-8, 5e-5)
    assert config.optimizer.betas == (0.8, 0.95) and config.rollout.window == (0, 5)
    assert config.train.updates == 7 and config.ema is None
    assert config.model.revision == "1e5" and config.tasks[0].weight == 2.0


def test_a_config_survives_the_way_through_yaml(tmp_path: Path) -> None:
    config = load(write(tmp_path, YAML), ["output='1e-4'", "tasks.0.reward.options={a: [1, x]}"])
    assert config.output == "1e-4"
    assert load(write(tmp_path, to_yaml(config))) == config


def test_overrides_reach_items_and_closed_sections() -> None:
    tasks = [{**TASK, "name": name} for name in ("signs", "1", "photos")]
    given = ["tasks.0.weight=3e-1", "tasks.photos.weight=8", "tasks.1.weight=3"]
    given += ["optimizer.lr=1e-3", "evaluation.every=5", "rollout.window=[1, 2]"]
    config = parse(raw(evaluation=None, tasks=tasks), given)
    assert [task.weight for task in config.tasks] == [0.3, 3, 8] and config.optimizer.lr == 1e-3
    assert config.evaluation and config.evaluation.every == 5 and config.rollout.window == (1, 2)
    assert parse(raw(), ["evaluation=null"]).evaluation is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr", "want key.path=value"),
        (".lr=1", "want key.path=value"),
        ("tasks.1.weight=2", "tasks: no item '1'"),
        ("tasks.orc.weight=2", "Did you mean 'ocr'?"),
        ("stage.x=2", "stage is the text 'grpo'"),
        ("seed=[1", "not YAML"),
        ("optimizer.rl=1", "optimizer.rl: unknown key. Did you mean `lr`?"),
    ],
)
def test_a_wrong_override_is_refused(override: str, said: str) -> None:
    (problem,) = problems(raw(), override)
    assert said in problem


TEACHERS = {"ocr": {"adapter": "x", "base": "y"}}


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (raw(), "lora.init"),
        (raw(), "tasks.0.prompts"),
        (raw(), "tasks.0.reward.options.mine"),
        (raw(evaluation={"watch": [MARK | {"name": "w"}]}), "evaluation.watch.0.prompts"),
        (raw(stage="opd", teachers=TEACHERS), "teachers.ocr.base"),
        (raw_eval(), "models.a.images"),
        (raw_eval(), "fidelity.reference"),
        ({"stage": "merge", "output": "x", "model": TINY, "adapters": ["a", "b"]}, "adapters.1"),
    ],
)
def test_a_path_begins_at_home_and_has_no_variables(data: dict[str, Any], key: str, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    image = ["benchmarks.0.images=2"] * (data["stage"] == "eval")

    def read_back(path: str) -> str:
        value: Any = parse(data, [*image, f"{key}={path}"], stage=Stage).model_dump()
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        return value

    assert read_back("~/runs/x") == "/home/me/runs/x"
    assert read_back("./owner/a~b") == "./owner/a~b"
    inside = ["runs/${NAME}_1", "/scratch/$USER"] * (".options." not in key)
    for path in ["$HOME/x", "~no_such_user/x", *inside]:
        (problem,) = problems(data, *image, f"{key}={path}", stage=Stage)
        assert problem.startswith(key.partition(".mine")[0] + ": ") and path in problem


def test_what_is_no_path_keeps_its_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = {"question": "~ ${X} or $HOME?", "sum": "$5/h", "parts": [{"a": "~/x", "b": ["~"]}]}
    config = parse(raw(), ["lora.targets=['~a$B']", f"tasks.0.reward.options={options}"])
    assert config.lora.targets == ["~a$B"] and config.tasks[0].reward
    options["parts"] = [{"a": "/home/me/x", "b": ["~"]}]
    assert config.tasks[0].reward.options == options


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"step": 3}}, ["rollout.step: unknown key", "mean `steps`?", "noise_level"]),
        ({"optimizer": {"lr": "fast"}}, ["optimizer.lr: got the text 'fast'", "example: 0.0001"]),
        (
            {"model": {"id": "x", "gradient_checkpointing": "yes"}},
            ["got the text 'yes'", "true or false"],
        ),
        ({"rollout": {"steps": 2.5}}, ["rollout.steps: got the number 2.5; want a", "integer"]),
        ({"output": 2024}, ["output: got the whole number 2024", "quotes"]),
        ({"model": {"id": "x", "height": 500}}, ["model.height: got", "500", "multiple of 16"]),
        ({"optimizer": {"lr": float("nan")}}, ["optimizer.lr: got the number nan", "finite"]),
        ({"grpo": {"advantage": "group"}}, ["grpo.advantage", "'batch_std'", "mean 'group_std'?"]),
    ],
)
def test_a_wrong_value_is_explained(sections: dict[str, Any], said: list[str]) -> None:
    """Where, what was seen, what is possible."""
    (problem,) = problems(raw(**sections))
    assert all(part in problem for part in said), problem


@pytest.mark.parametrize("place", ["file", "argument", "recipe", "set", "variant"])
def test_an_unknown_key_is_refused_wherever_it_stands(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"rollout": {"copies": 4}}
    given = "rollout.copies=4"
    data, arguments = raw(stage="grpo"), []
    if place == "file":
        data |= wrong
    elif place == "argument":
        arguments = [given]
    elif place == "variant":
        (tmp_path / "variant.yaml").write_text(dump_yaml({"grpo": wrong}))
        arguments = ["--variant", str(tmp_path / "variant.yaml")]
    else:
        inner = data | (wrong if place == "recipe" else {"set": [given]})
        data = {"stage": "recipe", "output": "runs/x", "model": TINY, "stages": {"one": inner}}
    path = str(write(tmp_path, dump_yaml(data)))
    assert cli.main(["doctor", "--no-model", "--config", path, *arguments]) == 2
    where = "stages.one." if place in ("recipe", "set") else ""
    assert f"{where}rollout.copies: unknown key." in "".join(capsys.readouterr())


STUDENT = {"stage": "opd", "teachers": {"ocr": {"adapter": "tiny/ocr"}}}
JUMPS = {**STUDENT, "student": {"substeps": 2}, "rollout": {"kind": "ode"}}
NO_VALIDATION = {key: value for key, value in TASK.items() if key != "validation"}


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("rollout.kind", {"rollout": {"kind": "ode"}}),
        ("rollout.noise_level", {"rollout": {"noise_level": 0}}),
        ("rollout.solver", {"rollout": {"solver": "dpm2"}}),
        ("rollout.solver", {"rollout": {"kind": "cps", "solver": "dpm2"}}),
        ("rollout.noise_level", {"rollout": {"kind": "cps", "noise_level": 1.5}}),
        ("rollout.window", {"rollout": {"window": [3, 3]}}),
        ("rollout.window", {"rollout": {"window": [3, 11]}}),
        ("rollout.window", {"rollout": {"kind": "cps", "window": [3, 10]}}),
        ("rollout.steps", {"rollout": {"steps": 1}}),
        ("rollout.window.width", {"rollout": {"window": {"width": 10}}}),
        ("rollout.window.width", {"rollout": {"window": {"every": 2}}}),
        ("rollout.window.every", {"rollout": {"window": {"width": 2, "every": 0}}}),
        ("rollout.group_size", {"rollout": {"group_size": 1}}),
        ("rollout.prompts", {"rollout": {"prompts": 9}, "optimizer": {"updates_per_rollout": 2}}),
        ("tasks", {"tasks": [TASK, TASK]}),
        ("tasks.0.validation", {"tasks": [NO_VALIDATION]}),
        ("tasks.0.reward", {"tasks": [{**TASK, "reward": None}]}),
        ("tasks", {"evaluation": {"watch": [MARK]}}),
        ("tasks.0.teacher", {"tasks": [{**TASK, "teacher": "a"}]}),
        ("rollout.window", {"stage": "nft", "rollout": {"kind": "ode", "window": [0, 2]}}),
        ("student.substeps", {**STUDENT, "student": {"substeps": 2}}),
        ("rollout.solver", {**JUMPS, "rollout": {"kind": "ode", "solver": "dpm2"}}),
        ("evaluation.steps", {**JUMPS, "evaluation": {"steps": 40}}),
    ],
)
def test_values_that_do_not_go_together_are_refused(key: str, sections: dict[str, Any]) -> None:
    (problem,) = problems(raw(**sections))
    assert problem.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"kind": "cps", "window": [3, 9], "noise_level": 1}},
        {"rollout": {"window": [9, 10]}}, {"rollout": {"window": {"width": 9, "every": 3}}},
        {"rollout": {"kind": "cps", "window": {"width": 9}}},
        {"rollout": {"steps": 1, "window": [0, 1]}}, {"tasks": [NO_VALIDATION], "evaluation": None},
    ],
)  # fmt: skip
def test_values_at_the_border_are_accepted(sections: dict[str, Any]) -> None:
    assert isinstance(parse(raw(**sections)), TrainingStage)


def test_every_problem_is_reported_at_once() -> None:
    """Of the sections: unknown keys, wrong values and those that do not go together; then, where
    all sections are sound, of the sections together."""
    rollout = {"kind": "cps", "noise_level": 1.5, "window": [3, 10]}
    wrong = raw(rollout=rollout, optimizer={"lr": 0, "stepz": 3}, grpo={"kl_weight": -1})
    assert [p.split(":")[0] for p in problems(wrong, "seed")] == [
        "'seed'", "rollout.noise_level", "rollout.window", "optimizer.lr",
        "optimizer.stepz", "grpo.kl_weight",
    ]  # fmt: skip
    together = raw(rollout={"kind": "ode", "prompts": 9}, optimizer={"updates_per_rollout": 2},
                   tasks=[NO_VALIDATION, TASK])  # fmt: skip
    assert [p.split(":")[0] for p in problems(together)] == [
        "rollout.kind", "rollout.prompts", "tasks.0.validation", "tasks",
    ]  # fmt: skip


NO_CONFIGS = {  # each was a traceback, or silently something else
    "no YAML": "seed: [1",
    "a key given twice": "seed: 1\nseed: 2",
    "a text": "grpo",
    "a number that is none": "seed: !!int x",
    "a truth that is none": "seed: !!bool x",
    "a date that is none": "seed: !!timestamp x",
    "an object of Python": "seed: !!python/object/apply:os.system [x]",
    "deep nesting": "a: " + "[" * 2000,
    "NUL": "output: a\0b",
}


@pytest.mark.parametrize("name", NO_CONFIGS)
def test_what_is_no_config_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, NO_CONFIGS[name])
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(path, stage=Stage)
    if ": " in NO_CONFIGS[name] and "\n" not in NO_CONFIGS[name]:
        with pytest.raises(ConfigError):
            parse(raw(), [NO_CONFIGS[name].replace(": ", "=")])


PLAIN = {  # and other texts, as YAML 1.2 reads them; PyYAML reads 1.1
    "010": 10, "-017": -17, "08": 8, "0o10": 8, "0x1F": 31, "1_000": 1000, "1e-4": 1e-4, "5.": 5.0,
    "08.5": 8.5, "+.5E1": 5.0, "-.inf": float("-inf"), "1:30": "1:30", "1:30.5": "1:30.5",
    "190:20:30": "190:20:30", "2026-11-27": "2026-11-27", "=": "=", "0b11": "0b11",
    "yes": "yes", "NO": "NO", "on": "on", "y": "y",
    "true": True, "True": True, "FALSE": False, "null": None, "~": None,
}  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_what_has_no_quotes_is_read_as_yaml_1_2(text: str) -> None:
    assert load_yaml(text) == PLAIN[text] and type(load_yaml(text)) is type(PLAIN[text])
    assert load_yaml(dump_yaml({text: [text, PLAIN[text]]})) == {text: [text, PLAIN[text]]}
    pair = yaml.safe_load(dump_yaml([text]))  # whoever else reads our files reads a text, too
    assert pair == [text]


def test_a_key_given_twice_is_refused_under_a_merge_too() -> None:
    assert load_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}
    assert load_yaml("output: 2026-13-45") == {"output": "2026-13-45"}  # no date
    with pytest.raises(YAMLError):
        load_yaml("a: &a {x: 1}\nb: {<<: *a, x: 3, x: 4}")


BEYOND: dict[str, dict[str, Any]] = {  # key: sections of a config in which it is impossible
    "seed": {"seed": 2**32},
    "lora.rank": {"lora": {"rank": 10**9}},
    "train.score_seconds": {"train": {"score_seconds": 1e300}},
    "train.project": {"train": {"project": "../../x"}},
    "tasks.0.name": {"tasks": [TASK | {"name": "../x"}]},
    "models": {"stage": "eval", "models": {"con": None, "CON": None}},
    "stages.../x": {"stage": "recipe", "stages": {"../x": {"use": "teacher_ocr.yaml"}}},
    "stages": {"stage": "recipe", "stages": {name: {"use": "x.yaml"} for name in "aA"}},
}


@pytest.mark.parametrize("key", BEYOND)
def test_a_value_beyond_the_possible_is_named(key: str) -> None:
    sections = BEYOND[key]
    base = {"grpo": raw(), "eval": raw_eval(), "recipe": {"output": "runs/x", "model": TINY}}
    found = problems(base[sections.get("stage", "grpo")] | sections, stage=Stage)
    assert [problem.partition(": ")[0] for problem in found] == [key]


@pytest.mark.parametrize("stage", [EvalStage, Stage])
def test_an_evaluation_is_read_by_its_stage(stage: type[Stage], tmp_path: Path) -> None:
    config = parse(raw_eval(), ["models.ocr=runs/ocr/adapter", "models.base=null"], stage=stage)
    assert isinstance(config, EvalStage)
    assert config.models == {"ocr": "runs/ocr/adapter", "base": None}
    assert (config.sampling.steps, config.benchmarks[0].limit) == (10, None)
    assert parse(raw_eval(), stage=EvalStage).models == {"base": None}
    assert load(write(tmp_path, to_yaml(config)), stage=stage) == config
    assert isinstance(parse(raw(), stage=Stage), TrainingStage)


def test_a_config_of_another_command_is_refused() -> None:
    (problem,) = problems(raw_eval())
    assert problem.startswith("stage: 'eval' is run by `flowalign eval`")
    (problem,) = problems(raw(), stage=EvalStage)
    assert problem.startswith("stage: 'grpo' is run by `flowalign train`")
    assert len(problems(raw_eval(), "stage=grpo")) == 2  # no tasks, unknown benchmarks
    assert problems(raw(stage="grop"), stage=Stage)[0].startswith("stage: got")
    missing = {key: value for key, value in raw().items() if key != "stage"}
    assert problems(missing, stage=Stage)[0].startswith("stage: missing")


@pytest.mark.parametrize(
    ("start", "sections"),
    [
        ("benchmarks.0.limit: got", {"benchmarks": [{**MARK, "limit": 0}]}),
        ("models.a/b: got", {"models": {"a/b": None}}),
        ("benchmarks.0.name: got", {"benchmarks": [{**MARK, "name": "a b"}]}),
        ("benchmarks: the name 'ocr'", {"benchmarks": [MARK, MARK]}),
        ("benchmarks.0.reward: missing", {"benchmarks": [MARK | {"reward": None}]}),
        ("benchmarks.0.rewards.a/b", {"benchmarks": [JUDGED]}),
        ("benchmarks: the name 'average'", {"benchmarks": [{**MARK, "name": "average"}]}),
        ("compare.bse: no model", {"compare": {"bse": ["base"]}}),
        ("compare.base: no model", {"compare": {"base": ["x"]}}),
        ("guidance: no model", {"guidance": {"bse": 2.0}}),
    ],
)
def test_a_wrong_evaluation_is_explained(start: str, sections: dict[str, Any]) -> None:
    (problem,) = problems(raw_eval(**sections), stage=EvalStage)
    assert problem.startswith(start)


def shipped() -> list[Path]:
    """The configs that a user runs."""
    found = CONFIGS.glob("*/[!_]*.yaml")
    return [path for path in found if path.parent.name not in ("accelerate", "variants")]


def test_a_shipped_config_says_what_is_known_of_it() -> None:
    """The tiny world alone has figures and runs in CI."""
    for path in shipped():
        words = {"published", "predicted", "untested"}
        if path.parent.name == "tiny":
            words = {"measured", "tested"}
        assert label_of(path) in words & LABELS.keys(), path


def test_a_shipped_config_says_how_many_images_it_draws() -> None:
    for path in shipped():
        stages, problems = recipe.read_stages(load(path, stage=Stage), path.parent)
        images = sum(stage.images for stage in stages.values())
        said = f"# Images: {images:,} in all\n" in path.read_text()
        assert not problems and said == (images > 0), (path, f"{images:,}")


@pytest.mark.parametrize("root", STAGES.values())
def test_every_key_is_described(root: type[Stage]) -> None:
    def undescribed(schema: dict[str, Any]) -> list[str]:
        fields = schema.get("properties", {}).items()
        return [k for k, v in fields if not v.get("description") and "$ref" not in str(v)]

    schema = root.model_json_schema()
    assert schema["$defs"]["ModelConfig"]["properties"]["id"]["description"]
    assert not [k for part in (schema, *schema["$defs"].values()) for k in undescribed(part)]


def test_what_the_world_lacks_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = "flowalign.system.packages.importlib.util.find_spec"
    (tmp_path / "a.txt").write_text(SIGN)
    task = {**TASK, "prompts": str(tmp_path / "a.txt"), "validation": str(tmp_path / "b.txt")}
    more = {"optimizer": {"updates_per_rollout": 2}, "train": {"trackers": ["wandb"]}}
    config = parse(raw(tasks=[{**task, "reward": {"name": "ocl"}}], **more))
    with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(found, lambda name: None)
        check_stage(config, Launch(3))
    package, reward, prompts, sharing = caught.value.problems
    assert "3 processes" in sharing.text and "rollout.prompts=12" in sharing.text
    assert package.key == "train.trackers" and "wandb" in package.text
    assert reward.key == "tasks.0.reward" and "'ocl'" in reward.text
    assert prompts.key == "tasks.0.validation"
    config = parse(raw(tasks=[task | {"validation": None}], evaluation=None))
    for processes in (1, 2, 4, 8, 16, 128):  # 8 prompts x 16 copies
        check_stage(config, Launch(processes))
    with pytest.raises(ConfigError, match="12 processes cannot share evenly"):
        check_stage(config, Launch(12))


def test_what_an_evaluation_lacks_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no text to read")
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    layer = "transformer.transformer_blocks.0.attn.to_q.lora_"
    weights = {f"{layer}A.weight": torch.ones(1, 160), f"{layer}B.weight": torch.ones(160, 1)}
    save_file(weights, tmp_path / "run" / "adapter" / ADAPTER)
    models = {"base": None, "far": str(tmp_path / "no"), "near": str(tmp_path / "run")}
    good = {**MARK, "prompts": str(tmp_path / "a.txt")}
    marks = [
        good,
        {"name": "x", "prompts": good["prompts"], "rewards": {"a": {"name": "ocl"}}},
        {**MARK, "name": "y"},
    ]
    config = parse(raw_eval(models=models, benchmarks=marks, fidelity=None), stage=EvalStage)
    with pytest.raises(ConfigError) as caught:
        check_stage(config, Launch(3))
    far, poison, reward, prompts = caught.value.problems
    assert far.key == "models.far" and "no such folder" in far.text
    assert poison.key == "benchmarks.0.prompts" and "no text to read" in poison.text
    assert reward.key == "benchmarks.1.rewards.a" and "'ocl'" in reward.text
    assert prompts.key == "benchmarks.2.prompts" and "'b.txt'" in prompts.text
    models = {"base": None, "near": str(tmp_path / "run" / "adapter")}
    (tmp_path / "a.txt").write_text(SIGN)
    alone = raw_eval(models=models, benchmarks=[good], fidelity=None)
    check_stage(parse(alone, stage=EvalStage), Launch(3))


def test_four_bits_are_refused_where_they_cannot_be_had(tmp_path, monkeypatch) -> None:
    config = parse(raw(model={**TINY, "quantization": "nf4"}, evaluation=None))
    there = SimpleNamespace(origin="there")
    for missing, text in ((None, "[gpu]"), (there, "torch sees none")):
        monkeypatch.setattr(
            "flowalign.system.packages.importlib.util.find_spec", lambda name, m=missing: m
        )
        monkeypatch.setattr("flowalign.checks.model.torch.cuda.is_available", lambda: False)
        with pytest.raises(ConfigError) as caught:
            check_stage(config, Launch(1))
        texts = [p.text for p in caught.value.problems if p.key == "model.quantization"]
        assert any(text in said for said in texts)


def files(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_a_file_is_laid_over_the_one_it_uses_section_by_section(tmp_path: Path) -> None:
    files(
        tmp_path,
        base="model: {id: tiny, height: 96, width: 96}\ntasks: [{name: a, prompts: a.txt}]\n",
        middle="use: base.yaml\nstage: grpo\nmodel: {height: 32}\nevaluation: {every: 3}\n",
        top="use: middle.yaml\noutput: o\nevaluation: null\nmodel: {width: 32}\n",
    )
    found = read(tmp_path / "top.yaml")
    assert found["model"] == {"id": "tiny", "height": 32, "width": 32}
    assert found["evaluation"] is None and "use" not in found and found["output"] == "o"


def test_a_layer_reaches_the_items_of_a_list_by_their_names(tmp_path: Path) -> None:
    files(
        tmp_path,
        base="tasks: [{name: a, prompts: a.txt}, {name: b, prompts: b.txt, weight: 2}]\n",
        top="use: base.yaml\ntasks: {b: {weight: 5}, 0: {weight: 3}}\n",
        wrong="use: base.yaml\ntasks: {c: {weight: 5}}\n",
    )
    assert read(tmp_path / "top.yaml")["tasks"] == [
        {"name": "a", "prompts": "a.txt", "weight": 3},
        {"name": "b", "prompts": "b.txt", "weight": 5},
    ]
    with pytest.raises(ConfigError, match=r"wrong\.yaml: 1 problem\n  - tasks: no item 'c'.*a, b"):
        read(tmp_path / "wrong.yaml")
    ocr = {"reward": {"name": "ocr", "options": {"workers": 4}}}
    same, other = {"reward": {"options": {"upscale": 2}}}, {"reward": {"name": "pickscore"}}
    assert overlay(ocr, same)["reward"]["options"] == {"workers": 4, "upscale": 2}
    assert overlay(ocr, other)["reward"] == {"name": "pickscore"}  # it takes other options
    options = {"gated": [1, 2]}  # a list without names is replaced, as any other value
    assert overlay(options, {"gated": {"by": 1}}) == {"gated": {"by": 1}}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"top": "use: nowhere.yaml"}, "no such file; there are"),
        ({"top": "use: topp.yml"}, r"Did you mean 'top\.yaml'"),
        ({"top": "use: a.yaml", "a": "use: top.yaml"}, "leads back to itself"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, texts: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        read(files(tmp_path, **texts) / "top.yaml")


VARIANT = """
grpo: {rollout: {batch_size: 2}, evaluation: {batch_size: 3}}
eval: {sampling: {batch_size: 3}}
"""


def test_a_variant_changes_the_stage_it_is_for_and_overrides_come_after(tmp_path: Path) -> None:
    """It does not switch on what the config has switched off (evaluation)."""
    (tmp_path / "run.yaml").write_text(dump_yaml(raw(evaluation=None)))
    files(tmp_path, variant=VARIANT)
    path, variant = tmp_path / "run.yaml", tmp_path / "variant.yaml"
    plain = load(path)
    varied = load(path, variant=variant)
    assert varied == plain.model_copy(
        update={"rollout": plain.rollout.model_copy(update={"batch_size": 2})}
    )
    assert load(path, ["rollout.batch_size=5"], variant=variant).rollout.batch_size == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rollout: {batch_size: 2}", "rollout: want keys of a stage"),
        ("grpo: {rolout: {}}", "rolout: unknown key. Did you mean `rollout`"),
        ("grpo: {tasks: {orc: {weight: 2}}}", "tasks: no item 'orc'"),
    ],
)
def test_a_wrong_variant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(dump_yaml(raw(evaluation=None)))
    files(tmp_path, variant=text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.yaml", variant=tmp_path / "variant.yaml")
    assert said in str(caught.value)


CONFIGS = Path(__file__).parent.parent / "configs"


def test_a_stage_stays_below_its_recipe(tmp_path: Path) -> None:
    stages = {"ocr": {"use": "teacher_ocr.yaml", "set": [f"output={tmp_path}/elsewhere"]}}
    config = parse(read(CONFIGS / "tiny/flow_opd.yaml") | {"stages": stages}, stage=RecipeStage)
    _, problems = recipe.stages_and_problems(config, CONFIGS / "tiny")
    assert ("ocr", "set") in [(problem.stage, problem.key) for problem in problems]


@pytest.mark.parametrize(
    "url",
    [
        "https://user:s3/cret@host", "http://s3cret@host:8000/v1", "wss://host?a=b&hf_token=s3cret",
    ],
)  # fmt: skip
def test_a_url_with_a_secret_is_refused_wherever_it_stands_and_not_shown(url: str) -> None:
    places = {
        "model.id": f"model.id={url}",
        "tasks.0.reward.options.urls.1": f"tasks.0.reward.options={{urls: [x, '{url}']}}",
        "nowhere": f"nowhere={url}",
    }
    for place, override in places.items():
        (said,) = problems(raw(), override)
        assert said.startswith(f"{place}: ") and "s3cret" not in said
    with pytest.raises(ValueError, match="URL") as caught:
        rewards.RewardSpec("remote", {"urls": url}).check()
    assert "s3cret" not in str(caught.value)


def test_addresses_without_a_secret_are_taken() -> None:
    plain = [
        "owner/name@v1.0", "http://host:8000/v1/@me", "https://host/a/b@c", "http://[::1]:8000",
        "http://host:8000", "https://host/v1?steps=4", "mail@example.org",
    ]  # fmt: skip
    assert not [*secrets({"a": [plain]}, "")]
