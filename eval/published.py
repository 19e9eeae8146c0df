"""Scores that others published for Stable Diffusion 3.5 Medium, to be shown beside ours as theirs.

From the project page of Flow-OPD (arXiv 2605.08063). Their GenEval uses mmdet's detector, their OCR
PaddleOCR 2, and their preference prompts are not known, so small differences to ours mean nothing.
"""

from __future__ import annotations

SOURCE = (
    "Flow-OPD project page (arXiv 2605.08063), Stable Diffusion 3.5 Medium, 512 px, 40 steps, "
    "guidance 4.5"
)
COLUMNS = ("GenEval", "OCR", "DeQA", "PickScore")
ROWS: dict[str, tuple[float, ...]] = {
    "base": (0.63, 0.59, 4.07, 21.64),
    "GRPO teacher: GenEval": (0.94, 0.65, 4.01, 21.53),
    "GRPO teacher: OCR": (0.64, 0.92, 4.06, 21.69),
    "GRPO teacher: DeQA": (0.64, 0.66, 4.23, 23.02),
    "GRPO teacher: PickScore": (0.51, 0.69, 4.22, 23.19),
    "GRPO-Mix 3:1:1": (0.73, 0.83, 4.33, 21.84),
    "Flow-OPD from SFT": (0.91, 0.92, 4.29, 21.83),
    "Flow-OPD from the merge": (0.92, 0.94, 4.35, 23.08),
}


def concerns(model: str) -> bool:
    """Is this the model that the published numbers are of, by its id or folder name?"""
    name = model.rstrip("/").rpartition("/")[2].lower()
    return name.startswith("stable-diffusion-3.5-medium")
