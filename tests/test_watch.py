"""`flowalign watch`: what its page shows of a run that goes on, ends, dies, or is none."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
import yaml
from browser import Page

from flowalign.commands import watch
from flowalign.config import to_yaml
from flowalign.training import metrics
from flowalign.training.report import samples
from flowalign.training.report.pictures import png
from flowalign.training.report.progress import Progress
from flowalign.training.report.status import SILENCE, Heartbeat, Status
from flowalign.types import Example

PROMPT = '<b>a sign</b> that says "A&B"'


def run(folder: Path, **status: Any) -> Path:
    """The files of a GRPO run of which five of ten updates are done."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(fakes.settings("tiny", folder, "train.updates=10")))
    rows = [{"update": n, "reward": n / 10, "kl": 1e-4, "images_per_second": 2.5} for n in range(6)]
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"update": 6, "rew')  # cut short
    values = {"heard": time.time(), "update": 5, "total": 10, "seconds": 60.0, **status}
    (folder / "status.json").write_text(json.dumps(vars(Status(began=time.time() - 300, **values))))
    return folder


def states(page: Page) -> list[str]:
    """Of the run, and of the stages of a recipe."""
    found = [(attributes.get("class") or "").split() for _, attributes in page.tags]
    return [words[1] for words in found if words[:1] == ["state"]]


def page(folder: Path, *options: str) -> Page:
    assert watch.main([str(folder), "--once", *options]) == 0
    return Page((folder / watch.PAGE).read_text())


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    shown = page(run(tmp_path / "run"), "--every", "7")
    assert states(shown) == ["running"]
    assert "update 5 of 10" in shown.text and "about 5 min left" in shown.text
    assert metrics.MEANINGS[metrics.REWARD] in shown.text
    assert "reward0.500" in shown.text  # a line that is cut short does not count
    assert [a for t, a in shown.tags if t == "meta" and a.get("http-equiv") == "refresh"] == [
        {"http-equiv": "refresh", "content": "7"}
    ]


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
    shown = page(folder).text
    assert "kept adapterheld-out 0.764 at update 1" in shown
    assert "newest evaluationheld-out 0.750 at update 2" in shown
    (folder / "adapter" / "scores.json").write_text("{}")
    assert "kept adapter" not in page(folder).text


def keep_images(folder: Path, *scores: float) -> None:
    """As an evaluation after five updates."""
    picture = png(torch.rand(3, 32, 32))
    samples.write_examples(folder, 5, [Example("ocr", PROMPT, score, picture) for score in scores])


