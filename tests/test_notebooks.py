"""The notebooks run top to bottom, as a reader would run them; their last cells assert what they
show. They are committed with their outputs, which `make notebooks` saves."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
runner = pytest.importorskip("run_notebooks")


def outputs(notebook: Any) -> list[list[Any]]:
    """Of each cell of code."""
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def shape(output: Any) -> Any:
    """What an output is on any machine: its kind, and its text without the numbers."""
    if output.output_type == "stream":
        return output.name, re.sub(r"[-+]?\d[\d.e-]*", "0", output.text).split()
    return output.output_type, sorted(output.data)


def pictures(notebook: Any) -> list[Image.Image]:
    data = [output.get("data", {}) for cell in outputs(notebook) for output in cell]
    pngs = [base64.b64decode(each["image/png"]) for each in data if "image/png" in each]
    return [Image.open(io.BytesIO(png)) for png in pngs]


@pytest.mark.parametrize("path", runner.NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_shows_its_outputs_and_is_short(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert cell.source.strip() and cell.source.count("\n") < 40
        assert "execution" not in cell.metadata  # times, which change with every run
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            assert not re.search(r"(^|[\s'\"(])/\w", output.get("text", ""))  # a machine's path
    assert len(pictures(notebook)) >= 2  # a plot, a gallery
    assert path.stat().st_size < 1_000_000


LONG = ("custom_reward", "from_python", "many_loras")  # shown elsewhere, too


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.long if path.stem in LONG else pytest.mark.slow)
        for path in runner.NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And gives what is committed, but for the numbers."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebooks put their runs
    again = runner.run(path, tmp_path)
    committed = nbformat.read(path, as_version=4)
    assert [cell.source for cell in again.cells] == [cell.source for cell in committed.cells]
    for one, other in zip(outputs(again), outputs(committed), strict=True):
        assert [shape(output) for output in one] == [shape(output) for output in other]
    for picture in pictures(again):
        assert len(picture.convert("RGB").getcolors(2**24) or []) > 100
