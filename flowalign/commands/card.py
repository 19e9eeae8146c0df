"""The model card of an adapter: base and licence, how to load it, scores, config.

The text is card.md.j2, the YAML above it huggingface_hub's ModelCardData.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from flowalign import __version__
from flowalign.backbone.adapters import is_hub_id, read_lora, span
from flowalign.config import Stage, TrainingStage, to_yaml
from flowalign.config.learning import ADVANTAGES
from flowalign.report import summary
from flowalign.rewards import RewardSpec
from flowalign.system.escape import block, code, escaped
from flowalign.system.folder import RunFolder
from flowalign.system.table import Table
from flowalign.training import metrics

# The models under Stability's community licence.
STABILITY_MODELS = [f"stable-diffusion-{size}" for size in ("3.5-medium", "3.5-large", "3-medium")]
# Lines with tokens of the Hub and of OpenAI, passwords in URLs, and keys that are named so and have
# a value.
SECRET = re.compile(
    r"(?m)^.*(?:\bhf_\w{20,}|\bsk-[\w-]{20,}|://[^/\s:@]+:[^/\s@]+@"
    r"|(?i:\b\w*(?:api_key|apikey|token|password|secret)['\"]?\s*[:=]\s*"
    r"(?!null\b|(?:''|\"\")(?![\w'\"]))\S+)).*"
)

log = logging.getLogger("flowalign")


def write_card(folder: Path, config: Stage) -> None:
    """Write folder/adapter/README.md for the run in a folder: its adapter, and the scores of its
    log; a merge has none."""
    base = config.model.id
    adapter = read_lora(RunFolder(folder).adapter)
    title, scores = "Scores", "(none: a merge takes none)"
    if isinstance(config, TrainingStage):
        title = "Scores on held-out prompts while training"
        rows, chosen = summary.evaluation_rows(folder), summary.kept_adapter(folder)
        scores = f"(none were taken{' of this adapter' if rows else ''})"
        scores = score_table(rows, chosen.row) if chosen else scores
    fields: dict[str, Any] = licence(base)
    if is_hub_id(base):  # the Hub would link a folder's name to somebody else's model
        fields |= {"base_model": base, "base_model_relation": "adapter"}
    page = ModelCard.from_template(
        ModelCardData(
            **fields,
            library_name="diffusers",
            pipeline_tag="text-to-image",
            tags=["lora", "text-to-image", "flow-matching", "flowalign"],
            model_name=folder.name,
        ),
        template_path=str(Path(__file__).with_name("card.md.j2")),
        name=escaped(folder.name),
        version=__version__,
        base=base,
        base_code=code(base),
        base_text=json.dumps(base, ensure_ascii=False),
        stage=config.stage,
        program=config.command,
        tasks=", ".join(escaped(task.name) for task in getattr(config, "tasks", ())),
        source_text=json.dumps(str(RunFolder(folder).adapter), ensure_ascii=False),
        lora=adapter,
        rank=span(adapter.ranks),
        scale=span(adapter.scales),
        scores_title=title,
        scores=scores,
        origins=origins(folder, config),
        overruled=config.inputs.get("lora.init"),
        config=block(to_yaml(config), "yaml"),
    )
    # everyone may read it one day
    page.text, count = SECRET.subn("(left out: something like a token or a password)", page.text)
    if count:
        text = "the model card leaves out what looks like a token or a password"
        log.warning("%s: %s. Rewards can read theirs from the environment.", folder, text)
    page.save(RunFolder(folder).card)


def score_table(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> str:
    """First evaluation of a run, the one that chose its adapter, and the last, as Markdown."""
    columns = (rows[0], chosen, rows[-1])
    names = [name for name in rows[0] if name.startswith(metrics.EVAL)]
    if names == [metrics.HEADLINE]:  # without rewards it is minus these distances
        names = [name for name in rows[0] if name.startswith(metrics.FIXED_PATH)]
    heads = ["metric", "first", "this adapter", "last"]
    lines = [["update", *(str(row[metrics.UPDATE]) for row in columns)]]
    for name in names:
        cells = [f"{row.get(name, math.nan):.3f}" for row in columns]
        lines.append([name.removeprefix(metrics.EVAL), *cells])
    note = "This adapter was chosen by its headline on these very prompts."
    return f"{Table(heads, lines).markdown()}\n\n{note}"


def licence(base: str) -> dict[str, str]:
    """The licence fields of the base, which hold for its adapters, too; {} if the licence is not
    known."""
    if base == "tiny":
        return {"license": "apache-2.0"}
    owner, _, name = base.partition("/")
    if owner != "stabilityai" or name.removesuffix("-diffusers") not in STABILITY_MODELS:
        return {}
    return {
        "license": "other",
        "license_name": "stabilityai-ai-community",
        "license_link": f"https://huggingface.co/{base}/blob/main/LICENSE.md",
    }


def origins(folder: Path, config: Any) -> str:
    """The base, adapters and rewards of a run as a Markdown list, with their licences if known."""
    terms = licence(config.model.id)
    licensed = terms.get("license_link") or terms.get("license") or "see there"
    lines = [f"base {code(config.model.id)}; its licence holds for this adapter, too: {licensed}"]
    bases = config.bases.items()
    lines += [f"{escaped(key)}: base {code(base.id)}; see its licence" for key, base in bases]
    lines += [f"{escaped(key)}: {code(source)}" for key, source in config.inputs.items()]
    if config.trains:
        lines += [
            f"{escaped(key)}: extrapolated from the {teacher.reference} by {teacher.extrapolate:g}"
            for key, teacher in config.extrapolated.items()
        ]
    if config.trains and (config.learns_from_rewards or config.evaluation):
        use = "reward" if config.learns_from_rewards else "scored, but not trained, by the reward"
        judges = {task.name: task.reward for task in config.tasks if task.reward}
        lines += [
            f"{escaped(name)}: {use} {reward_line(reward.name, reward.options)}"
            for name, reward in judges.items()
        ]
    if config.credited and config.credited.advantage not in ADVANTAGES:
        lines.append(f"advantages by {code(config.credited.advantage)}")
    if (report := RunFolder(folder).merge).is_file():
        first = report.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"merged as: {escaped(first)}")
    return "\n".join(f"- {line}" for line in lines)


def reward_line(name: str, options: Mapping[str, Any]) -> str:
    """A reward with these options as Markdown, and the licences of what it uses, if known."""
    descriptions = []
    spec = RewardSpec(name, options, trusted=False)
    parts = list(spec.parts())
    for part in parts:
        reward = part.reward_class
        notes = [reward.licence]
        chosen = reward.chosen(**part.options)
        if isinstance(chosen, str):
            terms = reward.choices.get(chosen)
            notes.append(f"{reward.choice[0]} {code(chosen)}" + (f": {terms}" if terms else ""))
        known = "; ".join(filter(None, notes))
        descriptions.append(code(part.name) + (f" ({known})" if known else ""))
    return descriptions[0] if parts == [spec] else f"{code(name)} of {', '.join(descriptions)}"