def test_samples_stand_with_their_prompts_and_rewards_and_texts_are_escaped(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    keep_images(folder, 0.25, float("nan"))
    (folder / "samples" / "held_out_000009.json").write_text('[{"prompt": "cut sh')
    shown = page(folder)
    assert PROMPT in shown.text and "0.25failed" in re.sub(r"\s", "", shown.text)
    assert "at update 5." in shown.text and ("b", {}) not in shown.tags


def test_a_page_of_a_long_run_has_a_bounded_size(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    sizes = []
    for count in (1_000, 5_000):
        rows = [{"update": n, "reward": n % 7 / 10, "eval/headline": n / 9} for n in range(count)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        watch.write(folder)
        sizes.append((folder / watch.PAGE).stat().st_size)
    assert sizes[1] < 1.2 * sizes[0] < 1_000_000


def test_the_newest_samples_are_kept_and_the_oldest(tmp_path: Path) -> None:
    picture = png(torch.zeros(3, 8, 8))
    for update in range(0, 100, 10):
        rows = [Example("signs", PROMPT, 0.5, picture)]
        samples.write_examples(tmp_path, update, rows, keep=3)
    (tmp_path / "samples" / "update_000005.png").touch()  # of a rollout: another kind
    names = sorted(path.name for path in (tmp_path / "samples").glob("held_out_*.json"))
    kept = [0, 70, 80, 90]
    assert names == [f"held_out_{update:06d}.json" for update in kept]
    assert len(list((tmp_path / "samples").iterdir())) == 2 * len(kept) + 1
    oldest = samples.read_sample(tmp_path, samples.EVALUATION, oldest=True)
    assert oldest and oldest[0] == 0


def test_a_run_that_was_killed_was_last_heard_minutes_ago(tmp_path: Path) -> None:
    shown = page(run(tmp_path / "run", heard=time.time() - SILENCE - 420))
    assert states(shown) == ["dead"]
    assert "last heard 10 min ago" in shown.text and "--resume" in shown.text


def test_a_run_that_stopped_says_why_and_its_page_rests(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError), Heartbeat(run(folder), update=5, total=10):
        logging.getLogger("flowalign.rewards").warning("the judge %s", "is <gone>")
        assert states(page(folder)) == ["running"]
        raise RuntimeError("no <reward> left")
    shown = page(folder)
    assert states(shown) == ["stopped"] and "no <reward> left" in shown.text
    assert ", update 5the judge is <gone>" in shown.text  # two cells of a row
    assert not any(a.get("http-equiv") == "refresh" for _, a in shown.tags)


def test_the_stages_of_a_recipe_have_their_states(tmp_path: Path) -> None:
    names = ["done", "now", "later"]
    recipe = {
        "stage": "recipe",
        "output": str(tmp_path),
        "stages": {name: {"stage": "grpo"} for name in names},
    }
    (tmp_path / "config.yaml").write_text(yaml.dump(recipe, sort_keys=False))
    now = time.time()
    status = Status(began=now, heard=now, text="now", update=1, total=3)
    (tmp_path / "status.json").write_text(json.dumps(vars(status)))
    run(tmp_path / "done")
    (tmp_path / "done" / "done.json").write_text("{}")
    run(tmp_path / "now")
    shown = page(tmp_path)
    assert states(shown)[:4] == ["running", "finished", "running", "waiting"]
    assert "1 of 3 stages done" in shown.text and "about 5 min left" in shown.text


def test_the_table_of_a_recipe_is_a_table_with_its_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("stage: recipe\nstages: {the table: {stage: eval}}\n")
    folder = tmp_path / "the table"
    folder.mkdir()
    (folder / "done.json").write_text("{}")
    (folder / "report.html").touch()
    lines = ["student: kept\\_it.", "", "| | ocr |", "|---|---|", "| a\\|b | **.5 ± .1** |"]
    (folder / "table.md").write_text("\n".join([*lines, "", "Every metric:", "| x |", "|---|"]))
    watch.write(tmp_path)
    page = (tmp_path / "watch.html").read_text()
    assert 'href="the%20table/report.html"' in page and "student: kept_it." in page
    assert "<th>a|b</th><td>.5 ± .1</td>" in page and "|---|" not in page
    (folder / "table.md").write_text("|")  # a file that something else wrote
    watch.write(tmp_path)


@pytest.mark.parametrize("content", [None, "", "a: 1", "{"])
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "inside")
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert watch.main([str(tmp_path)]) == 2
    assert str(tmp_path / "inside") in capsys.readouterr().err
    assert not (tmp_path / watch.PAGE).exists()
    assert watch.main([str(tmp_path / "nowhere")]) == 2


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    folder, out = run(tmp_path / "run"), tmp_path / "elsewhere" / "page.html"
    codes: list[int] = []
    given = [str(folder), "--every", "0.05", "--out", str(out)]
    with Heartbeat(folder, update=5, total=10):
        thread = threading.Thread(target=lambda: codes.append(watch.main(given)))
        thread.start()
        while not out.exists():
            time.sleep(0.01)
        thread.join(0.3)
        assert thread.is_alive() and states(Page(out.read_text())) == ["running"]
    thread.join(20)
    assert codes == [0] and states(Page(out.read_text())) == ["finished"]


def test_the_page_of_a_finished_run_is_its_report(finished_run: fakes.FinishedRun) -> None:
    shown = Page((finished_run.folder / watch.PAGE).read_text())
    assert states(shown) == ["finished"] and "update 2 of 2" in shown.text
    assert "Drift from the base" in shown.text
    kinds = [(source or "")[:16] for source in [image.get("src") for image in shown.all("img")]]
    # 16 of the rollout; of two tasks eight held-out prompts at updates 0 and 2; of both checks of
    # the drift the most drifted prompts, both models; before and after
    checks = [samples.read_sample(finished_run.folder, kind) for kind in samples.DRIFTS]
    pairs = sum(len(check["rows"]) for _, check in filter(None, checks))
    assert pairs > 8 and kinds.count("data:image/webp;") == 16 + 2 * 8 * 2 + 2 * pairs
    assert kinds.count("data:image/png;b") == 1 and kinds.count("data:image/svg+x") >= 3


def test_a_log_that_is_no_terminal_has_time_speed_and_eta_and_no_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = Progress(fakes.settings("tiny", tmp_path, "train.updates=100"), main=True)
    with progress.live(0):
        for update in (1, 2):
            progress.update(update, {"reward": 0.5, "loss": 1e-9, "seconds/update": 90.0})
    first, second = capsys.readouterr().err.splitlines()
    moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(
        rf"{moment} update 1/100  reward 0\.500  90 s/update  ETA 2 h 28 min", first
    )
    assert re.fullmatch(rf"{moment} update 2/100  .* s/update  ETA \d+ s", second)
