"""Run the notebooks and save their outputs: make notebooks

A reader on a web host sees the pictures without running anything. Saved are the printed lines and
the pictures, as PNG. The log of a cell with the tag `log` is not, since its times and paths differ
from run to run; nor is what says when and by which Python a notebook ran.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import nbformat

with warnings.catch_warnings():  # jupyter's own, at import: where it will keep its files
    warnings.simplefilter("ignore", DeprecationWarning)
    from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600  # a cell; the longest takes half a minute on two free cores


def run(path: Path, folder: Path) -> Any:
    """The notebook with new outputs, run in the folder. Raises CellExecutionError, with the cell
    and its traceback."""
    notebook = nbformat.read(path, as_version=4)
    metadata = notebook.metadata.copy()
    client = NotebookClient(
        notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": folder}}
    )
    environment = {key: text for key, text in os.environ.items() if key != "MPLBACKEND"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    client.execute(env=environment | {"PYTHONPATH": os.pathsep.join(paths)})
    notebook.metadata = metadata
    for cell in notebook.cells:
        if "log" in cell.metadata.get("tags", []):
            cell.outputs = []
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/jpeg", None)  # PIL offers both
    return notebook


def main() -> None:
    """Run those named, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, Path(folder))
        nbformat.write(notebook, path)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
