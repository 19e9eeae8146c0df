"""The processes that tests start (forked.py)."""

from pathlib import Path

import forked
import pytest


@pytest.mark.slow
def test_a_forked_process_has_imported_the_library(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(*sys.modules, sep='\\n')")
    done = forked.run(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert {*forked.PRELOADED, "torch", "diffusers"} <= set(done.stdout.split())
