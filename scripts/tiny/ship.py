"""Turn the files of a pretraining into the model that the package ships, and trained adapters into
its teachers.

    python scripts/tiny/ship.py FLOW VAE --earlier RIGHT --share 0.2 --history "..."
    python scripts/tiny/ship.py --teachers guided=RUN geneval=RUN ocr=RUN preference=RUN

Writes flowalign/backbone/tiny/model in fp16 with a card that says how it was made and what it
scores on held-out prompts (measured here, on the fp16 weights read back). With --earlier, the
weights move by --share towards those of an earlier checkpoint: a model soup (2203.05482); along
this line the scores go from often wrong to mostly right.

A teacher ships as tiny/NAME: its run's adapter is brought to the rank if it has a higher one (the
best approximation of its update, layer by layer), stored in fp16, and given a card.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import parts
import pretrain
import torch

from flowalign.backbone.adapters import read_lora, write_lora
from flowalign.backbone.tiny import MODEL, TEACHERS
from flowalign.config import EvalStage, load
from flowalign.config.safe_yaml import load_yaml
from flowalign.report.summary import evaluation_rows, kept_adapter
from flowalign.teachers.merge import merge

CONFIG = Path(__file__).parents[2] / "configs" / "tiny" / "eval.yaml"
CARD = """---
library_name: diffusers
license: apache-2.0
tags: [stable-diffusion-3, tiny, flowalign]
---

# The tiny SD3 of flowalign

A genuine `StableDiffusion3Pipeline` of {parameters:.1f}M parameters for 96x96 images of 24 of
GenEval's objects, each in three designers' styles, and of signs: an SD3 transformer with SD3.5's
qk_norm (6 blocks, width 160), an f8 16-channel autoencoder, two CLIP text encoders, a T5 encoder,
and a tokenizer that spells capitals letter by letter. It exists so that every command of flowalign
can be run and tested without a GPU or a download. It draws nothing else.

```python
import flowalign

flowalign.load("tiny")('a red sign that says "CAT"', num_inference_steps=10).images[0]
```

The drawings are Fluent Emoji (Microsoft, MIT) and Noto Emoji (Google, Apache-2.0): see
`LICENSES.md` one folder up.

## How it was made

By `python scripts/tiny/pretrain.py` ({history}): flow matching on scenes drawn by
`flowalign.backbone.tiny.scenes`, Muon on the 2-D weights of the blocks, AdamW elsewhere, EMA
weights. First every caption was right. Then many were wrong, as those of real pretraining data are
(`scripts/tiny/mistakes.py`): at random in one point, or by a bias that has half of the scenes of
its prompts. So the model can draw what a prompt says, and often draws something else. {soup}The
combinations and words of `flowalign/backbone/tiny/prompts/*_val` and `*_test` were in no caption.

## What it scores on held-out prompts

`python -m flowalign.eval --config configs/tiny/eval.yaml sampling.guidance=G` (mean ± standard
error over n images), for G = {guidance} (1 is no classifier-free guidance: as the tiny configs
train and evaluate):

{table}"""
SOUP = "Of its weights, {share:g} are those at the end of the right captions. "
TEACHER_CARD = """---
library_name: diffusers
license: apache-2.0
base_model: tiny
tags: [lora, tiny, flowalign]
---

# tiny/{name}

{what}

    flowalign train --config configs/tiny/{config}.yaml seed={seed}

Its run had rank {old}. It is stored in fp16 with rank {rank} (relative error of a layer's update:
at most {worst:.2f}).{scores}
"""
GUIDED = """A LoRA on flowalign's tiny model that has absorbed its classifier-free guidance. It was
trained by Flow-OPD with the base at CFG scale 2 as the only teacher:"""
TEACHER = """A teacher of flowalign's tiny model: a LoRA trained by DiffusionNFT on one reward. It
started from {start}:"""


def main() -> None:
    """Ship the model, or the teachers named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("flow", type=Path, nargs="?")
    parser.add_argument("vae", type=Path, nargs="?")
    parser.add_argument("--earlier", type=Path, help="an earlier checkpoint, to average with")
    parser.add_argument("--share", type=float, default=0.2, help="of the earlier weights")
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--history", help="samples seen, for the card; without it, no card")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1, 2, 3], help="of the card")
    parser.add_argument("--teachers", nargs="+", metavar="NAME=RUN", help="folders of training")
    parser.add_argument("--rank", type=int, default=32, help="of the teachers")
    args = parser.parse_args()
    if args.teachers:
        for text in args.teachers:
            name, _, run = text.partition("=")
            print(ship_teacher(name, Path(run), args.rank))
    elif args.vae:
        ship_model(args)
    else:
        parser.error("give FLOW and VAE, or --teachers")


