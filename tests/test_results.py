"""Which adapter a run kept is said by the run, by its card and by an evaluation of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fakes
import pytest

from flowalign.commands import cli
from flowalign.config import to_yaml
from flowalign.eval import report
from flowalign.report.pictures import charts, read_metrics
from flowalign.report.summary import kept_adapter, stage_summary
from flowalign.system.folder import RunFolder


@pytest.mark.slow
def test_a_run_says_which_adapter_was_kept_and_warns_if_it_is_the_one_it_began_with(
    random_model: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    folder, drawn = tmp_path / "run", []
    monkeypatch.setattr(
        report, "comparison", lambda path, blocks, **_: drawn.extend(blocks) or path.touch()
    )
    monkeypatch.chdir(tmp_path)
    config = fakes.settings(
        random_model, folder, "train.updates=2", "evaluation={every: 1, prompts: 2}",
        "tasks.0.validation=tiny/ocr_val", "optimizer.lr=1e-30",  # nothing changes: the first stays
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    given = ["--config", str(tmp_path / "config.yaml")]
    assert fakes.command(*given) == 0
    assert "kept: update 0 of 2 (held-out " in capsys.readouterr().out
    assert (folder / "samples" / "update_000002.png").exists()  # the last, before it is due
    warnings = [
        json.loads(line)["text"] for line in RunFolder(folder).warnings.read_text().splitlines()
    ]
    (warning,) = [text for text in warnings if "update 0 of 2" in text]
    assert "optimizer.lr" in warning and "the base model" in warning

    models = {"base": None, "student": str(folder / "adapter")}
    table = fakes.evaluation(random_model, tmp_path, ["a"], models=models, output="eval")
    assert cli.main(["eval", "--config", str(table)]) == 0
    shown = capsys.readouterr().out
    assert f"--lora {folder}/adapter" not in shown and "kept: update 0" in shown
    for name in ("table.md", "report.html"):
        text = (tmp_path / "eval" / name).read_text()
        assert "student: kept: update 0 of 2" in text and "equals the base model" in text
    rows = [row for block in drawn for row in block.rows]
    assert ["kept: update 0" in row.note for row in rows] == [False, True]

    command = warning.partition("with --resume ")[2].rstrip(".")  # what it advises works
    assert fakes.command(*given, "--resume", command) == 0
    assert "kept:" not in capsys.readouterr().out
    card = (folder / "adapter" / "README.md").read_text()
    assert "results:" not in card and "(none were taken of this adapter)" in card
    assert RunFolder(folder).warnings.read_text().count("update 0 of 2") == 1


def evaluated(folder: Path, chosen: int, headlines: list[float], **scores: float) -> Path:
    """The files of a run that kept the adapter of evaluation `chosen`."""
    rows = [
        {"update": 10 * n, "eval/headline": value, "fixed_path": 0.5, "fixed_path/ocr": 0.5}
        | scores
        for n, value in enumerate(headlines)
    ]
    (folder / "adapter").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "adapter" / "scores.json").write_text(json.dumps({"update": 10 * chosen}))
    return folder


@pytest.mark.parametrize(
    ("headlines", "chosen", "numbers"),
    [
        ([-1.0, -0.31, -0.46], 1, ["10", "20", "0.310", "0.460"]),
        ([-0.2, -0.31, -0.46], 1, ["10", "20", "0.310", "0.460", "0.200"]),
        ([-1.0, -0.46, -0.31], 2, ["20", "20", "0.310"]),
        ([-0.25, -0.5], 0, ["0", "10", "0.250", "0.500"]),
    ],
)
def test_the_distances_of_a_student_without_rewards_are_numbers(
    tmp_path: Path, headlines: list[float], chosen: int, numbers: list[str]
) -> None:
    """Kept, last and start, each as a distance, which is positive."""
    text = str(kept_adapter(evaluated(tmp_path, chosen, headlines)))
    assert re.findall(r"-?\d+(?:\.\d+)?", text) == numbers


def test_the_scores_of_a_run_with_rewards_keep_their_sign(tmp_path: Path) -> None:
    text = str(
        kept_adapter(evaluated(tmp_path, 1, [0.5, -0.25, -0.75], **{"eval/red/reward": 0.5}))
    )
    assert re.findall(r"-?\d+\.\d+", text) == ["-0.250", "-0.750", "0.500"]


@pytest.mark.usefixtures("drawn")
def test_a_distance_is_drawn_as_one(tmp_path: Path) -> None:
    """Without rewards: on the page of a run, and by `eval curves`."""
    student = evaluated(tmp_path / "student", 1, [-1.0, -0.18])
    drawn = {chart.title: chart for chart in charts(read_metrics(student / "metrics.jsonl"))}
    assert list(drawn) == ["held-out distance to the teachers"]
    (chart,) = drawn.values()
    assert chart.curves.keys() == {"fixed_path", "ocr"}
    scored = evaluated(tmp_path / "scored", 1, [0.1, 0.2], **{"eval/red/reward": 0.5})
    titles = [chart.title for chart in charts(read_metrics(scored / "metrics.jsonl"))]
    assert titles == ["held-out score", "held-out distance to the teachers"]

    out = tmp_path / "curves.svg"
    assert cli.main(["eval", "curves", str(student), "--out", str(out)]) == 0
    texts = re.findall(r"<!-- (.*?) -->", out.read_text())
    assert "held-out distance to the teachers" in texts and "held-out score" not in texts
    assert not [text for text in texts if text.startswith("\N{MINUS SIGN}")]
    assert cli.main(["eval", "curves", str(student), str(scored), "--out", str(out)]) == 0
    texts = re.findall(r"<!-- (.*?) -->", out.read_text())
    assert {"held-out distance to the teachers", "mean of the tasks", "red"} <= {*texts}


def test_a_student_is_looked_at_beside_its_teachers(tmp_path: Path) -> None:
    config: Any = fakes.distillation("tiny", tmp_path)
    (tmp_path / "adapter").mkdir()
    (line,) = [line for line in stage_summary(config).splitlines() if "sample PROMPT" in line]
    loras = [teacher.adapter for teacher in config.teachers.values()]
    assert line.split()[3:] == [
        w for lora in [f"{tmp_path}/adapter", *loras] for w in ("--lora", lora)
    ]
