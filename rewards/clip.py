"""Image and text vectors of a transformers CLIPModel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor
from transformers import AutoTokenizer, CLIPModel

from flowalign.backbone.tiny import PREFERENCE
from flowalign.rewards import preprocess, weights
from flowalign.rewards.options import pretrained
from flowalign.rewards.towers import TwoTowers

CONTEXT = 77  # tokens of CLIP's text tower; longer prompts are cut
LARGE = "openai/clip-vit-large-patch14"

_POSSIBLE = f"`tiny`, the folder of a transformers CLIPModel, or a Hub id such as {LARGE}"
ClipModel = Annotated[str, pretrained(_POSSIBLE, "tiny")]  # "tiny": trained on the tiny world


def resolve(model: str) -> str:
    """The folder of the shipped preference model for "tiny"; any other id or folder as it is."""
    return str(PREFERENCE) if model == "tiny" else str(Path(model).expanduser())


class Clip(TwoTowers):
    """A CLIPModel with its image processor and tokenizer.

    model, processor: "tiny", a folder, or a Hub id; processor None = the model's own. revision: of
    the model. `name` says which. computing: device, batch_size, offload and text_cache, as in
    `TwoTowers`. Raises OSError where there is nothing to load.
    """

    def __init__(
        self,
        model: str,
        processor: str | None = None,
        revision: str | None = None,
        **computing: Any,
    ) -> None:
        self.name = f"{model}@{revision}" if revision else model
        name = resolve(model)
        at: dict[str, Any] = {"revision": revision} if revision else {}
        # a revision is a commit of the model's repository, and names none in the processor's
        source, its = (name, at) if processor is None else (resolve(processor), {})
        self.model = weights.from_safetensors(CLIPModel, name, **at).float()
        self.pixels = preprocess.ImageProcessor.from_pretrained(source, **its)
        self.tokenizer = AutoTokenizer.from_pretrained(source, **its)
        positions = self.model.text_model.embeddings.position_embedding.num_embeddings
        self.context = min(CONTEXT, positions, self.tokenizer.model_max_length)  # often 1e30
        self.scale = float(self.model.logit_scale.detach().exp())  # times the cosine, in training
        super().__init__(self.model, self.model.visual_projection.out_features, **computing)

    def _encode_images(self, pictures: list[np.ndarray]) -> Tensor:
        values = preprocess.values(self.pixels, pictures)
        return _pooled(self.model.get_image_features(values.to(self.device)))

    def _encode_texts(self, prompts: list[str]) -> Tensor:
        tokens = self.tokenizer(
            prompts, padding=True, truncation=True, max_length=self.context, return_tensors="pt"
        )
        ids, mask = tokens["input_ids"].to(self.device), tokens["attention_mask"].to(self.device)
        return _pooled(self.model.get_text_features(ids, attention_mask=mask))


def _pooled(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output  # transformers 4 or 5
