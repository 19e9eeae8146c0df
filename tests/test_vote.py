"""`flowalign vote`: what a voter sees and chooses becomes pairs, and nothing else of the disk."""

import json
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from browser import Page
from fastapi.testclient import TestClient

from flowalign.checks import Launch, stage_problems
from flowalign.commands import cli
from flowalign.commands.sample import write_images
from flowalign.commands.vote import Ballot, vote_app

PROMPTS = ["a red sign", 'a "blue" sign & <b>more</b>']


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images of one prompt and of another."""
    generator = torch.Generator().manual_seed(0)
    write_images(tmp_path / "votes", torch.rand(4, 3, 32, 32, generator=generator), PROMPTS, 7)
    return tmp_path / "votes"


def client(folder: Path, host: str = "127.0.0.1:8001") -> TestClient:
    return TestClient(vote_app(folder), base_url=f"http://{host}")


def rows(folder: Path, name: str = "pairs") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_choice_is_written_with_the_noise_of_both_images(folder: Path) -> None:
    """By the image that was on the side that was chosen; once, whatever is sent again."""
    web = client(folder)
    state = web.get("/state").json()
    assert state == {"pair": 0, "prompt": PROMPTS[0], "done": 0, "total": 2}
    left, right = (web.get(f"/image/0/{side}") for side in (0, 1))
    assert left.headers["content-type"] == "image/png" and left.content != right.content
    assert left.headers["cache-control"] == "no-store"
    for _ in range(2):
        state = web.post("/vote", json={"pair": 0, "choice": 2}).json()
        assert state == {"pair": 1, "prompt": PROMPTS[1], "done": 1, "total": 2}
    (row,) = rows(folder)
    assert row["prompt"] == PROMPTS[0]
    assert (folder / row["chosen"]).read_bytes() == right.content
    assert (folder / row["rejected"]).read_bytes() == left.content


def test_a_ballot_goes_on_where_it_stopped(folder: Path) -> None:
    """Neither image is a vote, too, which no run reads."""
    client(folder).post("/vote", json={"pair": 0, "choice": 0})
    web = client(folder)
    assert not (folder / "pairs.jsonl").exists() and len(rows(folder, "neither")) == 1
    assert web.get("/state").json()["pair"] == 1
    assert web.post("/vote", json={"pair": 1, "choice": 1}).json() == {
        "pair": None, "prompt": "", "done": 2, "total": 2,
    }  # fmt: skip
    assert client(folder).get("/state").json()["pair"] is None


def test_every_prompt_comes_before_a_second_pair_of_one(tmp_path: Path) -> None:
    write_images(tmp_path / "more", torch.rand(6, 3, 8, 8), PROMPTS, 0)
    ballot = Ballot(tmp_path / "more")
    assert [pair[0]["prompt"] for pair in ballot.pairs] == PROMPTS * 3
    sides = {[image["file"] for image in pair] == sorted(i["file"] for i in pair)
             for pair in ballot.pairs}  # fmt: skip
    assert sides == {True, False}  # the first image is not always on the left


@pytest.mark.parametrize(
    ("path", "status"),
    [("/image/9/1", 404), ("/image/-1/1", 404), ("/image/0/3", 422), ("/image/0/-1", 422),
     ("/image/../../secret.png/1", 404), ("/image/%2e%2e%2fsecret.png/1", 404),
     ("/secret.png", 404), ("/images.jsonl", 404), ("/openapi.json", 404), ("/docs", 404)],
)  # fmt: skip
def test_nothing_else_can_be_asked_for(folder: Path, path: str, status: int) -> None:
    (folder.parent / "secret.png").write_bytes(b"secret")
    answer = client(folder).get(path)
    assert answer.status_code == status and b"secret" not in answer.content


@pytest.mark.parametrize(
    "body",
    [{"pair": 5, "choice": 1}, {"pair": -1, "choice": 1}, {"pair": 0, "choice": 3},
     {"pair": "../x", "choice": 1}, {}],
)  # fmt: skip
def test_a_vote_that_cannot_be_is_not_written(folder: Path, body: dict[str, Any]) -> None:
    assert client(folder).post("/vote", json=body).status_code in (404, 422)
    assert not (folder / "pairs.jsonl").exists()


def test_other_sites_cannot_vote(folder: Path) -> None:
    """Not under a name of their own that leads here, nor by a form, which browsers send unasked."""
    assert client(folder, "evil.example").get("/state").status_code == 400
    form = {"content-type": "text/plain"}
    answer = client(folder).post("/vote", content='{"pair": 0, "choice": 1}', headers=form)
    assert answer.status_code == 422 and not (folder / "pairs.jsonl").exists()


def test_the_page_loads_nothing_from_elsewhere(folder: Path) -> None:
    answer = client(folder).get("/")
    page = Page(answer.text)
    assert page.loaded() == ["data:,"] and not page.open
    assert "http" not in answer.text and answer.headers["content-type"].startswith("text/html")


def test_a_folder_without_pairs_or_with_paths_out_of_it_is_refused(tmp_path: Path, capsys) -> None:
    assert cli.main(["vote", str(tmp_path)]) == 2
    assert "--images 2" in capsys.readouterr().err
    write_images(tmp_path / "votes", torch.rand(2, 3, 8, 8), PROMPTS[:1], 0)
    listed = tmp_path / "votes" / "images.jsonl"
    listed.write_text(listed.read_text().replace("001_01.png", "../001_01.png"))
    assert cli.main(["vote", str(tmp_path / "votes")]) == 2
    assert "001_01.png" in capsys.readouterr().err


def test_what_is_written_can_be_learnt_from(random_model, tmp_path: Path, monkeypatch) -> None:
    """`flowalign sample`, votes, and a run."""
    monkeypatch.chdir(tmp_path)
    words = ["--model", random_model, "--size", "32", "--steps", "2", "--images", "2"]
    assert cli.main(["sample", *fakes.PROMPTS[:3], *words, "--out", "votes.png"]) == 0
    web = client(tmp_path / "votes")
    for pair, choice in enumerate((1, 0, 2)):
        assert web.post("/vote", json={"pair": pair, "choice": choice}).status_code == 200
    given = [f"tasks.0.prompts={tmp_path}/votes/pairs.jsonl", "train.updates=1"]
    found = fakes.pairs(random_model, tmp_path / "run", *given)
    assert stage_problems(found, Launch()) == []
    loop = fakes.wired(found)
    loop.run()
    assert fakes.lines(loop)[0]["grad_norm"] > 0
