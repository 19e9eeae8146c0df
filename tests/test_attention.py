"""`model.attention` decides which kernel computes attention; what is computed stays the same."""

from pathlib import Path
from typing import Any

import fakes
import families
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from flowalign.backbone import Backbone
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


def velocity(model: str, attention: str | None) -> tuple[torch.Tensor, set[str]]:
    """Of a noisy batch, and the operations it took."""
    sizes = {"height": 32, "width": 32, "max_sequence_length": 16}
    given = ModelConfig.model_validate({"id": model, "attention": attention, **sizes})
    backbone = Backbone.load(given)
    cond = backbone.encode(fakes.PROMPTS[:2])
    x = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Operations() as seen:
        found = backbone.velocity(x, 0.5, cond, guidance=2.0)
    return found, seen.names


@pytest.mark.parametrize("attention", ["native", "_native_math"])
def test_a_backend_is_used_and_changes_no_value(random_model: str, attention: str) -> None:
    expected, usual = velocity(random_model, None)
    found, names = velocity(random_model, attention)
    assert FLASH in usual
    assert (FLASH in names) == (attention == "native")
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_backend_of_one_model_is_not_that_of_the_next(
    random_model: str, tmp_path: Path
) -> None:
    """diffusers' switch also sets a global choice, which models without one of their own take."""
    families.pipeline("flux").save_pretrained(tmp_path / "flux")
    velocity(random_model, "_native_math")
    assert FLASH in velocity(str(tmp_path / "flux"), None)[1]
