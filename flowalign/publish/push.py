"""Upload what training or a merge left to the Hugging Face Hub: `flowalign push FOLDER --repo ID`.

What goes up is the adapter under the name it has, its card as README.md, the run's config, the plot
of its metrics, the pictures of its samples, and nothing else; --dry-run lists it. Everything is
looked through before the Hub is asked for anything.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.adapters.files import PEFT_CONFIG, adapter_file, read_lora
from flowalign.adapters.hub import HubAddress, HubError, explained

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

# beside the adapter and its card; the newest of samples/ comes as samples.png
PICTURES = ("metrics.png", "before_after.png")
OTHERS = ("config.yaml", "report.md")
SECRET = re.compile(
    r"\bhf_\w{20,}|\bsk-[\w-]{20,}|://[^/\s:@]+:[^/\s@]+@"
    r"|(?i:\b\w*(?:api_key|apikey|token|password|secret)['\"]?\s*[:=]\s*(?!null\b|['\"]{2})\S+)"
)


class PushError(ValueError):
    """A folder that is not fit to be pushed: what was seen, what to do."""


@dataclass(frozen=True)
class Upload:
    """What would go up: {name in the repository: a file here, or its content}, and the remarks of
    whoever looked it through."""

    files: Mapping[str, Path | bytes]
    remarks: Sequence[str] = ()

    def __str__(self) -> str:
        sizes = {
            name: len(what) if isinstance(what, bytes) else what.stat().st_size
            for name, what in self.files.items()
        }
        return "\n".join(f"{size:>12,}  {name}" for name, size in sizes.items())


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 2 refused."""
    args = parser().parse_args(argv)
    try:
        found = gather(args.folder, args.repo, results=args.results, force=args.force)
        for remark in found.remarks:
            print(f"note: {remark}", file=sys.stderr)
        print(found)
        if args.dry_run:
            print(f"would go to {args.repo}, revision {args.revision or 'main'}; nothing was sent")
            return 0
        private = args.private or None  # None: what the owner's settings say
        url = upload(found, args.repo, private=private, revision=args.revision)
    except (ValueError, OSError) as error:
        print(f"flowalign push: {error}", file=sys.stderr)
        return 2
    print(url)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of `push`."""
    found = argparse.ArgumentParser("flowalign push", description="Upload a trained adapter.")
    found.add_argument("folder", type=Path, help="of a run, or its adapter folder")
    found.add_argument(
        "--repo", required=True, help="owner/name on the Hub; made if it is not there"
    )
    found.add_argument("--private", action="store_true", help="for a repository that is made")
    found.add_argument("--revision", help="a branch, made if it is not there; default: main")
    found.add_argument(
        "--results", type=Path, help="a results.json of `flowalign eval`: its scores"
    )
    found.add_argument("--dry-run", action="store_true", help="list what would go up, send nothing")
    found.add_argument("--force", action="store_true", help="push a card without scores, too")
    return found


def gather(folder: Path, repo: str, *, results: Path | None = None, force: bool = False) -> Upload:
    """What of a run's folder (or its adapter folder) would go up to a repository.

    results: whose scores of this adapter take the place of those in the card. force: take a card
    without scores. Raises PushError, AdapterError for a folder without a LoRA, and NoScores for
    results of others.
    """
    if HubAddress.parse(repo) != HubAddress(repo):
        raise PushError(f"--repo {repo!r} is no name on the Hub; want owner/name.")
    run, adapter = _folders(folder)
    weights = read_lora(adapter).file
    files: dict[str, Path | bytes] = {weights.name: weights}
    beside = adapter / PEFT_CONFIG
    files |= {PEFT_CONFIG: beside} if beside.is_file() else {}
    files |= {name: run / name for name in (*OTHERS, *PICTURES) if (run / name).is_file()}
    if samples := sorted((run / "samples").glob("*.png")):
        files["samples.png"] = samples[-1]
    card = _card(run, adapter)
    if results is not None:
        files["eval.yaml"] = _scored(card, results, adapter).encode()
    if not card.data.get("eval_results") and not force:
        raise PushError(
            f"the card of {adapter} holds no scores: nobody can tell what it is worth. "
            "Evaluate it (flowalign eval) and give --results .../results.json, or push it with "
            "--force."
        )
    files["README.md"] = _addressed(card, run, adapter, repo, files).encode()
    _check_secrets(files)
    return Upload(files, _remarks(card))


def upload(
    found: Upload, repo: str, *, private: bool | None = None, revision: str | None = None
) -> str:
    """Send it in one commit; returns its address. Raises HubError, and ValueError for a card
    whose head the Hub does not take. private: also of a repository that is there already."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    operations = [CommitOperationAdd(name, what) for name, what in found.files.items()]
    with explained(f"cannot push to {repo}", repo):
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise HubError(
                f"{repo} is there already, and everyone can see it. Push without --private, or to "
                "another repository."
            )
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        message = "Upload an adapter with flowalign push"
        done = api.create_commit(repo, operations, commit_message=message, revision=revision)
    return str(done.commit_url)


