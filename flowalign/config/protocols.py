"""Protocols by name: the settings under which a number was published.

What a publication leaves open is left out. A judge is known by how its description in results.json
begins, so an engine of another version is another judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Protocol:
    """model, sampling: as in a config. judges: {reward: its images per prompt and its settings}."""

    source: str  # and its revision
    sampling: Mapping[str, Any]
    model: Mapping[str, Any]
    judges: Mapping[str, Mapping[str, Any]]


MASK2FORMER = "mmdet mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco"
GENEVAL = {"images": 4, "engine": MASK2FORMER}
GRPO_OCR = {"images": 1, "engine": "paddleocr 2.9.1", "rule": "published"}
SOFTMAX = "transformers, full softmax"
PICKSCORE = {"model": "yuvalkirstain/PickScore_v1"}
GRPO_SAMPLING = {"steps": 40, "guidance": 4.5}
GRPO_MODEL = {"height": 512, "width": 512, "max_sequence_length": 128}

PROTOCOLS: Mapping[str, Protocol] = {
    "flow_grpo": Protocol(
        "yifan123/flow_grpo@ac4c86e",
        GRPO_SAMPLING,
        GRPO_MODEL,
        # DrawBench: 200 prompts, five times each
        {"geneval": GENEVAL, "ocr": GRPO_OCR, "pickscore": {"images": 5, **PICKSCORE}},
    ),
    "flow_opd": Protocol(  # its prompts for PickScore are not named
        "Flow-OPD@434ab16",
        GRPO_SAMPLING,
        GRPO_MODEL,
        {"geneval": GENEVAL, "ocr": GRPO_OCR, "pickscore": PICKSCORE},
    ),
    "geneval_official": Protocol(  # its generator; the size is the model's own
        "djghosh13/geneval@af4902f",
        {"steps": 50, "guidance": 9.0, "seed": 42},
        {},
        {"geneval": GENEVAL},
    ),
    "geneval2": Protocol(  # its generators' settings differ, and are not part of it
        "facebookresearch/GenEval2, arXiv 2512.16853",
        {},
        {},
        {"geneval2": {"images": 1, "engine": SOFTMAX, "model": "Qwen/Qwen3-VL-8B-Instruct"}},
    ),
}


def deviation(name: str, settings: Mapping[str, Any], about: Mapping[str, Any], images: int) -> str:
    """The first key in which a number differs from a protocol, and how; "" if it agrees.

    settings, about: of the model and of the benchmark in results.json. images: per prompt.
    """
    protocol = PROTOCOLS[name]
    judge = protocol.judges.get(about["reward"])
    if judge is None:
        return f"reward is {about['reward']!r}; there: {', '.join(protocol.judges)}"
    seen = {**about, **settings, "images": images}
    for key, wanted in {**protocol.model, **protocol.sampling, **judge}.items():
        value = seen.get(key)
        if value != wanted and not (isinstance(wanted, str) and str(value).startswith(wanted)):
            return f"{key} is {value!r}; there: {wanted!r}"
    return ""
