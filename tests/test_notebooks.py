"""The notebooks run top to bottom, as a reader would run them; their last cells assert what they
show. They are committed without outputs."""

import base64
import io
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 240  # a cell; the longest takes half a minute


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["custom_reward", "inference"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_clean_and_short(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.source.strip()
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            assert cell.source.count("\n") < 40


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():  # jupyter's own, at import: where it will keep its files
        warnings.simplefilter("ignore", DeprecationWarning)
        from nbclient import NotebookClient
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebooks put their runs
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = read(path)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises CellExecutionError, with the cell and its traceback

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [Image.open(io.BytesIO(base64.b64decode(png))) for png in _pngs(outputs)]
    assert len(pictures) == 2  # a plot, a gallery
    assert all(len(picture.convert("RGB").getcolors(2**24) or []) > 100 for picture in pictures)


def _pngs(outputs: list[Any]) -> list[str]:
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
