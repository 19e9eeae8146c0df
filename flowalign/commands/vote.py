"""`flowalign vote`: a local page that shows two images of a prompt, and writes what you choose.

`stage: dpo` learns from the file of pairs that it writes. Only this machine can open the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from flowalign.commands.sample import LISTED
from flowalign.system.exit import refusing
from flowalign.system.files import append, expanded, read_lines
from flowalign.system.packages import require

if require("fastapi", "flowalign vote needs"):
    from fastapi import FastAPI, HTTPException
    from fastapi.responses import FileResponse, HTMLResponse
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from flowalign.rewards.service.server import server

PAGE = Path(__file__).with_name("vote.html")
PAIRS, NEITHER = "pairs.jsonl", "neither.jsonl"  # of a folder: what was chosen, and what was not
HOST = "127.0.0.1"


class Vote(BaseModel):
    """What the page sends. pair: its number; choice: the better image, 0 = neither."""

    pair: int
    choice: Literal[0, 1, 2]


class Ballot:
    """The pairs of a folder that `flowalign sample` wrote, and the votes in it.

    Any two images of a prompt are a pair; all prompts come before a second pair of one. Which image
    is on the left is drawn. Raises ValueError for a folder without pairs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.resolve()
        images: dict[str, list[dict[str, Any]]] = {}
        for row in read_lines(folder / LISTED):
            if not (folder / row["file"]).resolve().is_relative_to(folder):
                raise ValueError(f"{folder / LISTED}: {row['file']!r} lies outside of the folder.")
            images.setdefault(row["prompt"], []).append(row)
        pairs = (list(itertools.combinations(rows, 2)) for rows in images.values())
        turns = itertools.zip_longest(*pairs)
        self.pairs = [list(pair) for turn in turns for pair in turn if pair]
        if not self.pairs:
            text = f"{folder} has no two images of a prompt in {LISTED}"
            raise ValueError(f"{text}. Write some: flowalign sample --images 2 PROMPT ...")
        sides = random.Random(0)
        for pair in self.pairs:
            sides.shuffle(pair)
        done = [row for name in (PAIRS, NEITHER) for row in read_lines(folder / name)]
        self.voted = {frozenset((row["chosen"], row["rejected"])) for row in done}

    def state(self) -> dict[str, Any]:
        """The next pair, its number None at the end, and how many are done."""
        left = (n for n, pair in enumerate(self.pairs) if _names(pair) not in self.voted)
        number, total = next(left, None), len(self.pairs)
        prompt = "" if number is None else self.pairs[number][0]["prompt"]
        done = sum(_names(pair) in self.voted for pair in self.pairs)
        return {"pair": number, "prompt": prompt, "done": done, "total": total}

    def vote(self, vote: Vote) -> dict[str, Any]:
        """Write a vote, once for each pair; the state after it."""
        pair = self._pair(vote.pair)
        if _names(pair) not in self.voted:
            chosen, rejected = pair[::-1] if vote.choice == 2 else pair
            row = {"prompt": chosen["prompt"]}
            for kind, image in (("chosen", chosen), ("rejected", rejected)):
                row |= {kind: image["file"], f"{kind}_noise": image["noise"]}
            text = json.dumps(row, ensure_ascii=False) + "\n"
            append(self.folder / (PAIRS if vote.choice else NEITHER), text)
            self.voted.add(_names(pair))
        return self.state()

    def image(self, number: int, side: Literal[1, 2]) -> FileResponse:
        """An image by the number of its pair: no path can be asked for."""
        return FileResponse(self.folder / self._pair(number)[side - 1]["file"])

    def _pair(self, number: int) -> list[dict[str, Any]]:
        if not 0 <= number < len(self.pairs):
            raise HTTPException(404, f"no pair {number}; there are {len(self.pairs)}.")
        return self.pairs[number]


def _names(pair: Sequence[dict[str, Any]]) -> frozenset[str]:
    return frozenset(image["file"] for image in pair)


def app(folder: Path) -> FastAPI:
    """The web application of a folder. A page of another host, by whatever name, cannot use it."""
    ballot = Ballot(folder)
    application = FastAPI(openapi_url=None, redirect_slashes=False)
    application.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    page = PAGE.read_text(encoding="utf-8")
    application.get("/", response_class=HTMLResponse)(lambda: page)
    application.get("/state")(ballot.state)
    application.post("/vote")(ballot.vote)
    application.get("/image/{number}/{side}")(ballot.image)
    return application


@refusing("vote")
def main(argv: Sequence[str]) -> int:
    """Exit status: 0 ended, 2 refused."""
    about = f"Vote on the images of a folder, in a browser. Choices go to FOLDER/{PAIRS}."
    parser = argparse.ArgumentParser("flowalign vote", description=about)
    parser.add_argument("folder", type=Path, help="what `flowalign sample --images 2` wrote")
    parser.add_argument("--port", type=int, default=8001, help="0: any that is free")
    args = parser.parse_args(argv)
    web = server(app(expanded(args.folder)))
    with socket.socket(socket.AF_INET, proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, args.port))
        listener.listen()
        port = listener.getsockname()[1]
        print(f"open http://{HOST}:{port} in a browser; Ctrl-C ends. Votes: {PAIRS}", flush=True)
        web.run(sockets=[listener])
    return 0
