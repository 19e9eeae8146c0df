"""Engines that read text off an image. Numbers from different engines are not comparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml

from flowalign.system.packages import require

Line = tuple[str, float]


class Engine(Protocol):
    """Reads text. `name` says which engine, models and settings, and is recorded with results.

    An engine that reads several images faster at once may have `read_many(images) -> lists`: what
    `read` says of each of them, in order, whatever else is in the batch.
    """

    name: str

    def read(self, image: np.ndarray) -> list[Line]:
        """image uint8 RGB [H,W,3] -> (text, confidence in [0,1]) in reading order; [] = none."""
        ...


def read_all(engine: Engine, images: Sequence[np.ndarray]) -> list[list[Line] | Exception]:
    """The lines of each image, or the exception of one that failed.

    In one call where the engine has read_many. If that raises, or its answer is not one list an
    image, the images are read one by one, so that a bad one does not take the others along.
    """
    if len(images) > 1 and hasattr(engine, "read_many"):
        with suppress(Exception):  # the loop below finds out which image it was
            answer = engine.read_many(images)  # pyright: ignore[reportAttributeAccessIssue]
            if len(answer) == len(images):
                return answer
    lines: list[list[Line] | Exception] = []
    for image in images:
        try:
            lines.append(engine.read(image))
        except Exception as error:
            lines.append(error)
    return lines


class RapidOCREngine:
    """RapidOCR on onnxruntime; its wheel brings the PP-OCRv6 small models, so it works offline.

    upscale: enlarge the image by this whole factor before reading (for small images).
    limit_side_len, limit_type: "min" enlarges for detection until the short side has this many
        pixels, "max" shrinks until the long side has. RapidOCR's own: 736, "min".
    text_score: lines of lower confidence are dropped. threads: onnxruntime's, per image.
    box_thresh, unclip_ratio: of the text detector.
    rec_width: the recogniser's input (48 high) is padded to this width; longer lines get more.
        320 is what it was made for, 128 halves its time where lines are short.
    Has no read_many: RapidOCR reads the lines of one image in batches of 6. Lines of several images
    in one batch would be padded to the longest of them, and a score would depend on its company.
    Raises ImportError where rapidocr is not installed. Not for use from several threads.
    """

    def __init__(
        self,
        upscale: int = 1,
        limit_side_len: int = 736,
        limit_type: str = "min",
        text_score: float = 0.5,
        box_thresh: float = 0.5,
        unclip_ratio: float = 1.6,
        rec_width: int = 320,
        threads: int = 1,
    ) -> None:
        rapidocr = require("rapidocr", "this reward reads text with")
        self.upscale = upscale
        self._ocr: Any = rapidocr.RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.text_score": text_score,
                "Global.use_cls": False,  # upside-down lines: generated text has none
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,  # -1 would take all cores
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_side_len": limit_side_len,
                "Det.limit_type": limit_type,
                "Det.box_thresh": box_thresh,
                "Det.unclip_ratio": unclip_ratio,
                "Rec.rec_img_shape": [3, 48, rec_width],
            }
        )
        parts = (self._ocr.cfg.Det, self._ocr.cfg.Rec)  # often of one release: named once
        models = dict.fromkeys(f"{p.ocr_version.value} {p.model_type.value}" for p in parts)
        self.name = (  # recorded with results: all that changes them
            f"rapidocr {version('rapidocr')}, {' + '.join(models)}, text_score {text_score}, "
            f"upscale {upscale}, limit {limit_side_len} {limit_type}, box_thresh {box_thresh}, "
            f"unclip_ratio {unclip_ratio}, rec_width {rec_width}"
        )

    def read(self, image: np.ndarray) -> list[Line]:
        """image uint8 RGB [H,W,3] -> (text, confidence) in RapidOCR's order, [] = no text."""
        page = self._ocr(_bgr(image, self.upscale))
        return list(zip(page.txts or (), map(float, page.scores or ()), strict=True))


