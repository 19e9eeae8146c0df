"""A Hugging Face Hub over HTTP that holds its repositories in memory.

As much of the Hub's protocol as huggingface_hub's client needs to download from it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

LAYER = "base_model.model.transformer_blocks.0.attn.to_q"


def peft(width: int, strength: float = 1.0) -> dict[str, bytes]:
    """The files of a LoRA as peft saves it, of one layer of a transformer of this width."""
    halves = {"A": strength * torch.ones(2, width), "B": torch.ones(width, 2)}
    return {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 2, "lora_alpha": 5}',
        "adapter_model.safetensors": save({f"{LAYER}.lora_{h}.weight": halves[h] for h in "AB"}),
        "README.md": b"# A teacher",
    }


PEFT = peft(32)


@dataclass
class Repository:
    """{revision: {file: content}}."""

    gated: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})


@dataclass
class Hub:
    """asked: "METHOD path" of every request. downloads: the files whose content was sent."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)

    def put(
        self, repo: str, files: dict[str, bytes], *, revision: str = "main", gated: bool = False
    ) -> None:
        """A repository that is there."""
        made = self.repositories.setdefault(repo, Repository(gated=gated))
        made.revisions[revision] = dict(files)


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub on a port that was free."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def sha(files: dict[str, bytes]) -> str:
    """Of a revision's content, as a commit."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/api/models/([\w-]+/[\w.-]+)(?:/(revision|tree)/(.+))?", path):
            files = self._files(match[1], match[3] or "main")
            if files is None:
                return
            if match[2] == "tree":
                rows = [{"type": "file", "path": name, "size": len(what), "oid": sha({name: what})}
                        for name, what in files.items()]  # fmt: skip
                self._json(rows)
            else:
                names = [{"rfilename": name, "size": len(what)} for name, what in files.items()]
                about = {"id": match[1], "sha": sha(files), "private": False}
                self._json({**about, "siblings": names})
        elif match := re.fullmatch(r"/([\w-]+/[\w.-]+)/resolve/([\w.]+|refs/pr/\d+)/(.+)", path):
            self._send_file(match[1], match[2], match[3])
        else:
            self._json({}, 404)

    def _files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """What is there for who asks; None where an error was sent."""
        repo = self.hub.repositories.get(name)
        if repo is None:
            self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
            return None
        if repo.gated:
            self._json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
            return None
        found = {**repo.revisions, **{sha(files): files for files in repo.revisions.values()}}
        if revision not in found:
            self._json({"error": "Invalid rev"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return found.get(revision)

    def _send_file(self, repo: str, revision: str, name: str) -> None:
        files = self._files(repo, revision)
        if files is None:
            return
        content = files[name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", sha(files))
        self.send_header("ETag", f'"{sha({name: content})}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.hub.downloads.append(name)
            self.wfile.write(content)

    def _json(self, what: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(what).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def go_online(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let huggingface_hub's client in this process talk to that Hub only, with an empty cache and
    nobody logged in."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub of this test's own, an empty cache, and nobody logged in."""
    with serving() as found:
        go_online(found, monkeypatch, tmp_path / "cache")
        yield found


PUBLIC = [f"jieliu/SD3.5M-FlowGRPO-{name}" for name in ("GenEval", "Text", "PickScore")]
FOLDERS = {  # of the other adapters that our configs name
    **{f"Jayce-Ping/{name}-Teacher": [""] for name in ("GenEval", "OCR", "Pickscore")},
    "worstcoder/SD3.5M-DiffusionNFT-MultiReward": [""],
    "quanhaol/DiffusionOPD": ["Student/lora/", "OCRTeacher/lora/"],
    "shreshthsaini/MEND-SD3.5M-PickScore": [""], "shreshthsaini/MEND-SD3.5M-ThreeReward": [""],
    "Yang18/CapField-OPD": [
        f"teachers_ckpt/{name}_teacher/"
        for name in ("geneval", "ocr", "aesthetic", "geneval_aesthetic", "ocr_aesthetic")
    ],
}  # fmt: skip


def with_public_teachers(hub: Hub) -> Hub:
    """With the adapters that our configs name, a layer each, of the sizes of SD3.5-M or FLUX."""
    for repository, folders in {**dict.fromkeys(PUBLIC, [""]), **FOLDERS}.items():
        files = peft(3072 if "CapField" in repository else 1536)
        if "MEND" in repository:  # with B doubled, and so its rank as alpha
            files["pytorch_lora_weights.safetensors"] = files["adapter_model.safetensors"]
        hub.put(
            repository, {f"{folder}{n}": what for folder in folders for n, what in files.items()}
        )
    return hub
