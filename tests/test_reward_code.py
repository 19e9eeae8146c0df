"""What a score depends on includes the code of its reward: another code, other scores."""

import importlib
import json
import linecache
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest

from flowalign import rewards
from flowalign.commands import recipe
from flowalign.commands.evaluate import main as evaluate
from flowalign.config import EvalStage, load, to_yaml
from flowalign.eval.compare import Incomparable, compare, load_results
from flowalign.rewards import REWARDS, RewardSpec, source
from flowalign.system import manifest
from flowalign.training.run import resume

SCORE = """
from flowalign.types import Scores
import fakes

def red(images, prompts, metadata):
    return Scores.of(SIZE * fakes.redness(images, prompts, metadata).value)
"""


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the test's folder can be imported, and are gone afterwards."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rewards, "_registered", {})
    yield
    forget(*({*sys.modules} - before))


def forget(*modules: str) -> None:
    """As in a new process."""
    for name in modules:
        if "flowalign" not in name:
            sys.modules.pop(name, None)
    importlib.invalidate_caches()


def write(folder: Path, size: float) -> None:
    (folder / "mine.py").write_text(f"SIZE = {size}\n{SCORE}")
    forget("mine")


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("mine:f", ["from helpers import f"]),
        ("mine:f", ["def f(x):\n    import helpers\n    return helpers.f(x)"]),
        ("mine.inner:f", ["", "from ..helpers import f"]),
        ("space.inner:f", [None, "from space.helpers import f"]),
    ],
)
def test_the_code_that_a_reward_imports_counts_wherever_it_is_imported(
    path: str, imported: list[str | None], tmp_path: Path
) -> None:
    """Beside it, inside a function, in a package, in a folder without __init__.py."""
    if len(imported) == 1:
        (tmp_path / "mine.py").write_text(imported[0] or "")
        helpers, unrelated = tmp_path / "helpers.py", tmp_path / "unrelated.py"
    else:
        package = tmp_path / path.partition(".")[0]
        package.mkdir()
        if imported[0] is not None:
            (package / "__init__.py").write_text(imported[0])
        (package / "inner.py").write_text((imported[1] or "").replace("..", "."))
        helpers, unrelated = package / "helpers.py", package / "unrelated.py"
    digests = []
    for text in ("def f(x): return x", "def f(x): return 2 * x", "def f(x): return x"):
        helpers.write_text(text)
        digests.append(RewardSpec(path).code_digests[path])
        unrelated.write_text(text)
    assert digests[0] == digests[2] != digests[1]


