"""`flowalign fetch` downloads to this machine what a config reads from elsewhere.

Models, adapters and judges go into the Hub's own cache; prompt sets are written by `flowalign
data`. The code that loads a file says what is to be downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from flowalign.backbone import adapters, loading
from flowalign.commands import recipe
from flowalign.commands.doctor.count import judges
from flowalign.commands.prompts import fetch as data
from flowalign.config import ConfigError, Stage, load
from flowalign.report.progress import quiet
from flowalign.system.exit import refusing
from flowalign.system.hub_files import HubError, HubFiles, Unreachable


@refusing("fetch")
def main(args: argparse.Namespace) -> int:
    """Exit status: 0 all is here, 1 something is missing or not known, 2 refused."""
    quiet()
    config = load(args.config, args.overrides, stage=Stage, variant=args.variant)
    stages, problems = recipe.read_stages(config, Path(args.config).parent)
    if problems:
        raise ConfigError(problems)
    lacking = list(_files(stages.values(), args.check))
    for name, commands in data.missing_sets(stages.values()).items():
        # an earlier one may have written it, too; they write below data/
        if commands and not (args.check or Path(name).exists()) and name.startswith("data/"):
            names = commands[0].split()[-1:]
            data.main(argparse.Namespace(names=names, out="data", force=False))
    sets = data.missing_sets(stages.values()).items()
    lacking += [f"missing: {n} ({' or '.join(commands) or 'yours'})" for n, commands in sets]
    for text in lacking:
        print(text)
    return 1 if lacking else 0


def needed(stages: Iterable[Stage]) -> dict[HubFiles, str]:
    """{files that the stages read from the Hub: the source of an adapter, or ""}. Code that a
    config names is not run. Prints which judges download from elsewhere."""
    needs = dict[HubFiles, str]()
    for stage in stages:
        for model in (*([stage.model] if stage.samples else []), *stage.bases.values()):
            needs |= dict.fromkeys(loading.hub_files(model.id, model.revision), "")
        sources = filter(adapters.is_hub_id, stage.inputs.values())
        needs |= {adapters.adapter_files(source): source for source in sources}
        for judge in judges(stage):
            files = judge.hub_files
            needs |= dict.fromkeys(files, "")
            if not files and judge.downloads is None:
                print(f"not looked at: what reward {judge.name} downloads by itself")
    return needs


def _files(stages: Iterable[Stage], check: bool) -> Iterator[str]:
    """Download what the cache lacks, or only print it (`check`). Yields what the Hub refuses."""
    lacking = dict[HubFiles, str]()
    for files, source in needed(stages).items():
        try:
            sizes = files.missing()
        except HubError as error:
            yield f"{'not known' if isinstance(error, Unreachable) else 'missing'}: {error}"
            continue
        text = f"{files.repository}: {len(sizes)} files, {sum(sizes.values()) / 1e9:.3g} GB"
        if sizes and check:
            yield f"missing: {text}"
        else:
            print(f"to download: {text}" if sizes else f"here: {files.repository}", flush=True)
            lacking |= {files: source} if sizes else {}
    for files, source in lacking.items():
        try:  # an adapter's own way refuses what is none
            adapters.adapter_folder(source, newest=True) if source else files.download()
        except (OSError, ValueError) as error:  # a gated model, say: the others still come
            yield f"missing: {files.repository}: {error}"
