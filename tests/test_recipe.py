"""recipe.py: stages feed one another, are checked as a whole, resumed, and not run twice."""

import io
import weakref
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
import pytest
from safetensors.torch import load, load_file

from flowalign.backbone import base
from flowalign.commands import train
from flowalign.config import ADAPTER, ConfigError, RecipeStage, Stage
from flowalign.config.safe_yaml import dump_yaml, load_yaml
from flowalign.system import manifest
from flowalign.training.loop import Loop


def written(model: str, folder: Path, **stages: dict) -> Path:
    """A recipe: two teachers, their merge, a student that starts from it, a table."""
    folder.mkdir(exist_ok=True)
    raw = fakes.settings(model, folder / "unused").model_dump(mode="json")
    raw["tasks"][0]["name"] = "red"
    del raw["output"], raw["model"], raw["seed"]
    (folder / "teacher.yaml").write_text(dump_yaml(raw))
    del raw["grpo"]
    student = {**raw, "stage": "opd", "lora": {"init": "stage:merge"}}
    student["teachers"] = {"red": {"adapter": "stage:first"}, "blue": {"adapter": "stage:second"}}
    student["tasks"] = [{**raw["tasks"][0], "name": name} for name in ("red", "blue")]
    reward = {"name": "fakes:redness"}
    mark = {"name": "red", "prompts": raw["tasks"][0]["prompts"], "reward": reward}
    table = {"stage": "eval", "models": {"base": None, "student": "stage:student"}}
    table |= {"benchmarks": [mark], "sampling": {"steps": 2, "guidance": 1.0}}
    everything = {
        "first": {"use": "teacher.yaml", "set": ["train.updates=1"]},
        "second": {"use": "teacher.yaml", "train": {"updates": 1}, "seed": 7},
        "merge": {"stage": "merge", "adapters": ["stage:first", "stage:second"]},
        "student": student,
        "table": table,
    }
    base = {"id": model, "height": 32, "width": 32, "max_sequence_length": 14}
    data = {"stage": "recipe", "output": str(folder / "out"), "seed": 3, "model": base}
    data["stages"] = everything | stages
    path = folder / "recipe.yaml"
    path.write_text(dump_yaml(data))
    return path


@dataclass(frozen=True)
class FinishedRecipe:
    """The recipe that `written` gives, after `flowalign train`. output: what it printed. alive: how
    many models of earlier stages there were when a stage loaded its own."""

    config: Path
    output: str
    alive: list[int]

    @property
    def folder(self) -> Path:
        return self.config.parent / "out"


def finish(model: str, folder: Path) -> FinishedRecipe:
    """Run it. Tests get it as the fixture `finished_recipe`; one that damages it runs it again."""
    path = written(model, folder)
    raw = load_yaml(path.read_text())
    watched = ["train.updates=1", "evaluation={every: 1, prompts: 2}",
               "train.trackers=[tensorboard]"]  # fmt: skip
    for stage, tasks in {"first": 1, "student": 2}.items():
        held_out = [f"tasks.{i}.validation={folder / 'prompts.txt'}" for i in range(tasks)]
        raw["stages"][stage]["set"] = [*watched, *held_out]
    path.write_text(dump_yaml(raw))
    parts: list[weakref.ref[Any]] = []
    alive: list[int] = []
    real = base.load_pipeline

    def load(*args: Any, **options: Any) -> Any:
        alive.append(sum(part() is not None for part in parts))
        pipe = real(*args, **options)
        models = (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_3)
        parts.extend(map(weakref.ref, models))
        return pipe

    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as output:
        patched.setattr(base, "load_pipeline", load)
        fakes.AcceleratorState._reset_state(reset_partial_state=True)
        assert train.main(["--config", str(path)]) == 0
    return FinishedRecipe(path, output.getvalue(), alive)


def planned(path: Path) -> dict[str, Stage]:
    found = train.load(path, stage=train.Job)
    assert isinstance(found, RecipeStage)
    return fakes.stages_of(found, path.parent)


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planned(path)
    return list(map(str, caught.value.problems))


