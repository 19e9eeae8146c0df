"""The official prompt sets: where they lie, under which licence, and what they must hash to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RAW = "https://raw.githubusercontent.com"
OURS = "computed from a copy at hand"
THEIRS = "recorded by other projects that pin this commit"


@dataclass(frozen=True)
class File:
    """One file of a set.

    name: where it is written, below the folder of data. url: where it comes from.
    checksum: "sha256:..." or "md5:..." of what is written, "" where none could be had; known: how.
    unique: are its lines made unique and sorted before they are written?
    validation: the file that a part of a training set is set aside in, "" for none; the files of
    the set that it must be apart from come first.
    """

    name: str
    url: str
    checksum: str = ""
    known: str = ""
    unique: bool = False
    validation: str = ""


@dataclass(frozen=True)
class Source:
    """A prompt set. home: "owner/repository/commit"; note: to be read before it is used."""

    prompts: str
    home: str
    licence: str
    files: tuple[File, ...]
    note: str = ""

    @property
    def commit(self) -> str:
        return self.home.rsplit("/", 1)[1]

    @property
    def page(self) -> str:
        """Where to look at the repository as it was at that commit."""
        return f"https://github.com/{self.home.rsplit('/', 1)[0]}/tree/{self.commit}"


FLOW_GRPO = "yifan123/flow_grpo/879042cf5707f8b90daa98d147d7deac2317c5da"
GENEVAL = "djghosh13/geneval/d927da8e42fde2b1b5cd743da4df5ff83c1654ff"
COMPBENCH = "Karine-Huang/T2I-CompBench/4aa404212eb5d06e5adbcd9cee696c750d0d25a5"
ELLA = "TencentQQGYLab/ELLA/025f650e9b36b9603d606042635d98da09e870de"

PICK_A_PIC = "prompts of users of Pick-a-Pic, whose terms are not verified (repository: MIT)"
NSFW = "Contains sexual and other offensive prompts; pickscore_sfw is the filtered set."


def _flow_grpo(name: str, path: str, checksum: str, known: str = THEIRS, **rest: Any) -> File:
    return File(name, f"{RAW}/{FLOW_GRPO}/dataset/{path}", checksum, known, **rest)


SOURCES: Mapping[str, Source] = {
    "geneval": Source(
        "553, six tags: the official test set",
        GENEVAL,
        "MIT",
        (
            File(
                "geneval_test.jsonl",
                f"{RAW}/{GENEVAL}/prompts/evaluation_metadata.jsonl",
                "sha256:5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13",
                OURS,
            ),
        ),
    ),
    "geneval_train": Source(
        "50,000 of Flow-GRPO (ours: `flowalign data generate geneval`)",
        FLOW_GRPO,
        "MIT",
        (
            _flow_grpo(
                "geneval_train.jsonl",
                "geneval/train_metadata.jsonl",
                "sha256:34ff787e05efab6fb0c54742f5357d7a850360835818e401a4e55de77f8c9923",
                validation="geneval_val.jsonl",
            ),
        ),
    ),
    "ocr": Source(
        "1,018 of Flow-GRPO: the test set",
        FLOW_GRPO,
        "MIT; written by a language model",
        (
            _flow_grpo(
                "ocr_test.txt",
                "ocr/test.txt",
                "sha256:4dd8caf3ab6ade73bd376c7d14c6ca49b6eacfb1bd321e22c40714ae4a98d4dc",
                OURS,
            ),
        ),
    ),
    "ocr_train": Source(
        "19,653 of Flow-GRPO (ours: `flowalign data generate ocr`)",
        FLOW_GRPO,
        "MIT; written by a language model",
        (
            _flow_grpo(
                "ocr_train.txt",
                "ocr/train.txt",
                "sha256:2eb32ce1c5fd1ffec94070be84252419ec848329d9adde9c2708867882fbce5f",
                validation="ocr_val.txt",
            ),
        ),
    ),
    "pickscore": Source(
        "25,432 and 2,048 of Flow-GRPO",
        FLOW_GRPO,
        PICK_A_PIC,
        (
            _flow_grpo("pickscore_test.txt", "pickscore/test.txt", "", ""),
            _flow_grpo(
                "pickscore_train.txt",
                "pickscore/train.txt",
                "sha256:2f425adcbb9a6d0feee7c6c448e1cb83a1f71deca9434b803907e2578eca837f",
                validation="pickscore_val.txt",
            ),
        ),
        NSFW,
    ),
    "pickscore_sfw": Source(
        "15,486 and 1,024 of Flow-GRPO",
        FLOW_GRPO,
        PICK_A_PIC,
        (
            _flow_grpo(
                "pickscore_sfw_test.txt",
                "pickscore_sfw/test.txt",
                "sha256:d839050acb06aa045e399e76a81e4ade9a55fc743dc0e22e7b3eaeaca5c19107",
            ),
            _flow_grpo(
                "pickscore_sfw_train.txt",
                "pickscore_sfw/train.txt",
                "sha256:edb46f78d7d93df0bafb30568074463822312ee339200f627195ccb2ff1d2f7a",
                validation="pickscore_sfw_val.txt",
            ),
        ),
        "Filtered by its makers, which does not mean that every prompt is harmless.",
    ),
    "drawbench": Source(
        "200 (the file repeats each five times, shuffled; written once each, sorted)",
        FLOW_GRPO,
        "unknown: DrawBench of the Imagen paper (2205.11487), as mirrored there",
        (
            _flow_grpo(
                "drawbench.txt",
                "drawbench/test.txt",
                "sha256:18cef96e28e1b3b6b529dc5b8ade0d7f55e65939797fd8af49ef702e9119c2a7",
                OURS,
                unique=True,
            ),
        ),
    ),
    "t2i_compbench": Source(
        "8 files of 300: the validation sets",
        COMPBENCH,
        "MIT",
        tuple(
            File(
                f"t2i_compbench/{category}_val.txt",
                f"{RAW}/{COMPBENCH}/examples/dataset/{category}_val.txt",
                checksum,
                THEIRS if checksum else "",
            )
            for category, checksum in {
                "color": "sha256:1634259756dbc77d13093d907d414480080ec9790a8c97ad09efaea7b2534f2d",
                "shape": "",
                "texture": "",
                "spatial": "",
                "3d_spatial": "",
                "non_spatial": "",
                "numeracy": "",
                "complex": "",
            }.items()
        ),
    ),
    "dpg_bench": Source(
        "1,065 dense prompts, a row a question",
        ELLA,
        "Apache-2.0",
        (
            File(
                "dpg_bench.csv",
                f"{RAW}/{ELLA}/dpg_bench/dpg_bench.csv",
                "md5:c42a5fe03458f158303411a3c439ca33",
                "recorded by another project, of the branch main",
            ),
        ),
    ),
}