def test_a_built_in_reward_and_what_a_composed_one_is_made_of_count(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    assert all(RewardSpec(name).code_digests == RewardSpec(name).code_digests for name in REWARDS)
    parts = [{"name": "ocr"}, {"name": "normalized", "options": {"reward": {"name": "mine:red"}}}]
    before = RewardSpec("weighted", {"rewards": parts}).code_digests
    assert before == RewardSpec("weighted", {"rewards": parts}).code_digests
    assert before.keys() == {"weighted", "ocr", "mine:red"}
    write(tmp_path, 2.0)
    after = RewardSpec("weighted", {"rewards": parts}).code_digests
    assert [name for name in before if before[name] != after[name]] == ["mine:red"]
    assert RewardSpec("vlm", {"template": "Say:yes", "url": "x"}).code_digests.keys() == {
        "vlm"
    }  # no module
    assert RewardSpec("nowhere:f").code_digests != RewardSpec("nowhere:f").code_digests  # not known


@pytest.mark.slow
def test_the_version_of_an_installed_plugin_counts_and_not_its_neighbours(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    about = site / "plug-1.0.dist-info"
    about.mkdir(parents=True)
    sys.path.insert(0, str(site))
    try:
        (site / "plug.py").write_text("import other\ndef f(images, prompts, metadata): ...")
        (about / "top_level.txt").write_text("plug\n")
        digests = []
        for version, other in (("1.0", "a = 1"), ("1.0", "a = 2"), ("1.1", "a = 2")):
            text = f"Metadata-Version: 2.1\nName: plug\nVersion: {version}"
            (about / "METADATA").write_text(text)
            (site / "other.py").write_text(other)
            digests.append(RewardSpec("plug:f").code_digests["plug:f"])
    finally:
        sys.path.remove(str(site))
    assert digests[0] == digests[1] != digests[2]


CELLS = (
    """
from flowalign.types import Scores
SIZE = {size}
unrelated = {unrelated}
""",
    """
def scale(x): return {factor} * x
""",
    """
class Base:
    bonus = {bonus}
""",
    """
class Red(Base):
    def __call__(self, images, prompts, metadata):
        return Scores.of([SIZE * scale(1.0) + self.bonus for _ in prompts])
""",
    """
def red(images, prompts, metadata):
    return Scores.of([SIZE * scale({bonus}) for _ in prompts])
""",
)


@pytest.mark.parametrize("last", ["Red", "red", "Red().__call__"])
def test_what_was_typed_into_a_notebook_counts_with_what_it_uses(last: str) -> None:
    def digest(**changes: float) -> Any:
        values = {"size": 1, "factor": 1, "bonus": 0, "unrelated": 1} | changes
        names: dict[str, Any] = {"__name__": "__main__"}
        for number, text in enumerate(CELLS):
            text = text.format(**values)
            file = f"<cell {number} of {len(linecache.cache)}>"
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            exec(compile(text, file, "exec"), names)
        return source.digest(eval(last, names))

    digests = [digest(), *(digest(**{change: 7}) for change in ("size", "factor", "bonus"))]
    assert digest() == digest(unrelated=7) == digests[0] and len({*digests}) == 4


def test_a_process_that_runs_what_it_imported_says_so(tmp_path, caplog) -> None:
    write(tmp_path, 1.0)
    first = RewardSpec("mine:red").build().code_digests
    (tmp_path / "mine.py").write_text(f"SIZE = 2.0\n{SCORE}")
    assert RewardSpec("mine:red").build().code_digests == first and "mine was edited" in caplog.text
    importlib.reload(sys.modules["mine"])
    assert RewardSpec("mine:red").build().code_digests != first


def scored(config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, float]:
    """What an evaluation says of its scores, and the number."""
    assert evaluate(["--config", str(config)]) == 0
    line = next(x for x in capsys.readouterr().err.splitlines() if x.startswith("base: red"))
    rows = json.loads((config.parent / "out" / "results.json").read_text())["models"]["base"]
    return line.partition(" (")[2], rows["images"]["red"][0]["value"]


def test_an_evaluation_takes_over_the_scores_of_this_code_only(random_model, tmp_path, capsys):
    write(tmp_path, 1.0)
    mark = {"reward": {"name": "mine:red"}}
    config = fakes.evaluation(
        random_model, tmp_path, ["a", "b"], mark, models={"base": None}, keep_images=True
    )
    said, first = scored(config, capsys)
    shutil.copytree(tmp_path / "out", tmp_path / "then")
    assert said == "0 scores taken over, 2 made)"
    assert scored(config, capsys) == ("2 scores taken over, 0 made)", first)
    write(tmp_path, 0.01)
    said, other = scored(config, capsys)
    assert said == "0 scores taken over, 2 made)" and other == pytest.approx(0.01 * first)
    write(tmp_path, 1.0)  # both are kept
    assert scored(config, capsys) == ("2 scores taken over, 0 made)", first)
    write(tmp_path, 0.01)
    scored(config, capsys)
    then, now = (load_results(tmp_path / name / "results.json") for name in ("then", "out"))
    with pytest.raises(Incomparable, match="code is"):
        compare(then, now, ("base", "base"))


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_code_of_its_reward_unless_it_is_allowed(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1.0)
    held_out = [f"tasks.0.validation={tmp_path / 'prompts.txt'}", "evaluation={every: 1}"]
    name = "tasks.0.reward.name=mine:red"
    given = fakes.settings(random_model, tmp_path / "run", *held_out, name, "train.updates=1")
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(given))
    assert fakes.command("--config", config) == 0
    again = ["--config", config, "--resume"]
    write(tmp_path, -1.0)
    assert fakes.command(*again, "train.updates=2") == 2
    said = capsys.readouterr().err
    assert "tasks.0.reward: the code of mine:red" in said
    assert "train.allow_changed_rewards=true" in said
    assert fakes.command(*again, "train.allow_changed_rewards=true", "train.updates=2") == 0
    assert "allow_changed" not in (tmp_path / "run" / "config.yaml").read_text()
    best = json.loads((tmp_path / "run" / "adapter" / "scores.json").read_text())
    rows = [row for row in fakes.lines(tmp_path / "run") if row["update"] == 2]
    (last,) = (row["eval/headline"] for row in rows if "lr" not in row)
    assert best == {"headline": last, "update": 2}  # not that of the other scale
    (folder,) = resume.checkpoints(tmp_path / "run")[-1:]
    sealed = manifest.read_manifest(folder)
    about = {key: value for key, value in sealed.about.items() if key != "rewards"}
    manifest.write_manifest(folder, about, sealed.files)
    write(tmp_path, 3.0)
    assert fakes.command(*again, "train.updates=3") == 0  # an older checkpoint


def test_a_finished_stage_of_a_recipe_is_not_finished_with_another_code(tmp_path: Path) -> None:
    """An evaluation is then run again; training is refused as above."""
    write(tmp_path, 1.0)
    mark = {"reward": {"name": "mine:red"}}
    stage = load(fakes.evaluation("tiny", tmp_path, ["a"], mark), stage=EvalStage)
    about = {"config": stage.model_dump(mode="json"), "rewards": resume.rewards_code(stage)}
    Path(stage.output).mkdir()
    manifest.write_manifest(stage.output, about, [], file=stage.folder.done.name)
    assert recipe.damage_of(stage) is None
    write(tmp_path, 2.0)
    assert "benchmarks.0.reward: the code of mine:red" in (recipe.damage_of(stage) or "")
