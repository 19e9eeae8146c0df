"""A reward elsewhere is worth the same as here, and its server may die without costing a step."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
import served
import torch
from fastapi import FastAPI
from PIL import Image

from flowalign.backbone import Backbone
from flowalign.commands import cli
from flowalign.config import to_yaml
from flowalign.rewards import RewardSpec, build, describe, score
from flowalign.rewards.base import Wrapped
from flowalign.rewards.scoring import TaskRewards
from flowalign.rewards.service.client import Remote
from flowalign.system import http
from flowalign.system.images import eight_bits, to_float
from flowalign.types import PromptBatch, Scores

PIXELS = torch.arange(10 * 3 * 8 * 8).view(10, 3, 8, 8).mul(7).remainder(251).to(torch.uint8)
IMAGES = to_float(PIXELS)
PROMPTS = [f"prompt {i * i}" for i in range(10)]
METADATA: list[dict[str, Any]] = [{"bonus": i} for i in range(10)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.01)


def closed_port() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


class Flaky:
    """`exact` that counts its calls and fails the whole request while it is told to."""

    def __init__(self, refusals: int = 0, pause: float = 0.0) -> None:
        self.refusals, self.pause, self.rows = refusals, pause, 0

    def __call__(self, images, prompts, metadata) -> Scores:
        if self.refusals:
            self.refusals -= 1
            raise served.Lost
        time.sleep(self.pause)
        self.rows += len(images)
        return served.exact(images, prompts, metadata)


# The same scores ---------------------------------------------------------------------------------


def test_a_remote_reward_is_worth_what_it_is_worth_here():
    here = score(served.exact, IMAGES, PROMPTS, METADATA)
    with served.serving(served.exact) as url:
        for size in (1, 3, 4, 64):
            reward = build("remote", urls=url, batch_size=size)
            there = score(reward, IMAGES, PROMPTS, METADATA)
            assert reward(IMAGES[:0], [], []).value.shape == (0,)
            assert torch.equal(there.value, here.value), size
            assert torch.equal(there.valid, here.valid), size
            assert there.parts.keys() == here.parts.keys()
            assert torch.equal(there.parts["red"], here.parts["red"]), size
            assert there.value.dtype == torch.float32


def test_a_server_gets_8_bits_and_a_training_run_floats():
    """docs/rewards/remote.md, "What is scored": of one's own reward and of a built-in judge."""
    images = torch.tensor([0.5, 0.3, 0.77777])[:, None, None, None].expand(3, 3, 96, 96)
    batch = PromptBatch(["a"] * 3, ["x"] * 3, [{}] * 3)

    def own(images, prompts, metadata):
        return Scores.of(images[:, 0, 0, 0])

    def rounded(images, prompts, metadata):
        return own(eight_bits(images.float()), prompts, metadata)

    judge = build("pickscore", model="tiny")
    for reward, is_same in ((Wrapped(own), False), (Wrapped(rounded), True), (judge, True)):
        here = TaskRewards({"x": reward})(images, batch).value
        with served.serving(reward) as url:
            there = TaskRewards({"x": Remote(url)})(images, batch).value
        assert torch.equal(here, there) == is_same


def test_results_record_what_the_server_says_of_its_reward_and_not_where_it_is():
    pickscore = build("pickscore", model="tiny")
    with served.serving(pickscore) as url:
        described = describe(build("remote", urls=url, normalizer=5.0))
    assert described == {"name": "remote", "served": describe(pickscore), "normalizer": 5.0}
    gone = describe(build("remote", urls=closed_port()))
    assert gone["name"] == "remote" and "ConnectError" in gone["describe"]


@contextmanager
def unirl(results: list[dict], errors: list[dict]) -> Iterator[str]:
    """What UniRL's service says that serves two rewards, where only these results are asked for."""
    application = FastAPI()
    application.get("/rewards")(lambda: {"rewards": ["clip", "wise"]})

    @application.post("/score")
    def score(body: dict[str, Any]) -> dict[str, Any]:
        (request,) = body["requests"]
        turn = request["history"][-1]
        image = Image.open(BytesIO(base64.b64decode(turn["image_b64"])))
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), PIXELS[int(turn["text"])])
        assert request["required_rewards"] == ["wise"] and request["metadata"] == {"x": 1}
        return {"results": [results[int(turn["text"])]], "errors": [errors[int(turn["text"])]]}

    with served.running(application) as url:
        yield url


def test_a_reward_of_unirl_is_asked_in_its_own_words():
    """Its first number is the value; a row without one, or with null, is invalid and not 0."""
    rows = [{"wise": {"wiscore": 0.5, "Realism": 2.0}}, {}, {"wise": {"wiscore": None}}, {}]
    errors = [{}, {"wise": "TimeoutError('late')"}, {}, {"clip": "of another"}]
    with unirl(rows, errors) as url:
        reward = Remote(url, reward="wise", batch_size=1)
        reward.connect()
        assert describe(reward)["served"] == {"name": "wise"}
        scores = score(reward, IMAGES[:4], list("0123"), [{"x": 1}] * 4)
        for wrong in (Remote(url), Remote(url, reward="hpsv3")):
            with pytest.raises(ConnectionError, match="clip, wise"):
                wrong.connect()
            assert not score(wrong, IMAGES[:4], list("0123"), [{"x": 1}] * 4).valid.any()
    assert scores.valid.tolist() == [True, False, False, False] and scores.value[0] == 0.5
    assert scores.parts["Realism"][0] == 2 and scores.parts["wiscore"][0] == 0.5
    assert scores.reasons[1] == "TimeoutError('late')" and scores.reasons.keys() == {1, 2, 3}


