"""The model card of a trained adapter: config, scores, command."""

from __future__ import annotations

import json
from pathlib import Path

from flowalign.config import Config, to_yaml

TEMPLATE = """---
library_name: diffusers
base_model: {base}
tags: [lora, text-to-image, flow-matching, flowalign]
---

# {name}

A LoRA for `{base}`, trained by flowalign with `{stage}` on {tasks}.

```python
import flowalign
pipe = flowalign.load("{base}", lora="{folder}")
```

or, in plain diffusers, `pipe.load_lora_weights("{folder}")`.

## Scores on held-out prompts while training

{scores}

## How it was made

    {command}

```yaml
{config}```
"""


def write_card(folder: Path, config: Config, command: str) -> None:
    """folder/adapter/README.md, from the log of the run."""
    card = TEMPLATE.format(
        base=config.model.id,
        name=folder.name,
        stage=config.stage,
        tasks=", ".join(
            f"{t.name} (reward `{t.reward.name}`)" if t.reward else t.name for t in config.tasks
        ),
        folder=folder / "adapter",
        scores=score_table(folder),
        command=command,
        config=to_yaml(config),
    )
    (folder / "adapter" / "README.md").write_text(card)


def score_table(folder: Path) -> str:
    """First, best and last evaluation of a run as Markdown."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in lines if "eval/headline" in row]
    if not rows:
        return "(none were taken: `evaluation` was off)"
    best = max(rows, key=lambda row: row["eval/headline"])
    names = [name for name in rows[0] if name.startswith("eval/")]
    table = ["| metric | base | this adapter (best) | last |", "|---|---|---|---|"]
    for name in names:
        cells = [f"{row.get(name, float('nan')):.3f}" for row in (rows[0], best, rows[-1])]
        table.append(f"| {name[5:]} | " + " | ".join(cells) + " |")
    note = f"Taken at updates {rows[0]['update']}, {best['update']} and {rows[-1]['update']}."
    return "\n".join([*table, "", note])
