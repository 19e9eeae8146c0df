"""A disk that is full during a run: its last checkpoint stays. The disk is a small tmpfs
in a namespace of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fakes
import pytest

from flowalign.config import to_yaml
from flowalign.system.files import append, is_disk_full

MOUNT = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'


def on_a_small_disk(size: str, folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """A command that sees a disk of that size at the folder, whose content is gone afterwards."""
    folder.mkdir(exist_ok=True)
    space = ["unshare", "-rm", "sh", "-c", MOUNT, size, str(folder)]
    paths = [str(fakes.ROOT), str(fakes.ROOT / "tests")]
    return subprocess.run(
        [*space, *map(str, command)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder where a small disk can be mounted."""
    try:
        done = on_a_small_disk("1m", tmp_path / "small", "true")
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode:
        pytest.skip(f"no mounts in a user's namespace: {done.stderr}")
    return tmp_path / "small"


class Fills:
    """Noisy redness that fills the disk of a folder at its n-th call, but for some bytes."""

    def __init__(self, folder: str, call: int) -> None:
        self.folder, self.call, self.calls = Path(folder), call, 0

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            with open(self.folder / "filler", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(512)):
                        pass
                except OSError as error:
                    assert is_disk_full(error)
        return fakes.noisy_redness(images, prompts, metadata)


def config_file(model: str, small: Path, *words: str) -> str:
    reward = ["tasks.0.reward.name=test_full_disk:Fills"]
    reward += [f"tasks.0.reward.options={{folder: {small}, call: 3}}"]
    found = fakes.settings(model, small.parent / "run", *reward, "train.checkpoint_every=1", *words)
    path = small.parent / "config.yaml"
    path.write_text(to_yaml(found.model_copy(update={"output": str(small / "run")})))
    return str(path)


def test_an_appended_line_is_whole_or_not_there(small: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flowalign.system.files import append\n"
        "path, lines = Path(sys.argv[1]), 0\n"
        "try:\n"
        "  while True: append(path, 'x' * 999 + chr(10)); lines += 1\n"
        "except OSError: print(path.stat().st_size == 1000 * lines > 0)"
    )
    done = on_a_small_disk("64k", small, sys.executable, "-c", code, small / "log")
    assert done.stdout == "True\n", done.stderr
    append(small / "log", "a\n")
    append(small / "log", "b\n")
    assert (small / "log").read_text() == "a\nb\n"


@pytest.mark.slow
def test_a_full_disk_stops_a_run_which_goes_on_when_there_is_room(random_model: str, small: Path):
    path = config_file(random_model, small, "train.updates=4")
    script = (
        'cd "$0"; "$1" train.py --config "$2"; echo "status $?"; ls "$3/run/checkpoints"\n'
        'rm "$3/filler"; "$1" train.py --config "$2" --resume; echo "status $?"\n'
        'ls "$3/run/checkpoints"; ls -a "$3/run"'
    )
    given = [script, fakes.ROOT, sys.executable, path, small]
    done = on_a_small_disk("8m", small, "sh", "-c", *given)
    first, second = done.stdout.split("status 1\n")
    said = done.stderr
    assert "status" not in first and "Traceback" not in said, said
    assert "the disk is full" in said
    assert "update_000002" in second and "status 0" in second, done.stdout + said
    assert "update_000004" in second and ".part" not in second
