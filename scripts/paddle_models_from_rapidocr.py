"""Folders that PaddleOCR 3.x loads offline, from the PP-OCR models in rapidocr's wheel.

    python scripts/paddle_models_from_rapidocr.py paddle_models

Writes paddle_models/PP-OCRv6_small_det and .../PP-OCRv6_small_rec, each an inference.onnx (linked,
else copied) with the inference.yml that PaddleX asks for, for PaddleOCR's onnxruntime engine:

    reward:
      name: ocr
      options:
        engine: paddleocr
        inference: onnxruntime
        text_detection_model_dir: paddle_models/PP-OCRv6_small_det
        text_recognition_model_dir: paddle_models/PP-OCRv6_small_rec

Needs rapidocr and onnxruntime, not paddleocr. The models' own description (how pixels are scaled,
the alphabet) is what PaddleX 3.7.2 holds for these models (build_inference_meta in
paddlex/modules/base/utils/pdparams2safetensors); the alphabet is read off the ONNX file.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import onnxruntime
import rapidocr
import yaml

WHEEL = Path(rapidocr.__file__).parent / "models"
DETECTION: dict[str, Any] = {
    "PreProcess": {
        "transform_ops": [
            {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}},
            {"DetResizeForTest": {"resize_long": 960}},
            {
                "NormalizeImage": {
                    "mean": [0.485, 0.456, 0.406],
                    "std": [0.229, 0.224, 0.225],
                    "scale": 1 / 255,
                    "order": "hwc",
                }
            },
            {"ToCHWImage": None},
        ]
    },
    "PostProcess": {
        "name": "DBPostProcess",
        "thresh": 0.3,
        "box_thresh": 0.6,
        "max_candidates": 1000,
        "unclip_ratio": 1.5,
    },
}
RECOGNITION: dict[str, Any] = {
    "PreProcess": {
        "transform_ops": [
            {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}},
            {"RecResizeImg": {"image_shape": [3, 48, 320]}},
        ]
    },
    "PostProcess": {"name": "CTCLabelDecode"},
}


def alphabet(model: Path) -> list[str]:
    """The characters that a recogniser was trained on, from its ONNX metadata.

    Raises ValueError where they do not fit its outputs: one more is blank, another one a space.
    """
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map["character"].split("\n")
    outputs = session.get_outputs()[0].shape[-1]
    while characters and len(characters) + 2 > outputs and not characters[-1]:
        characters.pop()  # the line that a final newline opens
    if len(characters) + 2 != outputs:
        raise ValueError(f"{model} has {len(characters)} characters, and {outputs} outputs.")
    return characters


def write(folder: Path) -> tuple[Path, Path]:
    """Write both folders below `folder`; returns (detection, recognition)."""
    recogniser = WHEEL / "PP-OCRv6_rec_small.onnx"
    decode = {**RECOGNITION["PostProcess"], "character_dict": alphabet(recogniser)}
    models = {
        "PP-OCRv6_small_det": (WHEEL / "PP-OCRv6_det_small.onnx", DETECTION),
        "PP-OCRv6_small_rec": (recogniser, {**RECOGNITION, "PostProcess": decode}),
    }
    for name, (model, description) in models.items():
        target = folder / name / "inference.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            target.symlink_to(model)
        except OSError:  # a file system without links
            shutil.copyfile(model, target)
        described = {"Global": {"model_name": name}, **description}
        text = yaml.safe_dump(described, allow_unicode=True, sort_keys=False)
        (target.parent / "inference.yml").write_text(text, encoding="utf-8")
    detection, recognition = (folder / name for name in models)
    return detection, recognition


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the folders of the models go")
    for path in write(parser.parse_args().folder):
        print(path)