def ship_model(args: argparse.Namespace) -> None:
    """Write the model's folder, read it back, score it, write the card."""
    parts.quiet()
    weights = pretrain.read(args.flow)
    if args.earlier:
        earlier = pretrain.read(args.earlier)
        weights = {k: w.lerp(earlier[k], args.share) for k, w in weights.items()}
    pipe = pretrain.pipeline(weights, args.vae)
    modules = [c for c in pipe.components.values() if isinstance(c, torch.nn.Module)]
    parameters = sum(p.numel() for part in modules for p in part.parameters())
    pipe.to(dtype=torch.float16).save_pretrained(args.out)
    tidy(args.out)
    if args.history:
        card = CARD.format(
            parameters=parameters / 1e6,
            history=args.history,
            soup=SOUP.format(share=args.share) if args.earlier else "",
            guidance=", ".join(f"{scale:g}" for scale in args.guidance),
            table=scores(args.out, args.guidance),
        )
        (args.out / "README.md").write_text(card)


def tidy(folder: Path) -> None:
    """The configs without the paths of this machine, and text encoders that load in float32:
    transformers loads in the dtype that a config names, diffusers in float32, and parts of
    different dtypes do not fit together."""
    for path in (folder / "model_index.json", *folder.glob("*/config.json")):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        if path.parent.name.startswith("text_encoder"):
            config["dtype"] = "float32"
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def scores(model: Path, scales: Sequence[float]) -> str:
    """The tables that `flowalign eval` writes of a pipeline folder, on the tiny test prompts."""
    from flowalign.eval.evaluation import evaluate

    tables = []
    for guidance in scales:
        with tempfile.TemporaryDirectory() as folder:
            overrides = [f"output={folder}", f"model.id={model}", f"sampling.guidance={guidance}"]
            evaluate(load(CONFIG, overrides, stage=EvalStage))
            tables.append((Path(folder) / "table.md").read_text().replace(str(model), "tiny"))
    return "\n".join(tables)


def ship_teacher(name: str, run: Path, rank: int) -> Path:
    """Write one teacher's folder."""
    folder = TEACHERS / name
    shutil.rmtree(folder, ignore_errors=True)
    lora = read_lora(run / "adapter")
    worst = 0.0
    old = max(lora.ranks.values())
    if old > rank:
        worst = merge([run / "adapter"], folder, method="svd", rank=rank).worst
        lora = read_lora(folder)
    # else its factors stay those of the run: from singular vectors a run learns more slowly
    halves = {key: value.half() for key, value in lora.weights.items()}
    metadata = {**lora.metadata, "base_model_name_or_path": "tiny"}
    write_lora(folder, halves, metadata, text_length=lora.text_length)
    config = load_yaml((run / "config.yaml").read_text())
    held_out = [row["eval/headline"] for row in evaluation_rows(run)]
    chosen = kept_adapter(run)
    score = chosen.row["eval/headline"] if chosen else float("nan")
    start = config.get("lora", {}).get("init") or "the base"
    said = f" Held-out score: {score:.3f}, of {start} {held_out[0]:.3f}." if held_out else ""
    card = TEACHER_CARD.format(
        name=name,
        what=TEACHER.format(start=start) if held_out else GUIDED,
        config=f"teacher_{name}_nft" if held_out else name,
        seed=config["seed"],
        old=old,
        rank=min(rank, old),
        worst=worst,
        scores=said,
    )
    (folder / "README.md").write_text(card)
    return folder


if __name__ == "__main__":
    main()
