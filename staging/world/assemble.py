"""Put the parts of a pretraining together: `python assemble.py FLOW VAE OUT`.

Writes a diffusers folder (StableDiffusion3Pipeline) in fp16. With --earlier, its weights move by
--share towards those of an earlier checkpoint: a model soup (2203.05482); along this line the
scores go from often wrong to mostly right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import parts
import pretrain
import torch
from diffusers import StableDiffusion3Pipeline


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("flow", "vae", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--share", type=float, default=0.2, help="of the earlier weights")
    args = parser.parse_args()
    parts.quiet()
    weights = pretrain.read(args.flow)
    if args.earlier:
        earlier = pretrain.read(args.earlier)
        weights = {k: w.lerp(earlier[k], args.share) for k, w in weights.items()}
    model = pretrain.Denoiser()
    model.load_state_dict(weights)
    spell = parts.tokenizer()
    components: dict[str, Any] = {
        "transformer": model.transformer,
        "scheduler": parts.scheduler(),
        "vae": pretrain.load_vae(args.vae),
        "text_encoder": model.clips[0],
        "tokenizer": spell,
        "text_encoder_2": model.clips[1],
        "tokenizer_2": spell,
        "text_encoder_3": model.t5,
        "tokenizer_3": parts.tokenizer(max_length=256),
    }
    pipe = StableDiffusion3Pipeline(**components)
    pipe.to(dtype=torch.float16).save_pretrained(args.out)
    for path in (args.out / "model_index.json", *args.out.glob("*/config.json")):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        if path.parent.name.startswith("text_encoder"):
            config["dtype"] = "float32"  # diffusers loads the other parts in float32
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
