"""Configs with a slip of the keyboard, or made by a generator: read, or refused as ConfigError."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generated import examples, holds, mutated, nothing_else, scalars, texts, values
from hypothesis import strategies as st
from yaml import YAMLError

from flowalign.commands import recipe
from flowalign.config import ConfigError, RecipeStage, Stage, load, parse, read
from flowalign.config.safe_yaml import load_yaml

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(ROOT.glob("configs/tiny/*.yaml")) + sorted(ROOT.glob("configs/sd35_medium/*.yaml"))
CONFIGS = [path for path in CONFIGS if not path.name.startswith("_")]
SHIPPED = [read(path) for path in CONFIGS]


NO_CONFIGS = {  # each was a traceback, or silently something else
    "a number that is none": "seed: !!int x",
    "an object of Python": "seed: !!python/object/apply:os.system [x]",
    "deep nesting": "a: " + "[" * 2000,
    "NUL": "output: a\0b",
}


@pytest.mark.parametrize("name", NO_CONFIGS)
def test_what_is_no_config_is_refused(name: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(NO_CONFIGS[name])
    with nothing_else(tmp_path), pytest.raises(ConfigError, match=r"run\.yaml"):
        load(path, stage=Stage)
    with pytest.raises(ConfigError):
        load(CONFIGS[0], [NO_CONFIGS[name].replace(": ", "=")], stage=Stage)


def test_a_key_given_twice_is_refused_under_a_merge_too():
    assert load_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}
    assert load_yaml("output: 2026-13-45") == {"output": "2026-13-45"}  # no date
    with pytest.raises(YAMLError):
        load_yaml("a: &a {x: 1}\nb: {<<: *a, x: 3, x: 4}")


def grpo(**sections: Any) -> dict[str, Any]:
    data = read(ROOT / "configs/tiny/teacher_ocr.yaml")
    for name, keys in sections.items():
        data[name] = {**data.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return data


def table(**keys: Any) -> dict[str, Any]:
    return read(ROOT / "configs/tiny/eval.yaml") | keys


def of_recipe(**keys: Any) -> dict[str, Any]:
    return read(ROOT / "configs/tiny/flow_opd.yaml") | keys


BEYOND: dict[str, Callable[[], dict[str, Any]]] = {  # key: a config in which it is impossible
    "seed": lambda: grpo(seed=2**32),
    "lora.rank": lambda: grpo(lora={"rank": 10**9}),
    "model.height": lambda: grpo(model={"height": 10**6}),
    "rollout.prompts": lambda: grpo(rollout={"prompts": 10**9}),
    "train.score_seconds": lambda: grpo(train={"score_seconds": 1e300}),
    "train.project": lambda: grpo(train={"project": "../../x"}),
    "tasks.0.name": lambda: grpo(tasks=[grpo()["tasks"][0] | {"name": "../x"}]),
    "models.../x": lambda: table(models={"../x": None}),
    "models": lambda: table(models={"con": None, "CON": None}),
    "benchmarks.0.name": lambda: table(benchmarks=[table()["benchmarks"][0] | {"name": "/abs"}]),
    "stages.../x": lambda: of_recipe(stages={"../x": {"use": "teacher_ocr.yaml"}}),
    "stages": lambda: of_recipe(stages={"a": {}, "A": {}}),
}


@pytest.mark.parametrize("key", BEYOND)
def test_a_value_beyond_the_possible_is_named(key: str):
    with pytest.raises(ConfigError) as raised:
        parse(BEYOND[key](), stage=Stage)
    assert [problem.partition(": ")[0] for problem in raised.value.problems] == [key]


def test_a_stage_stays_below_its_recipe(tmp_path: Path):
    stages = {"ocr": {"use": "teacher_ocr.yaml", "set": [f"output={tmp_path}/elsewhere"]}}
    config = parse(of_recipe(stages=stages), stage=RecipeStage)
    assert any("output" in problem for problem in recipe.examine(config, CONFIGS[0].parent)[1])


# Properties ------------------------------------------------------------------------------------


def parsed_or_refused(data: Any, changes: list[str]) -> None:
    try:
        parse(data, changes, stage=Stage)
    except ConfigError as error:
        assert error.problems


@pytest.mark.slow
@examples(1000)
def test_a_changed_config_is_parsed_or_refused(count: int):
    keys = st.one_of(texts, scalars)

    @st.composite
    def configs(draw: Any) -> Any:
        data = draw(st.sampled_from(SHIPPED))
        for _ in range(draw(st.integers(1, 4))):
            data = mutated(data, draw, values, keys) if isinstance(data, dict | list) else data
        return data

    holds(lambda data: parsed_or_refused(data, []), count, data=configs())


@pytest.mark.slow
@examples(500)
def test_a_changed_override_is_taken_or_refused(count: int):
    sections = ["seed", "tasks", "0", "ocr", "rollout", "steps", "reward", "options", "lora", "x"]
    keys = st.lists(st.one_of(st.sampled_from(sections), texts), min_size=1, max_size=6)

    @st.composite
    def overrides(draw: Any) -> list[str]:
        value = draw(st.one_of(texts, scalars.map(str), st.just("{a: [1, 2]}")))
        return [f"{'.'.join(draw(keys))}{draw(st.sampled_from(['=', '=', '=', '', '==']))}{value}"]

    holds(lambda changes: parsed_or_refused(SHIPPED[0], changes), count, changes=overrides())
