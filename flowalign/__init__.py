"""flowalign: align flow-matching text-to-image models to several goals at once (Flow-OPD)."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowalign.commands.python import evaluate, score, train
    from flowalign.report.pictures import gallery

__all__ = ["__version__", "evaluate", "gallery", "load", "score", "train"]
__version__ = "0.1.0"
HUB = ("revision", "token", "cache_dir", "local_files_only")  # of `load`, for model_index.json


def load(model: str = "tiny", lora: str | Path | None = None, **kw: Any) -> Any:
    """A model's diffusers pipeline, with a LoRA if one is given.

    A prompt has as many tokens as in the LoRA's training, where its file tells (ours do) or the
    model is "tiny"; `max_sequence_length=` of a call is another number. diffusers' own depends on
    the pipeline, such as 256.

    model: "tiny" (ships with the package), a folder, or a hub id. lora: a folder that training
    wrote (`<output>/adapter`), tiny/NAME for a teacher that ships with the package, a LoRA of the
    transformer that diffusers or peft saved, or its Hub id (owner/name, owner/name@revision);
    alpha and rank are those of the file. Further arguments (dtype, revision, ...) go to the
    pipeline's `from_pretrained`, whose defaults hold: float32, on the CPU, where a model of the
    size of Stable Diffusion 3.5 Medium needs about 32 GB. On a GPU write
    `flowalign.load(model, dtype=torch.bfloat16).to("cuda")`.
    A call samples with diffusers' defaults, such as 28 steps and guidance 7; give those of the
    model's card or of the LoRA's run, as `flowalign sample` does. A LoRA that cannot be had or read
    raises HubError or AdapterError before the model is loaded, a pipeline of no known family
    ModelError.
    """
    from flowalign.backbone import put_lora
    from flowalign.backbone.adapters import AdapterError, read_lora
    from flowalign.backbone.loading import complete_pipeline, pipeline_class, text_length
    from flowalign.backbone.lora import other_base
    from flowalign.backbone.structure import read_family
    from flowalign.config import ModelConfig

    hub = {name: kw[name] for name in HUB if name in kw}

    family = partial(read_family, ModelConfig(id=model, revision=hub.get("revision")), **hub)
    adapter = read_lora(lora, newest=True, family=family) if lora else None
    if adapter and (reason := other_base(adapter, model, None)):
        raise AdapterError(f"{adapter.file} {reason}, and the model is {model!r}.")
    loader = pipeline_class(model, text_length(model, adapter), **hub)
    pipe = complete_pipeline(loader, model, **kw)
    if adapter:
        put_lora(pipe.transformer, "default_0", adapter)  # diffusers' name for a first one
    return pipe


def __getattr__(name: str) -> Any:
    """The other names of `__all__`, and the modules, imported when they are first asked for."""
    if name in __all__:
        room = "report.pictures" if name == "gallery" else "commands.python"
        return getattr(import_module(f"flowalign.{room}"), name)
    if not name.startswith("_") and find_spec(f"flowalign.{name}"):
        return import_module(f"flowalign.{name}")
    raise AttributeError(f"module 'flowalign' has no attribute {name!r}; it has {__all__}")
