"""flowalign.training.events: what a run tells those who listen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fakes
import pytest
from test_loop import evaluated

from flowalign.training.algorithm import TrainingError
from flowalign.training.evaluations import Evaluation
from flowalign.training.events import Learned, Listener, Stop
from flowalign.training.loop import Loop
from flowalign.types import Rollout


class Ear(Listener):
    """Notes all that it hears. stop: the update at whose rollout it stops the run."""

    key = "ear"

    def __init__(self, stop: int = -1) -> None:
        self.stop = stop
        self.heard: list[Any] = []

    def began(self, update: int) -> None:
        self.heard.append(["began", update])

    def rollout(self, update: int, rollout: Rollout) -> Mapping[str, float]:
        self.heard.append(["rollout", update])
        if update == self.stop:
            raise Stop("enough.")
        return {"width": rollout.images.shape[-1]} if rollout.images is not None else {}

    def learned(self, update: int, learned: Learned) -> None:
        assert learned.values["width"] > 0  # the figure that it took itself
        self.heard.append(["learned", update])

    def evaluated(self, update: int, evaluation: Evaluation) -> None:
        assert evaluation.counts
        self.heard.append(["evaluated", update])

    def stopped(self, update: int) -> None:
        self.heard.append(["stopped", update])

    def state(self) -> Mapping[str, Any]:
        return {"heard": list(self.heard)}

    def load(self, state: Mapping[str, Any], comparable: bool = True) -> None:
        assert comparable
        self.heard = state["heard"]


def test_a_listener_hears_a_run_and_goes_on_with_its_state(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    listening(ear, monkeypatch)
    evaluated(random_model, tmp_path / "run", 1)
    first = [["began", 0], ["evaluated", 0], ["rollout", 0], ["learned", 1], ["evaluated", 1]]
    assert ear.heard == first
    ear.heard = []
    evaluated(random_model, tmp_path / "run", 2, resume=True)
    assert ear.heard == [*first, ["began", 1], ["rollout", 1], ["learned", 2], ["evaluated", 2]]


def test_a_listener_stops_a_run_which_leaves_a_checkpoint(
    random_model: str, tmp_path: Path
) -> None:
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", "train.updates=3"))
    ear = Ear(stop=1)
    loop.listeners.append(ear)
    with pytest.raises(TrainingError, match="enough"):
        loop.run()
    assert ear.heard[-2:] == [["rollout", 1], ["stopped", 1]]
    assert [path.name for path in loop.checkpoints.all()] == ["update_000001"]


def listening(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run that is built from now on tells it, too."""
    wired = fakes.wired

    def wire(*given: Any) -> Loop:
        loop = wired(*given)
        loop.listeners.append(ear)
        return loop

    monkeypatch.setattr(fakes, "wired", wire)
