"""`flowalign vote` serves a local page that shows two images of a prompt, and writes the choice.

`stage: dpo` learns from the file of pairs that it writes. Only this machine can open the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from flowalign.commands.sample import LISTED
from flowalign.system.exit import refusing
from flowalign.system.files import append, expanded, read_lines
from flowalign.system.packages import require

if require("fastapi", "flowalign vote needs"):
    from fastapi import Body, FastAPI, HTTPException
    from fastapi.responses import FileResponse
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from flowalign.rewards.service.server import server

PAGE = Path(__file__).with_name("vote.html")
FILES = ("neither.jsonl", "pairs.jsonl", "pairs.jsonl")  # of a folder, by the choice
HOST = "127.0.0.1"


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
        turns = itertools.zip_longest(*(itertools.combinations(i, 2) for i in images.values()))
        in_order = itertools.chain.from_iterable(turns)
        self.pairs = [list(pair) for pair in in_order if pair]
        if not self.pairs:
            text = f"{folder} has no two images of a prompt in {LISTED}"
            raise ValueError(f"{text}. Write some: flowalign sample --images 2 PROMPT ...")
        sides = random.Random(0)
        for pair in self.pairs:
            sides.shuffle(pair)
        voted = [row for name in {*FILES} for row in read_lines(folder / name)]
        names = {frozenset((row["chosen"], row["rejected"])) for row in voted}
        pairs = enumerate(self.pairs)
        self.left = [n for n, pair in pairs if frozenset(i["file"] for i in pair) not in names]

    def state(self) -> dict[str, Any]:
        """The number of the next pair (None at the end), its prompt, and the number of votes."""
        total = len(self.pairs)
        number = self.left[0] if self.left else None
        prompt = "" if number is None else self.pairs[number][0]["prompt"]
        return {"pair": number, "prompt": prompt, "done": total - len(self.left), "total": total}

    def vote(
        self, pair: Annotated[int, Body()], choice: Annotated[Literal[0, 1, 2], Body()]
    ) -> dict[str, Any]:
        """Write a vote, once for each pair; the state after it. choice: the better image, 0 =
        neither."""
        chosen, rejected = self._pair(pair)[:: -1 if choice == 2 else 1]
        if pair in self.left:
            row = {
                "prompt": chosen["prompt"],
                "chosen": chosen["file"],
                "rejected": rejected["file"],
            }
            append(self.folder / FILES[choice], json.dumps(row, ensure_ascii=False) + "\n")
            self.left.remove(pair)
        return self.state()

    def image(self, number: int, right: bool) -> FileResponse:
        """An image by the number of its pair, so that no path can be requested. Browsers must not
        cache it: another folder has the same numbers."""
        path = self.folder / self._pair(number)[right]["file"]
        return FileResponse(path, headers={"Cache-Control": "no-store"})

    def _pair(self, number: int) -> list[dict[str, Any]]:
        if not 0 <= number < len(self.pairs):
            raise HTTPException(404, f"no pair {number}; there are {len(self.pairs)}.")
        return self.pairs[number]


def vote_app(folder: Path) -> FastAPI:
    """The web application of a folder. Pages of other hosts cannot use it, whatever their names."""
    ballot = Ballot(folder)
    application = FastAPI(openapi_url=None, redirect_slashes=False)
    application.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    application.get("/")(lambda: FileResponse(PAGE))
    application.get("/state")(ballot.state)
    application.post("/vote")(ballot.vote)
    application.get("/image/{number}/{right}")(ballot.image)
    return application


@refusing("vote")
def main(args: argparse.Namespace) -> int:
    """Exit status: 0 ended, 2 refused."""
    web = server(vote_app(expanded(args.folder)))
    with socket.create_server((HOST, args.port)) as listener:
        port = listener.getsockname()[1]
        print(f"open http://{HOST}:{port} in a browser; Ctrl-C ends", flush=True)
        web.run(sockets=[listener])
    return 0