def test_stages_get_the_recipes_model_and_seed_and_each_others_adapters(
    random_model: str, tmp_path: Path
) -> None:
    stages = planned(written(random_model, tmp_path))
    first, second, merge, student, table = (stage.model_dump() for stage in stages.values())
    assert (first["seed"], second["seed"], first["train"]["updates"]) == (3, 7, 1)
    assert {stage.model.id for stage in stages.values()} == {random_model}
    out = tmp_path / "out"
    assert merge["adapters"] == [str(out / name / "adapter") for name in ("first", "second")]
    assert student["lora"]["init"] == str(out / "merge" / "adapter")
    assert table["models"] == {"base": None, "student": str(out / "student" / "adapter")}


def test_a_variant_reaches_the_stages_it_is_for_and_a_stages_set_comes_after(
    random_model: str, tmp_path: Path
) -> None:
    path = written(random_model, tmp_path, second={"use": "teacher.yaml", "set": ["train.keep=9"]})
    variant = tmp_path / "small.yaml"
    keys = {"grpo": {"train": {"keep": 7}, "model": {"decode_batch": 1}}, "opd": {"seed": 4}}
    variant.write_text(dump_yaml(keys))
    found: Any = train.load(path, stage=train.Job, variant=variant)
    plain, stages = planned(path), fakes.stages_of(found, path.parent)
    first, second = (stages[name].model_dump() for name in ("first", "second"))
    assert (first["train"]["keep"], second["train"]["keep"]) == (7, 9)
    assert first["model"]["decode_batch"] == 1 and first["model"]["id"] == random_model
    assert stages["merge"] == plain["merge"] and stages["table"] == plain["table"]
    assert plain["first"].model.decode_batch == 4


def test_the_command_line_comes_after_a_stages_set(random_model: str, tmp_path: Path) -> None:
    path = written(random_model, tmp_path, second={"use": "teacher.yaml", "set": ["train.keep=9"]})
    found: Any = train.load(path, ["stages.second.train.keep=8"], stage=train.Job)
    second: Any = fakes.stages_of(found, path.parent)["second"]
    assert second.train.keep == 8


def test_what_is_wrong_in_any_stage_is_said_before_the_first_runs(
    random_model: str, tmp_path: Path
) -> None:
    use = {"use": "teacher.yaml"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"use": "techer.yaml"}, "stages.first: no such file; there are"),
        ({**use, "set": "x=1"}, "stages.first.set: got 'x=1'"),
        ({**use, "set": ["tasks.3.name=x"]}, "stages.first.tasks: no item '3'"),
        ({**use, "rolout": {}}, "stages.first.rolout: unknown key"),
        ({**use, "lora": {"init": "stage:table"}}, "stages.first.stage:table: no earlier stage"),
        ({**use, "lora": {"init": "no/such/one"}}, "stages.first.lora.init: 'no/such/one'"),
        ({"stage": "recipe", "stages": {}}, "stages.first.stage: 'recipe' inside a recipe"),
        ({**use, "set": ["model.dtype=float16"]}, "stages: model.dtype is float16 in some"),
    ]
    for stage, said in cases:
        (problem,) = problems(written(random_model, tmp_path, first=stage))
        assert problem.startswith(said), (stage, problem)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_recipe_leaves_its_results_and_no_model(finished_recipe: FinishedRecipe) -> None:
    """No stage has the transformer, text encoders or VAE of an earlier one in memory."""
    out = finished_recipe.folder
    adapters = [file.parent.parent.name for file in out.glob(f"*/adapter/{ADAPTER}")]
    assert sorted(adapters) == ["first", "merge", "second", "student"]
    report = (out / "merge" / "report.md").read_text()
    assert report.startswith("concat of 2 updates")
    assert "| layer | rank | relative error |" in report
    assert report.splitlines()[0] in finished_recipe.output
    assert "student" in (out / "table" / "table.md").read_text()
    weights = load_file(out / "student" / "adapter" / ADAPTER)
    assert weights.keys() == load_file(out / "merge" / "adapter" / ADAPTER).keys()
    assert finished_recipe.alive == [0, 0, 0, 0]  # two teachers, the student, the table


