"""How well and how fast each installed OCR engine reads rendered signs.

    python benchmarks/ocr_signs.py --count 200
    python benchmarks/ocr_signs.py --count 200 --engines paddleocr

Draws signs of 512 px: one to four words, as many letters in all as the texts of the public OCR
prompts (up to 29, 17 in the mean), in several fonts, on boards of several colours, slightly
rotated, in perspective, blurred and noisy; the same ones for the same seed. Each engine reads all
of them on one thread. Prints, as a Markdown table, the accuracy by the published rule (its mean),
the share read exactly, and ms of CPU time an image, which other programs on the machine do not
stretch. PaddleOCR takes part where it is installed, with the models that it downloads.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import cv2
import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from flowalign.rewards.ocr import ENGINES, OCR, Engine

SIZE = 512
FOLDER = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FONTS = (
    "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf", "DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf", "STIXGeneral.ttf",
    "STIXGeneralBol.ttf", "STIXGeneralItalic.ttf",
)  # fmt: skip
WORDS = """
    Harbour Line Exit Open Daily Fresh Bread Sale Today Library Closed Mind Step Coffee House Grand
    Opening Summer Festival Museum Quiet Zone Welcome Home Street Market Parking Only Lost Found
    Night Train Platform Books Music Garden Pizza Bakery Hotel River Bridge Police Station Danger
    High Voltage Please Wait Here Private Property Happy Birthday Forever Yours Winter Collection
    Internationalization Extraordinary Refrigerator Photosynthesis Uncharacteristically Pharmacy
    Ice Cream Now Hiring Tax Free Speed Limit Left Turn Stay Safe Yoga Class Wet Paint Sky Bar
""".split()
COLOURS = (
    (250, 250, 245), (20, 20, 25), (190, 30, 35), (25, 60, 170), (20, 110, 60), (240, 200, 40),
    (120, 45, 130), (230, 120, 30),
)  # fmt: skip


@dataclass(frozen=True)
class Sign:
    """A picture uint8 RGB [512,512,3] and the text on it."""

    pixels: np.ndarray
    text: str


def sign(seed: int) -> Sign:
    """The sign of that number."""
    rng = random.Random(seed)
    text = _text(rng)
    board, ink = _colours(rng)
    wall = tuple(int(c) for c in np.clip(np.array(rng.choice(COLOURS)) * 0.4 + 110, 0, 255))
    image = Image.new("RGB", (SIZE, SIZE), wall)
    draw = ImageDraw.Draw(image)
    lines = _lines(text, rng)
    font = _fitting(draw, lines, rng)
    left, top, right, bottom = draw.multiline_textbbox((0, 0), "\n".join(lines), font, spacing=10)
    wide, high = right - left + 44, bottom - top + 44
    x, y = rng.randint(20, SIZE - 20 - wide), rng.randint(20, SIZE - 20 - high)
    draw.rounded_rectangle([x, y, x + wide, y + high], rng.choice([0, 14]), fill=board, outline=ink)
    at = (x + 22 - left, y + 22 - top)
    draw.multiline_text(at, "\n".join(lines), ink, font, spacing=10, align="center")
    return Sign(_photographed(np.array(image), rng), text)


def _text(rng: random.Random) -> str:
    """One to four words, 3 to 29 characters."""
    while True:
        text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 2, 2, 3, 3, 3, 4])))
        if 3 <= len(text) <= 29:
            return rng.choice([text, text, text.upper()])


def _colours(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Board and ink, of clearly different brightness."""
    while True:
        board, ink = rng.sample(COLOURS, 2)
        if abs(np.dot(np.subtract(board, ink), (0.299, 0.587, 0.114))) > 70:
            return board, ink


def _lines(text: str, rng: random.Random) -> list[str]:
    """The text on one line, or on two where it has several words."""
    words = text.split(" ")
    if len(words) == 1 or (len(text) < 16 and rng.random() < 0.5):
        return [text]
    cut = rng.randint(1, len(words) - 1)
    return [" ".join(words[:cut]), " ".join(words[cut:])]


def _fitting(
    draw: ImageDraw.ImageDraw, lines: list[str], rng: random.Random
) -> ImageFont.FreeTypeFont:
    """A font, in a size of 20 to 64 px that leaves the board on the wall."""
    path, size = FOLDER / rng.choice(FONTS), rng.randint(20, 64)
    while max(draw.textlength(line, ImageFont.truetype(path, size)) for line in lines) > 420:
        size -= 1
    return ImageFont.truetype(path, size)


def _photographed(pixels: np.ndarray, rng: random.Random) -> np.ndarray:
    """Rotated up to 8 degrees, seen from the side, blurred, noisy."""
    corners = np.array([[0, 0], [SIZE, 0], [SIZE, SIZE], [0, SIZE]], np.float32)
    moved = corners + np.array([[rng.uniform(-22, 22) for _ in "xy"] for _ in "abcd"], np.float32)
    turn = cv2.getRotationMatrix2D((SIZE / 2, SIZE / 2), rng.uniform(-8, 8), 0.93)
    warp = cv2.getPerspectiveTransform(corners, moved) @ np.vstack([turn, [0, 0, 1]])
    pixels = cv2.warpPerspective(pixels, warp, (SIZE, SIZE), borderMode=cv2.BORDER_REPLICATE)
    pixels = cv2.GaussianBlur(pixels, (0, 0), rng.uniform(0.3, 1.6))
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, rng.uniform(0, 14), pixels.shape)
    return np.clip(pixels + noise, 0, 255).round().astype(np.uint8)


def row(engine: Engine, signs: list[Sign], images: torch.Tensor) -> str:
    """A line of the table."""
    reward = OCR(engine)
    prompts, targets = [""] * len(signs), [{"target": sign.text} for sign in signs]
    reward(images[:2], prompts[:2], targets[:2])  # models load on first use
    start = time.process_time()
    scores = reward(images, prompts, targets)
    ms = 1000 * (time.process_time() - start) / len(signs)
    exact, failed = float(scores.parts["exact"].nanmean()), int((~scores.valid).sum())
    error = float(scores.value.std()) / len(signs) ** 0.5
    cells = (f"{scores.mean:.3f} ± {error:.3f}", f"{exact:.3f}", f"{ms:.0f}", str(failed))
    return f"| {engine.name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="signs")
    parser.add_argument("--seed", type=int, default=0, help="of the first sign")
    parser.add_argument(
        "--engines", nargs="+", default=["rapidocr"], choices=["rapidocr", "paddleocr"]
    )
    asked = parser.parse_args()
    signs = [sign(asked.seed + number) for number in range(asked.count)]
    images = torch.stack([torch.from_numpy(s.pixels).permute(2, 0, 1) for s in signs]) / 255
    cv2.setNumThreads(1)
    mean = sum(len(sign.text) for sign in signs) / len(signs)
    print(f"{len(signs)} signs, {mean:.1f} characters in the mean\n")
    print("| engine | accuracy (published rule) | exact | CPU ms an image | failed |")
    print("|---|---|---|---|---|")
    for name in asked.engines:
        try:
            print(row(ENGINES[name](), signs, images), flush=True)
        except ImportError as error:
            print(f"| {name} | {error} | | | |", flush=True)
