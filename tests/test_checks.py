"""One list of what is wrong with a config, for `train`, `eval` and the doctor."""

from pathlib import Path

import fakes
import pytest

from flowalign.checks import Launch, check_stage, enforce, prompts, stage_problems
from flowalign.commands.build import wire
from flowalign.config import ConfigError
from flowalign.training import data
from flowalign.training.inputs import Inputs
from flowalign.types import Problem


def test_a_sentence_begins_with_the_whole_key() -> None:
    assert str(Problem("rollout.steps", "0.")) == "rollout.steps: 0."
    assert str(Problem("rollout.steps", "0.", stage="a")) == "stages.a.rollout.steps: 0."
    assert str(Problem("", "no such file.", stage="a")) == "stages.a: no such file."
    assert str(Problem("", "no such file.")) == "no such file."


def test_refusals_are_raised_and_the_rest_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    rest = [Problem("a", "far.", "fault"), Problem("b", "near.", "note")]
    enforce(rest)
    assert not caplog.records
    enforce(rest, told=False)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "far.", "near.",
    ]  # fmt: skip
    refusal = Problem("c", "no.")
    with pytest.raises(ConfigError) as error:
        enforce([*rest, refusal], told=False)
    assert error.value.problems == [refusal] and len(caplog.records) == 2


def test_the_doctor_has_all_that_train_has(tmp_path: Path) -> None:
    """A sound config, for which it has advice beside, and one that is refused."""
    for changes, advice in (
        (["rollout.guidance=20.0", "model.dtype=float16"], {"dtype"}),
        (["rollout.guidance=20.0", "tasks.0.prompts=none.txt"], set[str]()),
    ):
        model = "stabilityai/stable-diffusion-3.5-medium"
        config = fakes.settings(model, tmp_path / "run", *changes)
        said = stage_problems(config, Launch())
        more = stage_problems(config, Launch(advise=True))
        assert said and more[: len(said)] == said
        assert {problem.key for problem in more[len(said) :]} >= advice
        assert "refuse" not in [problem.level for problem in more[len(said) :]]
        assert advice or len(more) == len(said)


def test_a_run_reads_each_prompt_set_once(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    locate = data._locate

    def counted(source: str) -> Path:
        read.append(source)
        return locate(source)

    monkeypatch.setattr(data, "_locate", counted)
    given = ["tasks.0.validation=tiny/geneval_val", "evaluation={every: 2, prompts: 4}"]
    config = fakes.settings(random_model, tmp_path / "run", *given)
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    wire(config, inputs=check_stage(config, Launch()))
    assert sorted(read) == sorted([config.tasks[0].prompts, "tiny/geneval_val"])


@pytest.mark.parametrize(
    ("second", "levels"),
    [("ink", ["fault"]), ("both", ["note"]), ("dots", [])],
)
def test_a_prompt_with_two_teachers_is_named(
    random_model: str, tmp_path: Path, second: str, levels: list[str]
) -> None:
    """Of styles, which have no rewards; a few of many are only noted."""
    ink, dots = ([f"{name} {i}" for i in range(10)] for name in ("INK", "DOTS"))
    for name, lines in {"ink": ink, "dots": dots, "both": ink[:1] + dots}.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    given = [f"tasks.{i}.prompts={tmp_path}/{file}.txt" for i, file in enumerate(("ink", second))]
    styles = [f"tasks.{i}.reward=null" for i in range(2)]
    config = fakes.distillation(random_model, tmp_path / "run", *given, *styles)
    found = prompts.shared(config, Launch(), Inputs(config.model))
    assert [problem.level for problem in found] == levels


@pytest.mark.parametrize(("count", "levels"), [(2, ["note"]), (16, [])])
def test_a_held_out_set_of_two_prompts_is_named(tmp_path: Path, count: int, levels: list[str]):
    held_out = tmp_path / "few_val.txt"
    held_out.write_text("".join(f"a kite {i}\n" for i in range(count)))
    validated = [f"tasks.0.validation={held_out}", "evaluation={every: 2}"]
    config = fakes.settings("tiny", tmp_path / "run", *validated)
    found = prompts.few(config, Launch(), Inputs(config.model))
    assert [problem.level for problem in found] == levels