@pytest.mark.slow
def test_a_recipe_runs_once_and_notices_what_changed(
    finished_recipe: FinishedRecipe, random_model: str
) -> None:
    path, out = finished_recipe.config, finished_recipe.folder
    times = {file: file.stat().st_mtime_ns for file in out.rglob(ADAPTER)}
    assert train.main(["--config", str(path)]) == 0
    assert {file: file.stat().st_mtime_ns for file in out.rglob(ADAPTER)} == times
    sound = path.read_text()
    raw = load_yaml(sound)
    raw["stages"]["second"]["seed"] = 8
    path.write_text(dump_yaml(raw))
    (changed,) = problems(path)
    assert "out/second: finished with another seed. Delete" in changed
    path.write_text(sound)
    done = manifest.read_manifest(out / "merge", file="done.json")
    inputs = {**done.about["inputs"], str(out / "first" / "adapter"): "0" * 64}
    manifest.write_manifest(
        out / "merge", {**done.about, "inputs": inputs}, done.files, file="done.json"
    )
    (stale,) = problems(path)
    assert "out/merge: finished with another adapters.0" in stale
    manifest.write_manifest(out / "merge", done.about, done.files, file="done.json")


@pytest.mark.parametrize("name", ["first/adapter/" + ADAPTER, "first/done.json", "merge/report.md"])
@pytest.mark.slow
def test_a_damaged_stage_is_run_again_and_the_others_stay(
    finished_recipe: FinishedRecipe, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = finished_recipe.folder
    # read, not mapped: one of the files is about to be cut
    before = {file: load(file.read_bytes()) for file in out.rglob(f"adapter/{ADAPTER}")}
    sound = manifest.read_manifest(out / "second", file="done.json")
    (out / name).write_text("garbage")
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    assert train.main(["--config", str(finished_recipe.config)]) == 0
    (said,) = [r.getMessage() for r in caplog.records if "It is run again" in r.getMessage()]
    assert name.split("/")[0] in said and name.split("/")[-1] in said
    for file, weights in before.items():
        now = load_file(file)
        assert now.keys() == weights.keys()
        assert all((now[key] == weights[key]).all() for key in weights)
    assert manifest.check_manifest(out / name.split("/")[0], file="done.json")
    assert manifest.check_manifest(out / "second", file="done.json") == sound


@pytest.mark.slow
def test_a_killed_stage_continues_from_its_checkpoint(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = {"use": "teacher.yaml", "train": {"updates": 3, "checkpoint_every": 1}}
    path = written(random_model, tmp_path, second=longer)
    data = load_yaml(path.read_text())
    data["stages"] = {name: data["stages"][name] for name in ("first", "second")}
    path.write_text(dump_yaml(data))
    inner, asked = Loop.rollout, list[tuple[str, int]]()

    def rollout(self: Loop, update: int) -> Any:
        asked.append((self.folder.name, update))
        if asked.count(("second", 2)) == 1:
            raise RuntimeError("killed")
        return inner(self, update)

    monkeypatch.setattr(Loop, "rollout", rollout)
    with pytest.raises(RuntimeError, match="killed"):
        train.main(["--config", str(path)])
    assert train.main(["--config", str(path)]) == 0
    updates = [("first", 0), ("second", 0), ("second", 1), ("second", 2)]
    assert asked == [*updates, ("second", 2)]


@pytest.mark.parametrize("name", ["flow_opd", "demo"])
def test_the_shipped_recipes_are_sound(name: str, tmp_path: Path) -> None:
    """Every stage is checked as a run would be; the table has a row for each that makes a model."""
    path = Path(__file__).parent.parent / "configs" / "tiny" / f"{name}.yaml"
    config: Any = train.load(path, [f"output={tmp_path}"], stage=RecipeStage)
    stages: dict[str, Any] = fakes.stages_of(config, path.parent)
    table = stages.pop("table")
    made = {str(tmp_path / stage / "adapter") for stage in stages}
    assert made <= set(table.models.values()) and list(table.models)[0] == "base"
    assert {mark.name for mark in table.benchmarks} == {"geneval", "ocr", "preference"}
