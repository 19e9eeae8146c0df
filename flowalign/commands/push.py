"""Upload what training or a merge left to the Hugging Face Hub: `flowalign push FOLDER --repo ID`.

These files go up, and no others: the adapter under the name it has, a manifest of it, its card as
README.md, the run's config, the plot of its metrics, the pictures of its samples. --dry-run lists
them. They are all checked before the Hub is asked for anything.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard

from flowalign.backbone.adapters import PEFT_CONFIG, HubError, hub_errors, read_lora
from flowalign.commands.card import CONFIG, REPORT, add_results, card
from flowalign.config import Stage, load
from flowalign.eval.compare import load_results
from flowalign.system import manifest
from flowalign.system.exit import refusing
from flowalign.system.hub_address import HubAddress

# Beside the adapter and its card. The newest picture of samples/ goes up as samples.png.
PICTURES = ("metrics.png", "before_after.png")
OTHERS = (CONFIG, REPORT)
# Tokens of the Hub and of OpenAI, passwords in URLs, and keys that are named so and have a value.
SECRET = re.compile(
    r"\bhf_\w{20,}|\bsk-[\w-]{20,}|://[^/\s:@]+:[^/\s@]+@"
    r"|(?i:\b\w*(?:api_key|apikey|token|password|secret)['\"]?\s*[:=]\s*(?!null\b|['\"]{2})\S+)"
)


class PushError(ValueError):
    """A folder that is not fit to be pushed: what was seen, what to do."""


@dataclass(frozen=True)
class Upload:
    """What goes up: {name in the repository: a file here, or its content}, and remarks on it."""

    files: Mapping[str, Path | bytes]
    remarks: Sequence[str] = ()

    def __str__(self) -> str:
        sizes = {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }
        return "\n".join(f"{size:>12,}  {name}" for name, size in sizes.items())


@refusing("push")
def main(argv: Sequence[str]) -> int:
    """The command `flowalign push`. Exit status: 0 done, 2 refused."""
    parser = argparse.ArgumentParser("flowalign push", description="Upload a trained adapter.")
    add = parser.add_argument
    add("folder", type=Path, help="of a run, or its adapter folder")
    add("--repo", required=True, help="owner/name on the Hub; made if it is not there")
    add("--private", action="store_true", help="for a repository that is made")
    add("--revision", help="a branch, made if it is not there; default: main")
    add("--results", type=Path, help="a results.json of `flowalign eval`: its scores")
    add("--dry-run", action="store_true", help="list what would go up, send nothing")
    add("--force", action="store_true", help="push a card without scores, too")
    args = parser.parse_args(argv)
    upload = gather(args.folder, args.repo, results=args.results, force=args.force)
    for remark in upload.remarks:
        print(f"note: {remark}", file=sys.stderr)
    print(upload)
    if args.dry_run:
        print(f"would go to {args.repo}, revision {args.revision or 'main'}; nothing was sent")
        return 0
    private = args.private or None  # None: what the owner's settings say
    print(send(upload, args.repo, private=private, revision=args.revision))
    return 0


def gather(folder: Path, repo: str, *, results: Path | None = None, force: bool = False) -> Upload:
    """What of a run's folder (or of its adapter folder) goes up to a repository.

    results: a results.json whose scores of this adapter replace those in the card. force: take a
    card without scores. Raises PushError, AdapterError (no LoRA) and NoScores (results of others).
    """
    if HubAddress.parse(repo) != HubAddress(repo):
        raise PushError(f"--repo {repo!r} is no name on the Hub; want owner/name.")
    adapter = folder / "adapter" if (folder / "adapter").is_dir() else folder
    weights = read_lora(adapter).file
    is_adapter = adapter is folder and folder.resolve().name == "adapter"
    run = folder.resolve().parent if is_adapter else folder
    files: dict[str, Path | bytes] = {weights.name: weights}
    # peft's adapter_config.json lies next to its weights, which cannot be read without it
    paths = [adapter / PEFT_CONFIG, *(run / name for name in (*OTHERS, *PICTURES))]
    files |= {path.name: path for path in paths if path.is_file()}
    listed = {path.name: (path.stat().st_size, manifest.file_sha256(path))
              for path in (weights, paths[0]) if path.is_file()}  # fmt: skip
    # the folder's manifest may name files that stay here
    files[manifest.MANIFEST] = manifest.manifest_text(listed, {}).encode()
    if samples := sorted((run / "samples").glob("*.png")):
        files["samples.png"] = samples[-1]
    config = load(run / CONFIG, stage=Stage) if (run / CONFIG).is_file() else None
    page = _card(run, adapter, config)
    if results is not None:
        files["eval.yaml"] = add_results(page, load_results(results), results, adapter).encode()
    if not page.data.get("eval_results") and not force:
        raise PushError(
            f"the card of {adapter} holds no scores. Evaluate it (flowalign eval) and give "
            "--results .../results.json, or push it with --force."
        )
    folders = [adapter, run / "adapter"]
    folders += [Path(config.output) / "adapter"] if config else []  # the run's, before it was moved
    _address(page, map(str, folders), repo, files)
    files["README.md"] = str(page).encode()
    _check_secrets(files)
    remarks = []
    if not page.data.get("base_model") and page.data.get("license") != "apache-2.0":
        remarks.append("the card names no base_model: it is no Hub id, so others cannot load it.")
    if not page.data.get("license"):
        remarks.append("the base's licence is not known; add `license:` to the card's head.")
    return Upload(files, remarks)


def send(
    upload: Upload, repo: str, *, private: bool | None = None, revision: str | None = None
) -> str:
    """Upload in one commit; returns the commit's URL.

    private: the repository must not be public, whether it is made or there already. Raises
    HubError, and ValueError for a card whose head the Hub does not take.
    """
    api = HfApi()
    operations = [CommitOperationAdd(name, content) for name, content in upload.files.items()]
    with hub_errors(f"cannot push to {repo}"):
        api.create_repo(repo, private=private, exist_ok=True)
        # create_repo leaves a repository that exists as visible as it is
        if private and not api.model_info(repo).private:
            raise HubError(
                f"{repo} is there already, and everyone can see it. Push without --private, or to "
                "another repository."
            )
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        message = "Upload an adapter with flowalign push"
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)


def _card(run: Path, adapter: Path, config: Stage | None) -> ModelCard:
    """The card that lies there (perhaps edited), or the one that training would write now."""
    path = adapter / "README.md"
    if path.is_file():
        return ModelCard.load(path)
    if config is None or not config.makes_adapter:
        raise PushError(
            f"{adapter} has no README.md, and {run} no {CONFIG} of a training or merge that one "
            "could be written from. Give the folder of a run, or write a card."
        )
    return card(run, config)


def _address(
    page: ModelCard, folders: Iterable[str], repo: str, files: Mapping[str, object]
) -> None:
    """Let the card load the adapter from its repository, and show the pictures that go with it.
    folders: where the card may say that the adapter lies."""
    for folder in folders:
        page.text = page.text.replace(f'"{folder}"', f'"{repo}"')
    page.text = page.text.replace(f"](../{CONFIG})", f"]({CONFIG})")
    shown = [name for name in (*PICTURES, "samples.png") if name in files]
    missing = [f"![{name}]({name})" for name in shown if f"]({name})" not in page.text]
    page.text = "\n\n".join([page.text.rstrip(), *missing]) + "\n"


def _check_secrets(files: Mapping[str, Path | bytes]) -> None:
    for name, content in files.items():
        if not name.endswith((".md", ".yaml", ".json")):
            continue
        data = content if isinstance(content, bytes) else content.read_bytes()
        # a byte that is not UTF-8 must not hide a token near it
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if SECRET.search(line):
                raise PushError(
                    f"{name}, line {number}, looks like it holds a token or a password, and "
                    "everyone could read it. Take it out of the folder's file (rewards read theirs "
                    "from the environment)."
                )
