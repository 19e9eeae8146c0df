"""Configs that a stranger made, or a slip of the keyboard: they are read, or refused with
ConfigError, in time, and nothing is written."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generated import examples, holds, mutated, nothing_else, scalars, texts, values
from hypothesis import strategies as st
from yaml import YAMLError

from flowalign.commands import cli, recipe
from flowalign.config import (
    ConfigError,
    RecipeStage,
    Stage,
    load,
    parse,
    read,
    safe_yaml,
    to_yaml,
)

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(ROOT.glob("configs/tiny/*.yaml")) + sorted(ROOT.glob("configs/sd35_medium/*.yaml"))
CONFIGS = [path for path in CONFIGS if not path.name.startswith("_")]
TEXTS = [path.read_text() for path in CONFIGS] + [
    "a: &a [x, x, x]\nb: &b [*a, *a]\nc: {<<: {d: 1}, e: *b}\n",
    "a: !!int 3\nb: !!str 4\nc: 'x\n\n y'\nd: |\n  text\n  text\ne: >-\n  text\n",
    "? key\n: value\n? [1]\n: 2\n--- \n# comment\n...\n",
]


# One example each ------------------------------------------------------------------------------


def grpo(**sections: Any) -> dict[str, Any]:
    data = read(ROOT / "configs/tiny/teacher_ocr.yaml")
    for name, keys in sections.items():
        data[name] = {**data.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return data


def table(**keys: Any) -> dict[str, Any]:
    return read(ROOT / "configs/tiny/eval.yaml") | keys


def of_recipe(**keys: Any) -> dict[str, Any]:
    return read(ROOT / "configs/tiny/flow_opd.yaml") | keys


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
)
NO_CONFIGS = {  # each was a traceback, a hang, or silently something else
    "a number that is none": "seed: !!int x",
    "true that is none": "seed: !!bool x",
    "a number of 5,000 digits": f"seed: {'9' * 5000}",
    "a number in base 60": f"seed: {'1:' * 100_000}1",
    "a hexadecimal number": f"seed: 0x{'f' * 100_000}",
    "a date that is tagged": "seed: !!timestamp x",
    "an object of Python": "seed: !!python/object/apply:os.system [x]",
    "NUL": 'output: "a\\0b"',
    "half a character": 'output: "\\ud800"',
    "an alias of itself": "a: &a [*a]",
    "a merge of itself": "a: &a {<<: *a}",
    "a bomb of aliases": BOMB,
    "a bomb of merges": MERGES,
    "deep nesting": "a: " + "[" * 100_000,
    "deep nesting of blocks": "- " * 100_000,
    "deep keys": "? " * 100_000,
    "a very long text": "a: " + "x" * 10**7,
    "use with NUL": 'use: "a\\0b"',
    "use of a long name": f"use: {'x' * 1000}",
}


@pytest.mark.parametrize("name", NO_CONFIGS)
def test_no_config(name: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(NO_CONFIGS[name])
    began = time.process_time()
    with nothing_else(tmp_path), pytest.raises(ConfigError) as raised:
        load(path, stage=Stage)
    assert time.process_time() - began < 5
    assert "run.yaml" in str(raised.value)
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize("name", ["a number that is none", "deep nesting", "a bomb of aliases"])
def test_the_command_line_refuses_it(name: str, tmp_path: Path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(NO_CONFIGS[name])
    assert cli.main(["train", "--config", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") < 12


def test_twenty_thousand_keys_are_read_in_time():
    began = time.process_time()
    assert len(safe_yaml.load("\n".join(f"k{i}: {i}" for i in range(20_000)))) == 20_000
    assert time.process_time() - began < 5


def test_a_key_given_twice_is_refused_under_a_merge_too():
    assert safe_yaml.load("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}
    with pytest.raises(YAMLError):
        safe_yaml.load("a: &a {x: 1}\nb: {<<: *a, x: 3, x: 4}")


def test_a_date_is_a_text():
    assert safe_yaml.load("output: 2026-13-45") == {"output": "2026-13-45"}


def test_a_chain_of_files_that_use_each_other_ends(tmp_path: Path):
    for number in range(1500):
        (tmp_path / f"{number}.yaml").write_text(f"use: {number + 1}.yaml\n")
    with pytest.raises(ConfigError, match="use"):
        load(tmp_path / "0.yaml", stage=Stage)


OVERRIDES = {
    "a number that is none": "seed=!!int x",
    "5,000 digits": "seed=" + "9" * 5000,
    "a long index": "tasks." + "9" * 5000 + ".weight=1",
    "a deep path": ".".join("a" * 5000) + "=1",
    "a deep value": "seed=" + "[" * 5000,
    "no characters": "se\udcffed=1",
    "a bomb": "seed={a0: &a0 [x, x]," + BOMB.replace("\n", ",")[len("a0: &a0 [x, x],") :] + "}",
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_no_override(name: str):
    with pytest.raises(ConfigError) as raised:
        load(ROOT / "configs/tiny/teacher_ocr.yaml", [OVERRIDES[name]])
    assert len(str(raised.value)) < 2000


BEYOND: dict[str, Callable[[], dict[str, Any]]] = {  # key: a config in which it is impossible
    "seed": lambda: grpo(seed=-1),
    "seed ": lambda: grpo(seed=2**32),
    "lora.rank": lambda: grpo(lora={"rank": 10**9}),
    "model.height": lambda: grpo(model={"height": 10**6}),
    "tasks.0.weight": lambda: grpo(tasks=[grpo()["tasks"][0] | {"weight": 1e300}]),
    "rollout.steps": lambda: grpo(rollout={"steps": 10**7}),
    "rollout.prompts": lambda: grpo(rollout={"prompts": 10**9}),
    "rollout.copies": lambda: grpo(rollout={"prompts": 50_000, "copies": 50_000}),
    "rollout.batch_size": lambda: grpo(rollout={"batch_size": 10**12}),
    "train.updates": lambda: grpo(train={"updates": 10**12}),
    "train.score_seconds": lambda: grpo(train={"score_seconds": 1e300}),
    "train.timeout_seconds": lambda: grpo(train={"timeout_seconds": 1e300}),
    "train.project": lambda: grpo(train={"project": "../../x"}),
    "output": lambda: grpo(output="a\0b"),
    "output ": lambda: grpo(output="~nouser/x"),
    "output  ": lambda: grpo(output="x" * 300),
    "lora.init": lambda: grpo(lora={"init": "a\0b"}),
    "tasks.0.name": lambda: grpo(tasks=[grpo()["tasks"][0] | {"name": "../x"}]),
    "tasks.0.name ": lambda: grpo(tasks=[grpo()["tasks"][0] | {"name": "x" * 300}]),
    "tasks.0.prompts": lambda: grpo(tasks=[grpo()["tasks"][0] | {"prompts": "a\0b"}]),
    "tasks": lambda: grpo(tasks=10**4 * [grpo()["tasks"][0]]),
    "models.../x": lambda: table(models={"../x": None}),
    "models.con": lambda: table(models={"con": None, "CON": None}),
    "models.base": lambda: table(models={"base": "a\0b"}),
    "benchmarks.0.name": lambda: table(benchmarks=[table()["benchmarks"][0] | {"name": "/abs"}]),
    "stages.../x": lambda: of_recipe(stages={"../x": {"use": "teacher_ocr.yaml"}}),
    "stages.a": lambda: of_recipe(stages={"a": {}, "A": {}}),
    "stages.ﬁ": lambda: of_recipe(stages={"ﬁ": {}, "fi": {}}),
}


@pytest.mark.parametrize("key", BEYOND)
def test_a_value_beyond_the_possible_is_named(key: str):
    with pytest.raises(ConfigError) as raised:
        parse(BEYOND[key](), stage=Stage)
    problems = raised.value.problems
    assert any(problem.startswith(key.strip()) for problem in problems), problems


def test_a_stage_stays_below_its_recipe(tmp_path: Path):
    stages = {"ocr": {"use": "teacher_ocr.yaml", "set": [f"output={tmp_path}/elsewhere"]}}
    config = parse(of_recipe(stages=stages), stage=RecipeStage)
    assert any("output" in problem for problem in recipe.examine(config, CONFIGS[0].parent)[1])


def test_of_many_problems_the_first_are_shown():
    began = time.process_time()
    with pytest.raises(ConfigError) as raised:
        parse(grpo() | {f"key{i}": i for i in range(20_000)}, stage=Stage)
    assert len(raised.value.lines) < 100
    assert time.process_time() - began < 5


@pytest.mark.slow
@pytest.mark.parametrize("command", [["doctor", "--no-model"], ["train", "--dry-run"]])
def test_more_pixels_than_the_model_has_positions_for(command: list[str], capsys):
    path = str(ROOT / "configs/tiny/teacher_ocr.yaml")
    assert cli.main([*command, "--config", path, "model.height=8192", "model.width=8192"]) == 2
    assert "model.height" in capsys.readouterr().err


# Properties ------------------------------------------------------------------------------------


def read_or_refused(data: Any) -> None:
    """A config is parsed, or refused; one that is parsed is written and read as the same."""
    try:
        config = parse(data, stage=Stage)
    except ConfigError as error:
        assert error.problems
        str(error).encode()  # it can be printed
    else:
        assert parse(safe_yaml.load(to_yaml(config)), stage=Stage) == config


SHIPPED = [read(path) for path in CONFIGS]


@pytest.mark.slow
@examples(1500)
def test_a_changed_config_is_read_or_refused(count: int):
    keys = st.one_of(texts, scalars)

    @st.composite
    def configs(draw: Any) -> Any:
        data = draw(st.sampled_from(SHIPPED))
        for _ in range(draw(st.integers(1, 4))):
            data = mutated(data, draw, values, keys) if isinstance(data, dict | list) else data
        return data

    holds(read_or_refused, count, data=configs())


@pytest.mark.slow
@examples(500)
def test_a_changed_text_is_read_or_refused(count: int, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.touch()
    pieces = st.one_of(
        texts, st.text("[]{}:,&*!|>-?#%@`'\"\\ \n\t~0123456789.eE+_<=xa", max_size=12)
    )

    @st.composite
    def written(draw: Any) -> str:
        text = draw(st.sampled_from(TEXTS))
        for _ in range(draw(st.integers(1, 3))):
            start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 30))
            text = text[:start] + draw(pieces) + text[start + length :]
        return text

    def read_from_disk(text: str) -> None:
        path.write_bytes(text.encode(errors="surrogatepass"))
        try:
            read(path)
        except ConfigError as error:
            assert error.problems

    holds(read_from_disk, count, text=written())


@pytest.mark.slow
@examples(500)
def test_a_changed_override_is_taken_or_refused(count: int):
    sections = ["seed", "tasks", "0", "ocr", "rollout", "steps", "reward", "options", "lora", "x"]
    keys = st.lists(st.one_of(st.sampled_from(sections), texts), min_size=1, max_size=6)

    @st.composite
    def overrides(draw: Any) -> list[str]:
        value = draw(st.one_of(texts, scalars.map(str), st.just("{a: [1, 2]}")))
        return [f"{'.'.join(draw(keys))}{draw(st.sampled_from(['=', '=', '=', '', '==']))}{value}"]

    data = SHIPPED[0]

    def taken_or_refused(changes: list[str]) -> None:
        try:
            parse(data, changes, stage=Stage)
        except ConfigError as error:
            str(error)

    holds(taken_or_refused, count, changes=overrides())


@pytest.mark.slow
@examples(100)
def test_a_changed_config_is_examined(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `doctor` and `train --dry-run` begin: with the files that it names, without its code."""
    monkeypatch.chdir(ROOT)
    tiny = [data for data in SHIPPED if data["model"]["id"] == "tiny"]
    numbers = st.one_of(scalars, st.sampled_from([2, 10, 1000, 8192, 10**5, 10**7]))

    @st.composite
    def configs(draw: Any) -> Any:
        data = draw(st.sampled_from(tiny))
        for _ in range(draw(st.integers(1, 2))):
            data = mutated(data, draw, numbers) if isinstance(data, dict) else data
        return data if isinstance(data, dict) else {}

    def examined_or_refused(data: dict[str, Any]) -> None:
        data = data | {"output": str(tmp_path / "run")}
        try:
            config = parse(data, stage=Stage)
        except ConfigError:
            return
        _, problems = recipe.examine(config, ROOT / "configs/tiny", 1, trust=False)
        "\n".join(problems).encode()

    with nothing_else(tmp_path):
        examined_or_refused(tiny[0])  # imports diffusers, which no time limit is for
        holds(examined_or_refused, count, data=configs())