# The folder --------------------------------------------------------------------------------------


def _folders(folder: Path) -> tuple[Path, Path]:
    """The run's folder and its adapter's; either may be given."""
    if (folder / "adapter").is_dir():
        return folder, folder / "adapter"
    adapter_file(folder)  # AdapterError
    return folder.resolve().parent if folder.resolve().name == "adapter" else folder, folder


def _card(run: Path, adapter: Path) -> ModelCard:
    """The card that lies there (perhaps edited), or the one that training would write now."""
    from huggingface_hub import ModelCard

    from flowalign.config import MergeStage, Stage, TrainingStage, load
    from flowalign.publish.card import card

    path = adapter / "README.md"
    if path.is_file():
        return ModelCard.load(path)
    saved = run / "config.yaml"
    config = load(saved, stage=Stage) if saved.is_file() else None
    if not isinstance(config, TrainingStage | MergeStage):
        raise PushError(
            f"{adapter} has no README.md, and {run} no config.yaml of a training or merge that one "
            "could be written from. Give the folder of a run, or write a card."
        )
    return card(run, config)


def _scored(card: ModelCard, results: Path, adapter: Path) -> str:
    """Put scores into the card; returns the config of their evaluation."""
    from flowalign.eval.compare import load
    from flowalign.publish.card import add_results

    return add_results(card, load(results), results, adapter)


def _addressed(
    card: ModelCard, run: Path, adapter: Path, repo: str, files: Mapping[str, object]
) -> str:
    """The card as it stands on the Hub: loaded from there, and with its pictures."""
    from flowalign.config import Stage, load

    text, places = card.text, {str(adapter), str(run / "adapter")}
    if (run / "config.yaml").is_file():
        places.add(str(Path(load(run / "config.yaml", stage=Stage).output) / "adapter"))
    for place in places:
        text = text.replace(f'"{place}"', f'"{repo}"')
    shown = [name for name in (*PICTURES, "samples.png") if name in files]
    missing = [f"![{name}]({name})" for name in shown if f"]({name})" not in text]
    card.text = "\n\n".join([text.rstrip(), *missing]) + "\n"
    return str(card)


def _check_secrets(files: Mapping[str, Path | bytes]) -> None:
    """PushError for a text with what looks like a token or password."""
    for name, what in files.items():
        if not name.endswith((".md", ".yaml", ".json")):
            continue
        text = (what if isinstance(what, bytes) else what.read_bytes()).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            if SECRET.search(line):
                raise PushError(
                    f"{name}, line {number}, looks like it holds a token or a password, and "
                    "everyone could read it. Take it out of the folder's file (rewards read theirs "
                    "from the environment)."
                )


def _remarks(card: ModelCard) -> list[str]:
    found = []
    if not card.data.get("base_model") and card.data.get("license") != "apache-2.0":
        found.append("the card names no base_model: it is not a Hub id, so others cannot load it.")
    if not card.data.get("license"):
        found.append("the base's licence is not known; add `license:` to the card's head.")
    return found
