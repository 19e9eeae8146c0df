"""report.html of a run and of a recipe: what it shows, also of a run that goes on; `watch`."""

from __future__ import annotations

import json
from pathlib import Path

import fakes
import pytest
import torch
from browser import Page

from flowalign.commands.cli import main
from flowalign.config import to_yaml
from flowalign.config.safe_yaml import dump_yaml
from flowalign.report import samples
from flowalign.report.pictures import png
from flowalign.system.folder import RunFolder
from flowalign.types import Example

PROMPT = '<b>a sign</b> that says "A&B"'


def run(folder: Path) -> Path:
    """The files of a GRPO run of which five of ten updates are done."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(fakes.settings("tiny", folder, "train.updates=10")))
    rows = [{"update": n, "reward": n / 10, "kl": 1e-4, "images_per_second": 2.5} for n in range(6)]
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"update": 6, "rew')  # cut short
    return folder


def written(folder: Path) -> Page:
    assert main(["watch", str(folder)]) == 0
    return Page(RunFolder(folder).page.read_text())


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    row = {"time": 0.0, "update": 5, "text": "the judge is <gone>"}
    RunFolder(folder).warnings.write_text(json.dumps(row) + "\n")
    shown = written(folder)
    assert "updates5 of 10" in shown.text
    assert "reward0.500" in shown.text  # a line that is cut short does not count
    assert ", update 5the judge is <gone>" in shown.text  # two cells of a row
    assert not shown.open and ("gone", {}) not in shown.tags


def test_the_score_of_the_adapter_is_that_of_the_one_that_is_kept(tmp_path: Path) -> None:
    """Which may not be the highest: the first weights stay only by more than a standard error."""
    folder = run(tmp_path / "run")
    rows = [
        {"update": n, "eval/headline": v, "eval/a": v}
        for n, v in ((0, 0.799), (1, 0.764), (2, 0.75))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "scores.json").write_text('{"headline": 0.764, "update": 1}')
    shown = written(folder).text
    assert "kept adapterheld-out 0.764 at update 1" in shown
    assert "newest evaluationheld-out 0.750 at update 2" in shown
    (folder / "adapter" / "scores.json").write_text("{}")
    assert "kept adapter" not in written(folder).text


def test_the_newest_samples_and_the_first_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(samples, "KEPT", 3)
    folder, picture = run(tmp_path / "run"), png(torch.zeros(3, 8, 8))
    for update in range(0, 100, 10):
        samples.write_examples(folder, update, [Example(PROMPT, 0.5, picture)])
    (folder / "samples" / "update_000005.png").touch()  # of a rollout: another kind
    names = sorted(path.name for path in (folder / "samples").iterdir())
    kept = [f"held_out_{update:06d}.png" for update in (0, 70, 80, 90)]
    assert names == [*kept, "update_000005.png"]


def test_a_recipe_shows_its_stages_and_the_tables_that_results_json_holds(tmp_path: Path) -> None:
    stages = {"teacher": {"stage": "grpo"}, "the table": {"stage": "eval"}, "later": {}}
    recipe = {"stage": "recipe", "stages": stages}
    (tmp_path / "config.yaml").write_text(dump_yaml(recipe))
    run(tmp_path / "teacher")
    table = {"caption": "Mean.", "rows": [["", "ocr"], ["a|b", ".5 ± .1"]], "notes": ["a <note>"]}
    results = {"remarks": ["student: kept_it."], "tables": [table]}
    (tmp_path / "the table").mkdir()
    (tmp_path / "the table" / "report.html").touch()
    (tmp_path / "the table" / "results.json").write_text(json.dumps(results))
    shown = written(tmp_path)
    assert "1. teacher (grpo)" in shown.text and "updates5 of" in shown.text
    assert {"href": "the%20table/report.html"} in shown.all("a")
    assert "student: kept_it." in shown.text and "a|b.5 ± .1" in shown.text
    assert shown.text.count("It has not begun.") == 1 and "a <note>" in shown.text


@pytest.mark.parametrize("content", [None, "", "a: 1", "{"])
def test_a_folder_without_a_page_of_its_own_is_refused(tmp_path, content: str | None, capsys):
    run(tmp_path / "inside")
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert main(["watch", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "inside") in said
    assert not RunFolder(tmp_path).page.exists()
    assert main(["watch", str(tmp_path / "nowhere")]) == 2


def test_the_page_of_a_finished_run(finished_run: fakes.FinishedRun) -> None:
    shown = Page(RunFolder(finished_run.folder).page.read_text())
    assert "updates2 of 2" in shown.text and "Drift from the base" in shown.text
    assert shown.loaded() and all(source.startswith("data:") for source in shown.loaded())
    kinds = [source[:16] for source in shown.loaded()]
    newest = samples.read_json(finished_run.folder, samples.DRIFT)
    assert newest and (pairs := len(newest[1]["rows"])) > 1
    assert kinds.count("data:image/webp;") == 2 * pairs
    assert kinds.count("data:image/png;b") == 4  # curves, before and after, held-out, samples
