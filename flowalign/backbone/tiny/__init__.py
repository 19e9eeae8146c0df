"""The tiny world: a real, small model, the scenes it was trained on, and their detector.

For the rest of the library it is a model id ("tiny"), prompt sets ("tiny/ocr_train", ...) and
the name of a detector ("tiny"), nothing more.
"""

from pathlib import Path

ROOT = Path(__file__).parent
MODEL = ROOT / "model"
PROMPTS = ROOT / "prompts"
TEACHERS = ROOT / "teachers"
PREFERENCE = ROOT / "preference_model"
T5_LENGTH = 14  # tokens of the T5 encoder that all of it was trained with
