"""A rank that dies or hangs ends the run with one message."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import fakes
import forked
import psutil
import pytest

from flowalign.config import to_yaml


class Troubled:
    """Noisy redness with which one rank gets into trouble at a call, while `fatal` lies there."""

    def __init__(self, fatal: str, how: str, rank: int = 1, call: int = 2) -> None:
        self.fatal, self.how, self.rank, self.call, self.calls = Path(fatal), how, rank, call, 0

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        self.calls += 1
        own = self.rank == int(os.environ.get("RANK", "0"))
        if own and self.how != "nothing" and self.calls == self.call and self.fatal.exists():
            self.fatal.unlink()
            self.trouble()
        return fakes.noisy_redness(images, prompts, metadata)

    def trouble(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "hang":
            time.sleep(600)


CRASH = """# train.py with a bug that only one rank meets, at its second update
import os, sys
from flowalign.commands import train
from flowalign.training import loop

learn = loop.Loop.learn

def broken(self, prepared):
    if self.update == 1 and os.environ["RANK"] == "{rank}":
        raise ZeroDivisionError("a bug of one rank")
    return learn(self, prepared)

loop.Loop.learn = broken
sys.exit(train.main(sys.argv[1:]))
"""


def config(folder: Path, model: str, how: str, *overrides: str, rank: int = 1) -> Path:
    """A small run with trouble ahead."""
    folder.mkdir(exist_ok=True)
    (folder / "fatal").touch()
    options = f"tasks.0.reward.options={{fatal: {folder / 'fatal'}, how: {how}, rank: {rank}}}"
    given = ["tasks.0.reward.name=test_ranks:Troubled", options, "rollout.prompts=4",
             "train.checkpoint_every=1", *overrides]  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(to_yaml(fakes.settings(model, folder / "run", *given)))
    return path


def ends(path: Path, script: Path = fakes.ROOT / "train.py") -> tuple[list[Any], str]:
    """Two ranks that no launcher watches, until those that are not stopped have ended: all exit
    statuses (None: stopped, until it is told to go on), and what all said."""
    ranks = forked.ranks([script, "--config", path])
    try:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):  # it may end between the two questions
                while rank.poll() is None and psutil.Process(rank.pid).status() != "stopped":
                    time.sleep(0.1)
            rank.poll()
        codes, said = [rank.poll() for rank in ranks], "".join(rank.said()[1] for rank in ranks)
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        assert None not in codes or all(rank.wait(20) for rank in ranks)  # none goes on alone
        return codes, said
    finally:
        for rank in ranks:
            rank.__exit__()


def said(text: str) -> None:
    """One line, without a traceback, and what torch says of it."""
    (line,) = [line for line in text.splitlines() if line.startswith("stopped: another process")]
    assert "gloo" in line and "--resume" in line and "Traceback" not in text, text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_ends_the_other_where_no_launcher_watches(random_model, tmp_path, rank: int):
    path = config(tmp_path, random_model, "kill", rank=rank)
    codes, text = ends(path)
    assert sorted(codes) == [-signal.SIGKILL, 1], text
    said(text)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_the_others(random_model: str, tmp_path: Path, rank: int) -> None:
    path, script = config(tmp_path, random_model, "nothing"), tmp_path / "train.py"
    script.write_text(CRASH.format(rank=rank))
    codes, text = ends(path, script)
    assert codes == [1, 1], text
    assert text.count("stopped: another process") == text.count("Traceback") == 1  # of each
    assert "ZeroDivisionError: a bug of one rank" in text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_ends_the_other_after_the_configured_time(
    random_model: str, tmp_path: Path, rank: int
) -> None:
    path = config(tmp_path, random_model, "stop", "train.timeout_seconds=10", rank=rank)
    codes, text = ends(path)
    assert sorted(codes, key=str) == [1, None], text
    said(text)


@pytest.mark.slow
def test_a_reward_that_hangs_in_one_process_is_masked_and_the_other_waits(random_model, tmp_path):
    more = ["train.score_seconds=2", "train.max_invalid_share=0.6", "train.updates=2"]
    path = config(tmp_path, random_model, "hang", *more)
    codes, text = ends(path)
    assert codes == [0, 0], text
    assert [row["invalid_share"] for row in fakes.lines(tmp_path / "run")] == [0, 0.5]
