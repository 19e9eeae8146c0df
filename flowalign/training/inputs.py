"""The files that a stage reads: prompt sets and adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from flowalign.backbone.adapters import Lora, read_lora
from flowalign.backbone.structure import read_family
from flowalign.config import ModelConfig
from flowalign.training.data import load_prompts
from flowalign.types import PromptBatch


@dataclass(frozen=True)
class Inputs:
    """The files of a stage. Each is read once, on first use."""

    model: ModelConfig | None = None  # whose adapters they are
    adapters: dict[str, Lora] = field(default_factory=dict)  # by source: a folder or a Hub id
    prompt_sets: dict[tuple[str, str], PromptBatch] = field(default_factory=dict)
    # adapters that an earlier stage will write, by folder, on the meta device: for predictions
    pending: dict[str, Lora] = field(default_factory=dict)

    def adapter(self, source: str) -> Lora:
        """The adapter of a source (the Hub's newest version). Raises AdapterError and HubError."""
        if source not in self.adapters:
            family = partial(read_family, self.model) if self.model else None
            self.adapters[source] = read_lora(source, newest=True, family=family)
        return self.adapters[source]

    def prompts(self, source: str, task: str) -> PromptBatch:
        """The prompts of a source, for a task. Raises PromptError and OSError."""
        if (source, task) not in self.prompt_sets:
            self.prompt_sets[source, task] = load_prompts(source, task)
        return self.prompt_sets[source, task]
