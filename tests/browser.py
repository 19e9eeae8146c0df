"""Pages in a real browser: Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_chromium = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


def dom(address: str, user: Path, width: int = 1280) -> str:
    """The page after its scripts ran, as HTML. user: a folder for the browser's own files; width:
    of the window in pixels (Chromium takes at least 500)."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    window = [f"--window-size={width},900", "--virtual-time-budget=8000", "--dump-dom"]
    command = ["chromium", *flags, *window, f"--user-data-dir={user / 'user'}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