def test_a_normalizer_divides_and_keeps_the_raw_value():
    here = served.exact(IMAGES, PROMPTS, METADATA)
    with served.serving(served.exact) as url:
        scores = Remote(url, normalizer=5, headline="raw")(IMAGES, PROMPTS, METADATA)
    assert torch.equal(scores.value, here.value / 5)
    assert torch.equal(scores.parts["raw"], here.value)


def test_one_row_at_fault_does_not_cost_its_neighbours():
    """A prompt too long for the server, pixels and metadata that cannot travel, in one request."""
    images, prompts, metadata = IMAGES.clone(), list(PROMPTS), list(METADATA)
    prompts[2], metadata[7] = "x" * 4000, {"bonus": {1, 2}}
    images[4, 0, 0, 0] = float("nan")
    with served.serving(served.exact, bytes=3000) as url:
        scores = score(Remote(url, batch_size=10), images, prompts, metadata)
    assert [row for row in range(10) if not scores.valid[row]] == [2, 4, 7]
    assert "413" in scores.reasons[2]
    assert "NaN" in scores.reasons[4] and "set is not JSON" in scores.reasons[7]


# Failures ----------------------------------------------------------------------------------------


def test_what_will_not_pass_is_not_tried_again_and_says_why(monkeypatch):
    reward = Flaky()
    monkeypatch.setenv("FLOWALIGN_MY_TOKEN", "not-it")
    with served.serving(reward, token="right") as url:
        scores = score(Remote(url, token_env="FLOWALIGN_MY_TOKEN"), IMAGES, PROMPTS, METADATA)
        assert not scores.valid.any() and "401" in scores.reasons[9]
        monkeypatch.setenv("FLOWALIGN_MY_TOKEN", "right")
        again = Remote(url, token_env="FLOWALIGN_MY_TOKEN")(IMAGES, PROMPTS, METADATA)
        assert bool(again.valid.all())


def test_a_server_that_hangs_is_a_timeout_error_within_the_deadline():
    reward = served.Stuck()
    with served.serving(reward) as url:
        remote = Remote(url, timeout=0.2, deadline=0.5)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            remote(IMAGES, ["hang"] * 10, METADATA)
        assert time.monotonic() - began < 5
        reward.go.set()


def test_a_dead_server_leaves_the_rotation_and_others_take_its_requests():
    bad, good = Flaky(refusals=1000), Flaky(pause=0.02)
    with served.serving(bad) as one, served.serving(good) as two:
        for urls in ([closed_port(), two], [one, two]):
            scores = Remote(urls, batch_size=1)(IMAGES, PROMPTS, METADATA)
            assert torch.equal(scores.value, served.exact(IMAGES, PROMPTS, METADATA).value)
    assert bad.refusals >= 998  # of ten requests it was sent one or two


def test_a_run_without_its_server_is_refused_in_seconds_before_a_model_is_loaded(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    config, url = fakes.settings(random_model, tmp_path / "run"), closed_port()
    task = with_reward(config.tasks[0], "remote", {"urls": url})
    config = config.model_copy(update={"tasks": [task]})
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    def load(*model: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(Backbone, "load", load)
    assert fakes.command("--config", tmp_path / "config.yaml") == 2
    said = capsys.readouterr().err
    assert "tasks.0.reward" in said and url in said
    assert cli.main(["doctor", "--reward", "remote", f"urls={url}"]) != 0


def test_a_dead_server_of_several_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    gone = closed_port()
    with served.serving(served.exact) as url:
        RewardSpec("remote", {"urls": [gone, url]}).build()
        with served.serving(served.Touchy()) as other:  # another reward
            with pytest.raises(ConnectionError, match="served"):
                RewardSpec("remote", {"urls": [url, other]}).build()
    assert any(gone in record.getMessage() for record in caplog.records)


# Options -----------------------------------------------------------------------------------------


def test_options_that_cannot_work_are_refused_without_asking_anybody():
    for options, key in (
        *(({"urls": ["http://host", url]}, "`urls.1`") for url in ("ftp://x", "http://h:99999")),
        ({"urls": "localhost:8000"}, "`urls.0`"),
        ({"urls": "http://me:pw@host"}, "token_env"),
        ({"urls": "http://host", "retries": -1}, "`retries`"),
        ({"urls": "http://host", "normalizer": float("inf")}, "`normalizer`"),
        ({"urls": "http://host", "token_env": "FLOWALIGN_NOT_SET"}, "FLOWALIGN_NOT_SET"),
        ({"urls": "http://host", "token_env": "HOME"}, "FLOWALIGN_"),
    ):
        with pytest.raises(ValueError) as caught:
            RewardSpec("remote", options).check()
        assert key in str(caught.value), options
        assert "pw" not in str(caught.value)
    for urls in ("http://host", "https://host:8000/proxy/", ["http://[::1]:80", "http://a.b"]):
        RewardSpec("remote", {"urls": urls, "headline": "correct", "normalizer": 5}).check()


# Training ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_fails_under_load_costs_no_step(random_model: str, tmp_path: Path) -> None:
    folders = [tmp_path / "here" / "run", tmp_path / "there" / "run"]
    for folder in folders:
        folder.parent.mkdir()
    with served.serving(Flaky(refusals=3)) as url:
        options = {"urls": url, "batch_size": 4}
        ways = (("served:exact", {}), ("remote", options))
        for folder, reward in zip(folders, ways, strict=True):
            config = fakes.settings(random_model, folder)
            task = with_reward(config.tasks[0], *reward)
            fakes.wired(config.model_copy(update={"tasks": [task]})).run()
    expected, there = map(fakes.timeless, folders)
    assert len(expected) == 4 and there == expected


def with_reward(task, name: str, options: dict):
    reward = task.reward.model_copy(update={"name": name, "options": options})
    return task.model_copy(update={"reward": reward})
