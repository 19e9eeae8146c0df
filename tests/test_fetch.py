"""`flowalign data fetch`: whole and checked, or nothing; from a server of our own."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

import flowalign.commands.prompts.fetch as module
from flowalign.commands.prompts.fetch import FetchError, describe_set, fetch_set, text_digest
from flowalign.rewards.ocr import target_of
from flowalign.system import http
from flowalign.training.data import load_prompts
from flowalign.training.sources import SOURCES, File, PromptSource
from flowalign.types import PromptBatch

TEXT = b"a cat\na dog"


class Site:
    """What is served: path -> (status, headers, body)s; asked: the paths, in order."""

    def __init__(self) -> None:
        self.pages: dict[str, list[tuple[int, dict[str, str], bytes]]] = {}
        self.asked: list[str] = []

    def serve(self, path: str, body: bytes = TEXT, status: int = 200, **headers: str) -> str:
        self.pages[path] = [(status, headers, body)]
        return f"https://here{path}"

    def answer(self, transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        pages = self.pages[request.url.path]
        status, headers, body = pages[0] if len(pages) == 1 else pages.pop(0)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Response(status, headers=named, stream=httpx.ByteStream(body))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site()
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *asked: made.answer(*asked))
    return made


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def source(url: str, checksum: str = "", name: str = "set.txt", **options: Any) -> PromptSource:
    return PromptSource(
        "2", f"a/b/{'0' * 40}", "MIT", (File(name, url, checksum, "told", **options),)
    )


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_file_with_its_checksum_is_kept(site: Site, tmp_path, capsys) -> None:
    url = site.serve("/x")
    made = source(url, sha256(TEXT), "deep/set.txt")
    (path,) = fetch_set(made, tmp_path)
    assert path == tmp_path / "deep/set.txt" and path.read_bytes() == TEXT
    assert left(tmp_path) == {"deep/set.txt"}
    assert "2 prompts in" in capsys.readouterr().out
    assert all(text in describe_set(made) for text in ("MIT", url, sha256(TEXT)))
    fetch_set(source(url, f"md5:{hashlib.md5(TEXT).hexdigest()}", "other.txt"), tmp_path)


def test_what_is_not_the_set_leaves_nothing(site: Site, tmp_path: Path) -> None:
    tmp_path.joinpath("other.txt").write_text("stays")
    answers: list[tuple[str, dict[str, Any], str]] = [
        ("md5:00", {}, f"md5:{hashlib.md5(TEXT).hexdigest()}, but"),
        (sha256(b"else"), {}, f"{sha256(TEXT)}, but it should be {sha256(b'else')}"),
        ("", {"status": 404}, "404"),
        ("", {"body": b"<!DOCTYPE html><html></html>"}, "web page"),
        ("", {"body": b" \n"}, "set.txt holds no prompts"),
        ("", {"body": b"\xff\xfe"}, "set.txt.*UTF-8"),
    ]
    for checksum, answer, match in answers:
        with pytest.raises(FetchError, match=match):
            fetch_set(source(site.serve("/x", **answer), checksum), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


def test_a_redirect_is_followed_and_a_busy_server_asked_again(site: Site, tmp_path: Path) -> None:
    url = site.serve("/x", b"", 302, Location="/y")
    site.serve("/y")
    site.pages["/y"].insert(0, (503, {}, b""))
    (path,) = fetch_set(source(url, sha256(TEXT)), tmp_path)
    assert path.read_bytes() == TEXT
    assert site.asked == ["/x", "/y"] * 2


def test_no_way_leads_from_https_to_less(site: Site, tmp_path: Path) -> None:
    """Not even by a step in the middle."""
    site.serve("/x", b"", 302, Location="http://here/y")
    site.serve("/y", b"", 302, Location="https://here/z")
    site.serve("/z")
    with pytest.raises(FetchError, match="http://here/y"):
        fetch_set(source("https://here/x"), tmp_path)
    assert left(tmp_path) == set()


def test_without_a_checksum_another_content_takes_force(site: Site, tmp_path, capsys) -> None:
    made = source(site.serve("/x"))
    (path,) = fetch_set(made, tmp_path)
    assert f"NOT VERIFIED: {sha256(TEXT)}" in capsys.readouterr().out
    fetch_set(made, tmp_path)
    site.serve("/x", b"a cow\n")
    with pytest.raises(FileExistsError, match="--force"):
        fetch_set(made, tmp_path)
    assert path.read_bytes() == TEXT
    fetch_set(made, tmp_path, force=True)
    assert path.read_bytes() == b"a cow\n"


def test_repeated_shuffled_lines_are_written_once(site: Site, tmp_path: Path) -> None:
    url, once = site.serve("/x", "b é\r\na\nb é\n\na".encode()), "a\nb é\n".encode()
    (path,) = fetch_set(source(url, sha256(once), unique=True), tmp_path)
    assert path.read_bytes() == once


def test_a_validation_set_is_split_off_the_training_set(site: Site, tmp_path: Path) -> None:
    """Of what was fetched: apart from what is left for training, and from the test set."""
    lines = [f"thing {i}" for i in range(2000)] + [f"Thing  {i}" for i in range(0, 2000, 10)]
    whole, test = "\n".join(lines).encode(), "\n".join(lines[:500]).encode()
    made = PromptSource("2", f"a/b/{'0' * 40}", "MIT", (
        File("test.txt", site.serve("/test"), sha256(test), "told"),
        File("train.txt", site.serve("/train", whole), sha256(whole), "told", validation="val.txt"),
    ))  # fmt: skip
    site.serve("/test", test)
    paths = fetch_set(made, tmp_path)
    assert [path.name for path in paths] == ["test.txt", "train.txt", "val.txt"]
    sets = [set(map(text_digest, load_prompts(path, "t").prompts)) for path in paths]
    assert len(sets[2]) == module.VALIDATION and sets[2].isdisjoint(sets[0] | sets[1])
    assert sets[1] | sets[2] == set(map(text_digest, lines))
    kept = load_prompts(paths[1], "t").prompts
    # repeats and order stay
    assert kept == [line for line in lines if text_digest(line) in sets[1]]
    content = {path: path.read_bytes() for path in paths}
    fetch_set(made, tmp_path)
    assert site.asked == ["/test", "/train", "/train"]  # the test set is there and right
    paths[2].unlink()
    fetch_set(made, tmp_path)
    assert {path: path.read_bytes() for path in paths} == content


def test_a_split_takes_as_many_of_each_tag_and_of_a_small_one_a_quarter() -> None:
    rows = [("position", f"a photo of a cat left of a {i} dog") for i in range(2000)]
    rows += [("counting", f"a photo of two {i}s") for i in range(20)] * 5
    rows += [("position", f"a photo of a {i} dog right of a cat") for i in range(2000)]
    batch = PromptBatch([p for _, p in rows], ["t"] * len(rows), [{"tag": t} for t, _ in rows])
    training, validation = module.set_aside(batch, frozenset())
    tags = Counter(rows[row][0] for row in validation)
    assert tags == {"position": module.VALIDATION // 2, "counting": 5}
    left = {rows[row][1] for row in training}
    assert len(left) == 4000 + 20 - 2 * tags["position"] - 5  # either way round


@pytest.mark.parametrize(
    ("forms", "test"),
    [
        (["a photo of a {} cat above a dog"], "A photo of a dog  below a {} cat"),
        (['a sign: "Text {}"', 'a red "Text {}"'], "TEXT {}"),
    ],
)
def test_validation_avoids_the_test_set_and_training_avoids_validation(
    forms: list[str], test: str
) -> None:
    """By what a picture would show: objects told in another order, a text in another scene."""
    prompts = [form.format(number) for number in range(80) for form in forms]
    avoided = {text_digest(test.format(number)) for number in range(40)}
    batch = PromptBatch(prompts, ["t"] * len(prompts), [{}] * len(prompts))
    training, validation = (
        {text_digest(same) for row in rows for same in module.same_picture(prompts[row])}
        for rows in module.set_aside(batch, avoided)
    )
    assert validation and validation.isdisjoint(avoided | training)


def official(name: str) -> Path:
    folders = [parent / "shared" / "data" for parent in Path(__file__).resolve().parents]
    paths = [folder / name for folder in folders if (folder / name).is_file()]
    if not paths:
        pytest.skip(f"no ../shared/data/{name} to compare with")
    return paths[0]


def test_the_shipped_digests_are_those_of_the_official_test_sets() -> None:
    lines = official("geneval_evaluation_metadata.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert set(map(text_digest, prompts)) == module.GENEVAL and len(prompts) == 553
    signs = load_prompts(official("ocr_test.txt"), "ocr").prompts
    assert {text_digest(target_of(prompt)) for prompt in signs} == module.OCR_TEST_TEXTS


def test_the_table_pins_what_it_names() -> None:
    for name, each in SOURCES.items():
        assert re.fullmatch("[0-9a-f]{40}", each.commit), name
        for file in each.files:
            assert file.url.startswith(f"https://raw.githubusercontent.com/{each.home}/"), name
            assert bool(file.checksum) == bool(file.known), file.name
            assert re.fullmatch("|sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", file.checksum), file.name
    files = [file for each in SOURCES.values() for file in each.files]
    names = [file.name for file in files] + [f.validation for f in files if f.validation]
    assert {f.name for f in files if "train" in f.name} == {f.name for f in files if f.validation}
    assert len(set(names)) == len(names)
    assert "offensive" in SOURCES["pickscore"].note
