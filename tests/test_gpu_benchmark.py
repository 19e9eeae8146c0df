"""`python benchmarks/gpu.py`, at a small scale on the CPU: a row a case, whatever becomes of it."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import gpu  # noqa: E402  # pyright: ignore[reportMissingImports]

STATES = {"raises": "failed", "dies": "failed", "hangs": "too long", "absent": "not here"}


@pytest.fixture(autouse=True)
def workers_without_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets this process's path, on which the fixture `open_clip` may have put a
    torchvision that only this process can import."""
    beside = str(Path(sys.prefix) / "open_clip")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != beside])


# Run in a worker, which imports this module.


def works(setup: Any, case: Any) -> Mapping[str, Any]:
    return {"note": str(os.getpid())}


def raises(setup: Any, case: Any) -> Mapping[str, Any]:
    raise MemoryError("out of\nmemory | at last")


def dies(setup: Any, case: Any) -> Mapping[str, Any]:
    os._exit(7)


def hangs(setup: Any, case: Any) -> Mapping[str, Any]:
    time.sleep(600)
    return {}


def absent(setup: Any, case: Any) -> Mapping[str, Any]:
    raise gpu.NotHere("no such package")


def setup_in(folder: Path) -> Any:
    return gpu.Setup(folder, "cpu", 0.05, 2, 64, 4)


@pytest.mark.slow
def test_what_goes_wrong_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch) -> None:
    forked.start_server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: forked.CONTEXT)
    calls = [works, absent, raises, works, dies, hangs]
    cases = [gpu.Case(call.__name__, call, limit=2 if call is hangs else 60) for call in calls]
    seen: list[int] = []
    rows = gpu.run_all(cases, setup_in(tmp_path), 5, lambda rows: seen.append(len(rows)))
    assert [row["case"] for row in rows] == [case.name for case in cases]
    assert [row["state"] for row in rows] == [STATES.get(case.name, "ok") for case in cases]
    assert seen == list(range(1, len(cases) + 1))
    assert rows[0]["note"] != rows[3]["note"]  # a new process after a failure
    assert "MemoryError" in rows[2]["note"] and "ended" in rows[4]["note"]
    lines = gpu.table(rows, {"name": "X"}).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert sum(line.startswith("| ") for line in lines) == len(cases) + 1


@pytest.mark.slow
def test_a_student_needs_no_hub(tmp_path: Path) -> None:
    small = "--device cpu --width 0.05 --layers 2 --size 64 --prompts 4".split()
    names = ["write the Medium", "2 teachers"]
    assert gpu.main([*small, "--out", str(tmp_path), "--cases", *names]) == 0


@pytest.mark.long
def test_every_case_runs_at_a_small_scale(tmp_path: Path) -> None:
    small = "--device cpu --width 0.05 --layers 2 --size 64 --prompts 4 --minutes 15".split()
    names = [case.name for case in gpu.cases() if case.name != "pytest -m gpu"]
    status = gpu.main([*small, "--out", str(tmp_path), "--cases", *names])
    (report,) = [json.loads(path.read_text()) for path in tmp_path.glob("gpu_*.json")]
    rows = {row["case"]: row for row in report["cases"]}
    assert list(rows) == names
    states = {name: row["state"] for name, row in rows.items()}
    assert set(states.values()) <= {"ok", "not here"}, states
    for name in ("2 teachers", "4 teachers", "checkpointing"):
        row = rows[name]
        assert row["state"] == "ok", row
        assert set(row["seconds"]) == {"rollout", "labels", "update"}
        assert all(row["flops"][part] > 0 for part in row["seconds"]) and row["predicted"] > 0
    assert rows["matrix products"]["rate"] > 0
    assert status == int(any(r["state"] in ("failed", "too long") for r in rows.values()))
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith(gpu.HEAD) and page.count("\n| ") == len(names) + 1
