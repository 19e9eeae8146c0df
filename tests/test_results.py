"""What commands say at their end: every path is there, and the next command is one that runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import fakes
import pytest
import yaml

from flowalign import cli, sample, train
from flowalign.config import to_yaml


def places(text: str) -> dict[str, Path]:
    """{what: path} of the results that a command named; checks that they exist, and the rest."""
    listed, steps = text.partition("\nResults:\n")[2].split("Next:\n")
    named = [line.split("  ", 2)[1:] for line in listed.splitlines() if line]
    found = {what.strip(): Path(path.strip()) for what, path in named}
    assert found and [path for path in found.values() if not path.exists()] == []
    for step in filter(None, map(str.strip, steps.splitlines())):
        if step.startswith("open "):
            page = step.removeprefix("open ").removesuffix(" in a browser")
            assert Path(page) in found.values()
            continue
        words = shlex.split(step)
        assert words[0] == "flowalign" and words[1] in cli.COMMANDS
        if words[1] == "sample":
            assert Path(sample.parser().parse_args(words[2:]).lora) in found.values()
    return found


def test_a_run_names_its_adapter_checkpoint_pictures_and_report(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    config = fakes.settings(random_model, folder, "train.updates=2", "train.sample_every=1")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    assert train.main(["--config", str(tmp_path / "config.yaml")]) == 0
    found = places(capsys.readouterr().out)
    names = {"page": "watch.html", "adapter": "adapter", "checkpoint": "checkpoints/update_000002"}
    for what, name in names.items():
        assert found[what] == folder / name
    assert {"metrics", "curves", "samples"} <= found.keys()


def test_a_recipe_an_evaluation_and_a_merge_name_theirs(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teachers = fakes.teachers(random_model, tmp_path)
    mark = {"name": "red", "prompts": "tiny/ocr_val", "limit": 2}
    table = {
        "stage": "eval",
        "benchmarks": [{**mark, "reward": {"name": "fakes:redness"}}],
        "models": {"base": None, "merge": "stage:both"},
        "sampling": {"steps": 2, "guidance": 1.0},
    }
    merge = {"stage": "merge", "adapters": list(teachers.values())}
    model = {"id": random_model, "height": 32, "width": 32, "max_sequence_length": 16}
    recipe = {"stage": "recipe", "output": str(tmp_path / "out"), "model": model}
    recipe["stages"] = {"both": merge, "table": table}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    assert cli.main(["train", "--config", str(tmp_path / "recipe.yaml")]) == 0
    found = places(capsys.readouterr().out)
    assert found["both: adapter"] == tmp_path / "out" / "both" / "adapter"
    assert found["table: report"] == tmp_path / "out" / "table" / "report.html"
    assert found["page"] == tmp_path / "out" / "watch.html"

    again = ["--config", str(tmp_path / "out" / "config.yaml")]  # what the recipe kept is whole
    assert cli.main(["train", *again]) == 0
    assert "finished before" in capsys.readouterr().out

    table |= {"models": {"base": None}, "output": str(tmp_path / "eval"), "model": model}
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(table))
    assert cli.main(["eval", "--config", str(tmp_path / "eval.yaml")]) == 0
    assert {"report", "table", "numbers"} <= places(capsys.readouterr().out).keys()

    assert cli.main(["merge", *teachers.values(), "--out", str(tmp_path / "sum")]) == 0
    assert "adapter" in capsys.readouterr().out.partition("Results:")[2]
