"""A config is code: what it names runs when it is trained or evaluated, and not before."""

import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from flowalign import rewards
from flowalign.checks.rewards import own_code
from flowalign.commands import cli
from flowalign.config import parse, read
from flowalign.config.safe_yaml import dump_yaml, load_yaml

ROOT = Path(__file__).parent.parent
TRACE = "import pathlib; (pathlib.Path(__file__).parent / 'trace').touch()\n"
REWARD = TRACE + "def red(images, prompts, metadata):\n    raise NotImplementedError\n"


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(sys, "path", list(sys.path))


def grpo(folder: Path, reward: dict[str, Any]) -> Path:
    data = read(ROOT / "configs/tiny/teacher_ocr.yaml") | {"output": str(folder / "run")}
    data["tasks"][0]["reward"] = reward
    path = folder / "run.yaml"
    path.write_text(dump_yaml(data))
    return path


COMPOSED = {
    "in a sum": {"name": "weighted", "options": {"rewards": [{"name": "{module}:red"}]}},
    "a detector": {"name": "geneval", "options": {"detector": "{module}:red"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPOSED)
def test_what_only_examines_runs_nothing(kind: str, tmp_path, capsys):
    command, module = ["doctor", "--no-model"], f"own_{kind}".replace(" ", "_")
    (tmp_path / f"{module}.py").write_text(REWARD)
    spec = load_yaml(dump_yaml(COMPOSED[kind]).replace("{module}", module))
    path = grpo(tmp_path, spec)
    assert cli.main([*command, "--config", str(path)]) == 0
    assert not (tmp_path / "trace").exists()
    assert f"{module}:red" in capsys.readouterr().out
    assert cli.main([*command, "--config", str(path), "--trust"]) == (2 * (kind == "a detector"))
    assert (tmp_path / "trace").exists()


def test_own_code_names_every_place():
    data = read(ROOT / "configs/tiny/teacher_ocr.yaml")
    data["tasks"][0]["reward"] = {
        "name": "a.b:C",
        "options": {
            "inner": [{"x": ["d:e"]}], "device": "cuda:1", "url": "http://x", "text": "a: b",
        },
    }  # fmt: skip
    assert own_code(parse(data)) == {"tasks.0.reward": ["a.b:C", "d:e"]}


@pytest.mark.parametrize("path", ["", "a:", ".a:b", "a/b:c"])
def test_what_is_no_path_is_refused(path: str):
    with pytest.raises(ValueError):
        rewards.RewardSpec(path).check()


def test_a_function_that_makes_a_reward_is_a_factory(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_factory.py").write_text(
        "class Red:\n"
        "    def __call__(self, images, prompts, metadata): ...\n"
        "def red(scale: float = 1.0): return Red()\n"
        "def other(scale: float = 1.0): return scale\n"
    )
    assert type(vars(rewards.build("own_factory:red", scale=2.0))["reward"]).__name__ == "Red"
    with pytest.raises(ValueError, match="no reward"):
        rewards.build("own_factory:other")
