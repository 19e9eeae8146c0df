"""Image and text vectors of a CLIP, for the rewards that compare the two.

Legend: B images, P prompts, D the width of the space that both are projected to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoTokenizer, CLIPModel

from flowalign.rewards.pixels import to_uint8
from flowalign.tiny import PREFERENCE

try:  # one set of pixels, whether torchvision is installed or not
    from transformers.models.clip import CLIPImageProcessorPil as ImageProcessor
except ImportError:  # transformers 4: the one without "Fast" is PIL's
    from transformers import CLIPImageProcessor as ImageProcessor

CONTEXT = 77  # tokens of CLIP's text tower; longer prompts are cut


def resolve(model: str) -> str:
    """The folder of the shipped preference model for "tiny"; any other id or folder as it is."""
    return str(PREFERENCE) if model == "tiny" else str(Path(model).expanduser())


def check_model(model: str, option: str) -> None:
    """Raise ValueError for what is neither "tiny", nor the folder of a CLIP, nor a Hub id."""
    folder = Path(resolve(model))
    if folder.is_dir() and not any(folder.glob("*config.json")):
        seen = f"folder {folder} holds no config.json"
    elif not folder.is_dir() and not _is_hub_id(model):
        seen = "there is no such folder, and it is no Hub id"
    else:
        return
    raise ValueError(
        f"`{option}` {model!r}: {seen}. Give `tiny`, the folder of a transformers CLIPModel, or a "
        "Hub id such as yuvalkirstain/PickScore_v1."
    )


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


class Clip:
    """A CLIPModel with its image processor and tokenizer.

    model, processor: "tiny", a folder, or a Hub id; processor None = the model's own. revision: of
    the model. batch_size: images or prompts a forward pass; it changes no result. device: None =
    the GPU if there is one. Raises OSError where there is nothing to load.
    """

    def __init__(
        self,
        model: str,
        processor: str | None = None,
        revision: str | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 64,
    ) -> None:
        name = resolve(model)
        at: dict[str, Any] = {"revision": revision} if revision else {}
        source, its = (name, at) if processor is None else (resolve(processor), {})
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.batch_size = batch_size
        loaded = CLIPModel.from_pretrained(name, **at)
        self.model = loaded.float().requires_grad_(False).eval().to(self.device)  # pyright: ignore
        self.pixels = ImageProcessor.from_pretrained(source, **its)
        self.tokenizer = AutoTokenizer.from_pretrained(source, **its)
        positions = self.model.text_model.embeddings.position_embedding.num_embeddings
        self.context = min(CONTEXT, positions, self.tokenizer.model_max_length)
        self._texts: dict[str, Tensor] = {}

    @property
    def scale(self) -> float:
        """exp(logit_scale), by which training multiplied the cosine."""
        return float(self.model.logit_scale.exp())

    @property
    def width(self) -> int:
        """D."""
        return self.model.visual_projection.out_features

    @torch.no_grad()
    def image_features(self, images: Tensor) -> Tensor:
        """Unit vectors [B,D], float32, of images [B,3,H,W] in [0,1].

        They pass as 8-bit pixels through the processor, as files would. Raises ValueError for
        pixels that are NaN or infinite.
        """
        parts = [torch.empty(0, self.width, device=self.device)]
        for start in range(0, len(images), self.batch_size):
            some = images[start : start + self.batch_size]
            pictures = [to_uint8(image) for image in some]
            inputs = self.pixels(pictures, return_tensors="pt", input_data_format="channels_last")
            found = self.model.get_image_features(inputs["pixel_values"].to(self.device))
            parts.append(normalize(_pooled(found), dim=-1))
        return torch.cat(parts)

    @torch.no_grad()
    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [P,D], float32. A prompt is encoded once; what is too long is cut."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._texts]
        for start in range(0, len(new), self.batch_size):
            some = new[start : start + self.batch_size]
            tokens = self.tokenizer(
                some, padding=True, truncation=True, max_length=self.context, return_tensors="pt"
            )
            ids, mask = tokens["input_ids"].to(self.device), tokens["attention_mask"]
            found = self.model.get_text_features(ids, attention_mask=mask.to(self.device))
            vectors = normalize(_pooled(found), dim=-1)
            self._texts.update(zip(some, vectors, strict=True))
        vectors = [self._texts[prompt] for prompt in prompts]
        return torch.stack(vectors) if vectors else torch.empty(0, self.width, device=self.device)


def _pooled(found: Any) -> Tensor:
    """The projected vectors: transformers 5 wraps them in an output object, 4 does not."""
    return found if isinstance(found, Tensor) else found.pooler_output