class PaddleOCREngine:
    """PaddleOCR 3.x, by default with the peers' models, which it downloads on first use.

    lang, ocr_version: which models, where no folders are given.
    text_detection_model_dir, text_recognition_model_dir: folders of models, both or none, for a
        machine without a network. scripts/paddle_models_from_rapidocr.py makes a pair.
    inference: what runs the models: None (PaddlePaddle), "onnxruntime" (for folders that hold an
        inference.onnx), or another of PaddleOCR's `engine`s.
    device: "cpu" or "gpu:0"; None = PaddleOCR's choice.
    text_rec_score_thresh: lines of lower confidence are dropped (the peers' 2.x default is .5).
    limit_side_len, limit_type: as for RapidOCREngine; PaddleOCR's own: 64, "min". The peers' 960,
        "max" gives the same for 512 px. box_thresh, unclip_ratio: of the text detector.
    upscale, threads: as for RapidOCREngine.
    Raises ImportError where paddleocr is not installed, ValueError for a folder without a model.
    """

    def __init__(
        self,
        lang: str = "en",
        ocr_version: str = "PP-OCRv4",
        device: str | None = None,
        text_rec_score_thresh: float = 0.5,
        upscale: int = 1,
        *,
        text_detection_model_dir: str | None = None,
        text_recognition_model_dir: str | None = None,
        inference: str | None = None,
        limit_side_len: int = 64,
        limit_type: str = "min",
        box_thresh: float = 0.6,
        unclip_ratio: float = 1.5,
        threads: int = 1,
    ) -> None:
        folders = text_detection_model_dir, text_recognition_model_dir
        models, which = _paddle_models(*folders, lang, ocr_version)
        paddleocr = require("paddleocr", "this reward reads text with")
        self.upscale = upscale
        running: dict[str, Any] = {"cpu_threads": threads}
        if inference == "onnxruntime":
            limits = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
            running = {"engine_config": limits}  # as onnxruntime names them
        if inference is not None:  # PaddleOCR before 3.7 knows no `engine`
            running["engine"] = inference
        self._ocr = paddleocr.PaddleOCR(
            **models,
            **running,
            device=device,
            use_doc_orientation_classify=False,  # these three are for scans and photographs
            use_doc_unwarping=False,
            use_textline_orientation=False,
            text_rec_score_thresh=text_rec_score_thresh,
            text_det_limit_side_len=limit_side_len,
            text_det_limit_type=limit_type,
            text_det_box_thresh=box_thresh,
            text_det_unclip_ratio=unclip_ratio,
        )
        self.name = (
            f"paddleocr {version('paddleocr')} {inference or 'paddle'}, {which}, "
            f"text_rec_score_thresh {text_rec_score_thresh}, upscale {upscale}, "
            f"limit {limit_side_len} {limit_type}, box_thresh {box_thresh}, "
            f"unclip_ratio {unclip_ratio}"
        )

    def read(self, image: np.ndarray) -> list[Line]:
        """image uint8 RGB [H,W,3] -> (text, confidence) in PaddleOCR's order, [] = no text."""
        return self.read_many([image])[0]

    def read_many(self, images: Sequence[np.ndarray]) -> list[list[Line]]:
        """The lines of each image, by one call. PaddleOCR batches the lines of an image and no
        further, so a score does not depend on the other images."""
        pages = self._ocr.predict([_bgr(image, self.upscale) for image in images])
        return [list(zip(p["rec_texts"], map(float, p["rec_scores"]), strict=True)) for p in pages]


def _paddle_models(
    detection: str | None, recognition: str | None, lang: str, ocr_version: str
) -> tuple[dict[str, str], str]:
    """The arguments that tell PaddleOCR which models to load, and what they are called."""
    if not detection and not recognition:
        return {"lang": lang, "ocr_version": ocr_version}, f"{ocr_version} {lang}"
    if not detection or not recognition:  # it would download the other
        raise ValueError("give text_detection_model_dir and text_recognition_model_dir, or none.")
    names = _model_name(detection), _model_name(recognition)
    arguments = {
        "text_detection_model_name": names[0],
        "text_detection_model_dir": detection,
        "text_recognition_model_name": names[1],
        "text_recognition_model_dir": recognition,
    }
    return arguments, " + ".join(names)


def _model_name(folder: str) -> str:
    """The name in the inference.yml of a model's folder; PaddleOCR wants to be told it."""
    try:
        text = (Path(folder) / "inference.yml").read_text(encoding="utf-8")
        # the fast loader where there is one: the file lists an alphabet of 18,000 letters
        settings = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return settings["Global"]["model_name"]
    except (OSError, yaml.YAMLError, LookupError, TypeError) as error:
        raise ValueError(f"{folder!r} has no inference.yml of PaddleOCR: {error!r}") from error


ENGINES: dict[str, Callable[..., Engine]] = {
    "rapidocr": RapidOCREngine,
    "paddleocr": PaddleOCREngine,
}


def _bgr(image: np.ndarray, upscale: int) -> np.ndarray:
    """RGB -> BGR, as both engines take arrays; enlarged by a whole factor, bicubic."""
    image = np.ascontiguousarray(image[:, :, ::-1])  # OpenCV takes no negative strides
    if upscale == 1:
        return image
    import cv2  # here: a server's old environment may lack it

    size = (image.shape[1] * upscale, image.shape[0] * upscale)
    return cv2.resize(image, size, interpolation=cv2.INTER_CUBIC)
