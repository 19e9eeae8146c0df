"""Signals and the clock: a run that is asked to end leaves a checkpoint, and goes on to the same
numbers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import forked
import pytest

from flowalign.commands import train
from flowalign.config import to_yaml
from flowalign.system.signals import CODES, ECHO, UNFINISHED, Clock, Interrupted, Requests
from flowalign.training.run.checkpoint import Checkpoints

NUMBERS = sorted(CODES)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The signals do what they do in a foreground process; afterwards as before."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def alone(minutes: float | None = None) -> Requests:
    return Requests(None, Clock(time.monotonic(), minutes))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_is_raised_at_once_with_its_exit_status(number: int) -> None:
    with pytest.raises(Interrupted) as seen, alone():
        signal.raise_signal(number)
        pytest.fail("it went on")
    assert seen.value.code == (UNFINISHED if number == signal.SIGUSR1 else 128 + number)
    assert str(seen.value) == signal.Signals(number).name
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_is_done_as_a_whole_is_done_first() -> None:
    reached = []
    with pytest.raises(Interrupted), alone() as requests:
        with requests.uninterrupted(), requests.uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # a launcher's echo
            reached.append(1)
        reached.append(2)
    assert reached == [1]


def test_a_second_signal_does_not_wait() -> None:
    reached = []
    with pytest.raises(Interrupted), alone() as requests, requests.uninterrupted():
        signal.raise_signal(signal.SIGINT)
        time.sleep(ECHO * 1.05)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)
    assert reached == [1]


def test_several_processes_end_where_they_meet_whoever_was_asked() -> None:
    other: list[Any] = [None]
    requests = Requests(lambda own: [*own, *other], Clock(0.0))
    with requests:
        signal.raise_signal(signal.SIGTERM)  # noticed, and not raised here
        with pytest.raises(Interrupted, match="SIGTERM"):
            requests.stop_point()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # the launcher's, which follows
    requests = Requests(lambda own: [*own, *other], Clock(0.0))
    with requests:
        requests.stop_point()
        other = [("SIGUSR1", UNFINISHED)]
        with pytest.raises(Interrupted, match="SIGUSR1"):
            requests.stop_point()


def test_the_clock_ends_what_would_end_too_late() -> None:
    requests = alone(minutes=1)
    requests.stop_point(50)
    with pytest.raises(Interrupted, match="train.max_minutes = 1") as seen:
        requests.stop_point(61)
    assert seen.value.code == UNFINISHED


@pytest.mark.slow
def test_a_process_ends_with_its_status_whatever_its_threads_do() -> None:
    """A pool that hangs is not waited for; and while Python ends, a thread that comes back from
    torch's C++ would abort the process."""
    code = """if True:
        import atexit, threading
        from concurrent.futures import ThreadPoolExecutor
        import torch.distributed as dist
        from flowalign.system.exit import end_process
        atexit.register(print, "the other exit functions run")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.distributed_c10d._get_default_group()
        def ask():
            while True:
                group._get_sequence_number_for_group()
        threading.Thread(target=ask, daemon=True).start()
        ThreadPoolExecutor(1).submit(threading.Event().wait)
        end_process(7)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, b"")
    assert b"exit functions run" in done.stdout


class Called:
    """Noisy redness that takes its time, and says in a file how often each process called it."""

    def __init__(self, folder: str) -> None:
        self.folder, self.calls = Path(folder), 0

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        self.calls += 1
        (self.folder / f"pid_{os.getpid()}").write_text(str(self.calls))
        time.sleep(0.2)
        return fakes.noisy_redness(images, prompts, metadata)


def config_file(model: str, folder: Path, reward: str, options: str, *words: str) -> str:
    given = [f"tasks.0.reward.name={reward}", f"tasks.0.reward.options={options}",
             "train.checkpoint_every=100", "rollout.steps=2", *words]  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(to_yaml(fakes.settings(model, folder / "run", *given)))
    return str(path)


def started(*command: object) -> forked.Forked:
    paths = [str(fakes.ROOT), str(fakes.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    more = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return forked.Forked(command, os.environ | more | {"ACCELERATE_USE_CPU": "true"}, fakes.ROOT)


def wait_for(folder: Path, process: forked.Forked, processes: int) -> list[int]:
    """Until so many processes are in their third call of the reward; their ids, as they began."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        files = list(folder.glob("pid_*"))
        if sum(int(path.read_text() or 0) >= 3 for path in files) == processes:
            return sorted(int(path.name.removeprefix("pid_")) for path in files)
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("the reward was not called")


def assert_saved(folder: Path, said: str, reason: str) -> Path:
    """The only checkpoint, which the command names with the reason; the log agrees."""
    (saved,) = Checkpoints(folder / "run", 3).all()
    assert f"wrote checkpoint {saved}" in said and "Traceback" not in said
    assert reason in said
    done = int(saved.name.removeprefix("update_"))
    assert [row["update"] for row in fakes.lines(folder / "run")] == [*range(1, done + 1)]
    return saved


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_command_with_a_checkpoint_and_its_status(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    options = f"{{call: 3, number: {int(number)}}}"
    path = config_file(random_model, tmp_path, "fakes:Interrupting", options)
    assert train.main(["--config", path]) == CODES[signal.Signals(number)]
    saved = assert_saved(tmp_path, capsys.readouterr().err, signal.Signals(number).name)
    assert saved.name == "update_000002"


@pytest.mark.slow
def test_the_clock_ends_a_run_after_one_update_at_least(random_model, tmp_path, capsys) -> None:
    given = ["train.max_minutes=0.0001", "train.updates=3"]
    path = config_file(random_model, tmp_path, "fakes:noisy_redness", "{}", *given)
    assert train.main(["--config", path]) == UNFINISHED
    saved = assert_saved(tmp_path, capsys.readouterr().err, "train.max_minutes = 0.0001")
    assert saved.name == "update_000001"
    assert train.main(["--config", path, "--resume"]) == UNFINISHED
    assert train.main(["--config", path, "--resume", "train.max_minutes=60"]) == 0


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_where_they_meet(random_model: str, tmp_path: Path):
    options = f"{{folder: {tmp_path}}}"
    path = config_file(random_model, tmp_path, "test_stopping:Called", options)
    process = started(
        "scripts/slurm/launch.py", "--multi_gpu", "--num_processes", 2, "--num_machines", 1,
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", 0,
        "train.py", "--config", path, "train.updates=1000",
    )  # fmt: skip
    _, last = wait_for(tmp_path, process, 2)
    os.kill(last, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    saved = assert_saved(tmp_path, said.partition("Root Cause")[0], "SIGTERM")
    assert len(list(saved.glob("rng_*.json"))) == 2
    assert said.count("wrote checkpoint") == 1
