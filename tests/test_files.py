"""files.py and images.py: a file appears whole or not at all, and pixels keep their 8 bits."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowalign.system import files
from flowalign.system.files import replacing
from flowalign.system.images import to_float, to_uint8


def test_a_file_appears_at_the_end_and_its_folders_are_made(tmp_path: Path) -> None:
    target = tmp_path / "new" / "results.json"
    for text in ("first", "second"):
        before = target.read_text() if target.exists() else None
        with replacing(target) as part:
            part.write_text(text)
            assert (target.read_text() if target.exists() else None) == before
        assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["results.json"]


def test_what_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as part:
        part.write_text("half of the ne")
        raise KeyboardInterrupt
    with pytest.raises(ValueError), replacing(tmp_path / "folder") as part:
        part.mkdir()
        (part / "x").touch()
        raise ValueError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_folder_takes_the_place_of_an_empty_one_only(tmp_path: Path) -> None:
    for present in (False, True):
        with replacing(tmp_path / "folder") as part:
            part.mkdir()
            (part / "x").write_text("x") if present else None
    assert (tmp_path / "folder" / "x").read_text() == "x"
    with pytest.raises(OSError), replacing(tmp_path / "folder") as part:
        part.mkdir()
    assert (tmp_path / "folder" / "x").read_text() == "x" and len(list(tmp_path.iterdir())) == 1


def test_pixels_are_rounded_and_come_back_as_they_were() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    again = torch.from_numpy(to_uint8(to_float(pixels)[0])).permute(2, 0, 1)
    assert torch.equal(again, pixels[0])
    image = torch.tensor([-0.5, 0.4 / 255, 0.6 / 255, 1.5]).view(1, 2, 2).expand(3, 2, 2)
    assert to_uint8(image)[..., 0].ravel().tolist() == [0, 0, 1, 255]
    with pytest.raises(ValueError):
        to_uint8(torch.full((3, 2, 2), torch.nan))


def test_leftovers_of_killed_writes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from flowalign.system.files import replacing
with replacing(Path(sys.argv[1]) / "a" / sys.argv[2]) as part:
    part.mkdir() if sys.argv[2] == "folder" else None
    (part / "file" if sys.argv[2] == "folder" else part).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "a").mkdir()
    for name in ("file.json", "folder"):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path), name])
        assert done.returncode == -signal.SIGKILL
    (tmp_path / "checkpoints" / ".update_000003" / "kept").mkdir(parents=True)
    kept = tmp_path / "a" / ".mine.part"  # another program's
    kept.touch()
    assert len(list((tmp_path / "a").iterdir())) == 3
    files.remove_leftovers(tmp_path)
    assert list((tmp_path / "a").iterdir()) == [kept]
    assert not any((tmp_path / "checkpoints").iterdir())
