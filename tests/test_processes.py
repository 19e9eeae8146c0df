"""An evaluation on two processes is that of one: the same rows, to the last bit."""

import json
from pathlib import Path
from typing import Any

import fakes
import pytest
from torch import distributed

from flowalign.commands.evaluate import main

pytestmark = pytest.mark.usefixtures("read_from_files")


def config(folder: Path, model: str, output: str) -> Path:
    """Two judges of two images a prompt and their diversity, an odd number of batches, and a second
    benchmark that has fewer batches than there are processes."""
    judges: dict[str, Any] = {n: {"name": f"fakes:{n}"} for n in ("redness", "constant")}
    judges["diversity"] = {"name": "diversity", "options": {"model": "tiny"}}
    many = {"name": "many", "images": 2, "rewards": judges}
    few = {"name": "few", "limit": 2}
    prompts = [f'a "{letter}"' for letter in "ABCDEFGHI"]
    keys = {
        "output": str(folder / output), "report": {"images": 3}, "keep_images": True,
    }  # fmt: skip
    return fakes.evaluation(model, folder, prompts, many, few, **keys)


def images(out: Path) -> dict[str, bytes]:
    """The images of `many`, the last of which are a smaller batch."""
    found = sorted(out.glob("images/base/many/*.png"))
    return {path.name: path.read_bytes() for path in found}


def rows(out: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads((out / "results.json").read_text())["models"]["base"]["images"]


@pytest.mark.slow
def test_two_processes_score_what_one_does(random_model: str, tmp_path: Path) -> None:
    assert main(["--config", str(config(tmp_path, random_model, "one"))]) == 0
    done = fakes.launch("-m", "flowalign.eval", "--config", config(tmp_path, random_model, "two"))
    assert done.returncode == 0, done.stderr
    ranks = {path.name for path in (tmp_path / "two").rglob("rows.*.jsonl")}
    assert ranks == {"rows.0.jsonl", "rows.1.jsonl"}  # there were two indeed
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert images(tmp_path / "two") == images(tmp_path / "one") != {}
    for name in ("many_redness", "many_constant", "many_diversity"):
        assert two[name] == one[name] and len(one[name]) == 18
    assert all(0 < row["value"] < 1 for row in one["many_diversity"])
    tables = [(tmp_path / name / "table.md").read_text() for name in ("one", "two")]
    assert tables[0] == tables[1] and "many_diversity_vendi" in tables[0]
    assert two["few"] == one["few"] and len(one["few"]) == 2  # one process has them all


@pytest.mark.slow
def test_two_processes_refuse_together(random_model: str, tmp_path: Path) -> None:
    path = config(tmp_path, random_model, "two")
    assert main(["--config", str(path)]) == 0
    done = fakes.launch("-m", "flowalign.eval", "--config", path, "sampling.seed=1")
    assert done.returncode != 0 and "sampling.seed was 1234 there" in done.stderr


def blind_but_first(images: Any, prompts: Any, metadata: Any) -> Any:
    """Redness, which all processes but the first fail to see."""
    if distributed.get_rank() > 0:
        raise RuntimeError("no eyes here")
    return fakes.redness(images, prompts, metadata)


@pytest.mark.slow
def test_a_process_that_lost_its_scores_stops_them_all(random_model: str, tmp_path: Path) -> None:
    path = config(tmp_path, random_model, "two")
    reward = "benchmarks.0.rewards.redness.name=test_processes:blind_but_first"
    given = ["-m", "flowalign.eval", "--config", path, reward]
    done = fakes.launch(*given, seconds=150)
    assert done.returncode == 1 and not (tmp_path / "two" / "table.md").exists()
    assert "10 of 18 images have no score" in done.stderr and "no eyes here" in done.stderr
