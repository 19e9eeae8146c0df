"""Pipelines without weights: the config of every part, of a folder or of a public model.

published/NAME.json holds the config files of a public model, each with its source. A digest is the
SHA-256 of the published file, from a public list of digests: the config is that file, byte for
byte. "as NAME" is the config of another model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Architecture:
    """A pipeline without weights. pipeline: its class in diffusers. parts {name: config}, as
    diffusers and transformers write them, each with the name of its class as `_class_name`.
    options: other arguments of the pipeline."""

    pipeline: str
    parts: Mapping[str, Config]
    options: Config = field(default_factory=dict)

    @classmethod
    def of(cls, read: Callable[[str], Config | None]) -> Architecture:
        """The architecture that config files describe. read: path in the pipeline -> content of the
        file, None if it is missing. Raises LookupError if the transformer's or the autoencoder's
        is."""
        index = read("model_index.json") or {}
        options = {name: value for name, value in index.items() if not isinstance(value, list)}
        parts: dict[str, Config] = {}
        for name in (name for name in index if name not in options and "tokenizer" not in name):
            file = "scheduler_config.json" if name == "scheduler" else "config.json"
            if index[name][-1] and (config := read(f"{name}/{file}")) is not None:
                parts[name] = {**config, "_class_name": index[name][-1]}
        if missing := [name for name in ("transformer", "vae") if name not in parts]:
            raise LookupError(f"{missing[0]}/config.json is missing.")
        return cls(index["_class_name"], parts, options)


@functools.cache
def public() -> dict[str, Architecture]:
    """{Hub id: architecture} of the models that are built in."""
    listed = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}

    def read(name: str, path: str) -> Config | None:
        content = listed[name]["files"].get(path)
        return read(content.removeprefix("as "), path) if isinstance(content, str) else content

    return {
        about["model"]: Architecture.of(functools.partial(read, name))
        for name, about in listed.items()
    }
