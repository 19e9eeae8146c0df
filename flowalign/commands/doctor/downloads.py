"""What a run downloads, and the CPU memory that it takes: said before anything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from flowalign import rewards
from flowalign.backbone.structure import local_folder
from flowalign.commands.doctor.estimate import Estimate
from flowalign.commands.doctor.findings import Finding, note, ok
from flowalign.config import Stage

GB = 1e9


def needs(stages: Mapping[str, Stage], estimates: Iterable[Estimate]) -> Iterator[Finding]:
    """Findings about downloads and host memory of all stages together.

    Adapters are not among them: the checks before this have read them. For rewards a cache is not
    looked at, since their libraries have caches of their own.
    """
    known: dict[str, float] = {}  # GB
    unknown: dict[str, None] = {}
    largest = max(estimates, key=lambda e: e.host, default=None)
    for stage in stages.values():
        if local_folder(stage.model.id, stage.model.revision) is None:
            if largest:
                known[stage.model.id] = largest.download / GB
            else:
                unknown[stage.model.id] = None
        for reward in (r for judged in stage.judged for r in judged.rewards.values()):
            for name, options in rewards.leaves(reward.name, reward.options, imports=False):
                files = rewards.declared(name, imports=False).files(**options)
                if files is None:
                    unknown[f"reward {name}"] = None
                known |= files or {}
    listed = [f"{name} ({size:.2g} GB)" for name, size in known.items()]
    if known:
        yield note(f"downloads: about {sum(known.values()):.3g} GB unless they are cached: "
                   f"{', '.join(listed)}")  # fmt: skip
    if unknown:
        yield note(f"downloads of unknown size: {', '.join(unknown)}")
    if not known and not unknown:
        yield ok("downloads: none")
    if largest:
        text = f"host memory: {largest.host / 2**30:.3g} GiB a process while the model loads"
        waits = any(stage.model.offload_text_encoders for stage in stages.values())
        yield ok(text + (", of which the text encoders stay there" if waits else ""))
