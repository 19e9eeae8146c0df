"""`model.attention` decides which kernel computes attention; what is computed stays the same."""

from pathlib import Path
from typing import Any

import fakes
import families
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from flowalign.backbone import Backbone, ModelError
from flowalign.config import ModelConfig

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """The names of all operations inside its `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def velocity(model: str, attention: str | None) -> tuple[torch.Tensor, bool]:
    """Of a noisy batch, and whether torch's flash kernel took part."""
    sizes = {"height": 32, "width": 32, "max_sequence_length": 14}
    given = ModelConfig.model_validate({"id": model, "attention": attention, **sizes})
    backbone = Backbone.load(given)
    cond = backbone.encode(fakes.PROMPTS[:2])
    x = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Operations() as seen:
        found = backbone.velocity(x, 0.5, cond, guidance=2.0)
    return found, FLASH in seen.names


def test_a_backend_is_used_changes_no_value_and_is_not_that_of_the_next_model(
    random_model: str, tmp_path: Path
) -> None:
    """diffusers' switch also sets a global choice, which models without one of their own take."""
    families.pipeline("flux").save_pretrained(tmp_path)
    found = [velocity(str(tmp_path), name) for name in (None, "_native_math", None, "native")]
    assert [flash for _, flash in found] == [True, False, True, True]
    for value, _ in found[1:]:
        assert_close(value, found[0][0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="model.attention"):  # its layers do not ask the switch
        velocity(random_model, "native")
