"""Digests of the official test sets, so that training prompts can avoid them; no text is shipped.

held_out_geneval.txt has the 553 prompts of GenEval's test set. held_out_ocr.txt has the 953
different target texts of Flow-GRPO's OCR test set (1,018 prompts). Both are the `digest`s of what
`flowalign data fetch geneval ocr` downloads.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(text: str) -> str:
    """40 bits of SHA-256 of a text, in hex; case and white space do not count."""
    plain = "".join(text.lower().split())
    # 1e-9: the chance to collide with one of a thousand others, which costs one training prompt
    return hashlib.sha256(plain.encode()).hexdigest()[:10]


def _shipped(name: str) -> frozenset[str]:
    return frozenset(Path(__file__).with_name(name).read_text().split())


GENEVAL = _shipped("held_out_geneval.txt")
OCR = _shipped("held_out_ocr.txt")
