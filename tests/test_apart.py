"""What a run is chosen by is not what an evaluation reports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowalign.config import EvalStage, RecipeStage, Stage, TrainingStage, load

CONFIGS = Path(__file__).parent.parent / "configs"
FOLDERS = sorted(path for path in CONFIGS.iterdir() if list(path.glob("eval*.yaml")))


def configs(folder: Path) -> Iterator[Stage]:
    """Every config of a folder that is run by itself."""
    for path in sorted(folder.glob("[!_]*.yaml")):
        found = load(path, stage=Stage)
        if not isinstance(found, RecipeStage):  # its stages are files of the folder
            yield found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_no_run_validates_on_a_set_that_an_evaluation_reports(folder: Path) -> None:
    found = list(configs(folder))
    evaluations = [each for each in found if isinstance(each, EvalStage)]
    reported = {mark.prompts for each in evaluations for mark in each.benchmarks}
    used: dict[str, set[str]] = {}
    for config in found:
        if isinstance(config, TrainingStage):
            for task in config.tasks:
                used.setdefault(config.output, set()).update({task.prompts, str(task.validation)})
    assert reported and used
    assert {run: both for run, sets in used.items() if (both := sets & reported)} == {}
