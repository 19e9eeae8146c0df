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
        config = load(path, stage=Stage)
        if not isinstance(config, RecipeStage):  # its stages are files of the folder
            yield config


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_no_run_validates_on_a_set_that_an_evaluation_reports(folder: Path) -> None:
    stages = list(configs(folder))
    evaluations = [stage for stage in stages if isinstance(stage, EvalStage)]
    reported = {mark.prompts for stage in evaluations for mark in stage.benchmarks}
    used: dict[str, set[str]] = {}
    for config in stages:
        if isinstance(config, TrainingStage):
            for task in config.tasks:
                used.setdefault(config.output, set()).update({task.prompts, str(task.validation)})
    assert reported and used
    assert {run: both for run, sets in used.items() if (both := sets & reported)} == {}
