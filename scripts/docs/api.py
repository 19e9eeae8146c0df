"""The page api.md, read off the sources: names that others rely on, with their signatures.

No module is imported, so that the docs build without torch. A name that is gone fails the build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

NAMES = {
    "Notebooks": ["flowalign.load", "flowalign.pictures.gallery"],
    "Sampling steps": [
        "flowalign.sde.sigmas",
        "flowalign.sde.transition",
        "flowalign.sde.sample",
        "flowalign.sde.log_prob",
        "flowalign.sde.kl",
    ],
    "Credit and losses": [
        "flowalign.credit.group_relative",
        "flowalign.credit.gaussian_ranks",
        "flowalign.losses.policy_loss",
        "flowalign.losses.published_loss",
        "flowalign.losses.velocity_error",
        "flowalign.losses.step_weights",
    ],
    "Evaluation": [
        "flowalign.eval.geneval.judge",
        "flowalign.eval.geneval.summarize",
        "flowalign.eval.compare.load",
        "flowalign.eval.compare.compare",
        "flowalign.eval.layouts.write_layout",
    ],
    "Rewards": [
        "flowalign.rewards.register",
        "flowalign.rewards.build",
        "flowalign.rewards.check",
        "flowalign.rewards.guarded.score",
        "flowalign.rewards.ocr.text_reward",
        "flowalign.rewards.ocr.target_of",
    ],
    "Teachers": ["flowalign.teachers.merge.merge", "flowalign.teachers.bank.Bank"],
    "Configs": ["flowalign.config.load", "flowalign.config.parse", "flowalign.config.to_yaml"],
    "Sampling": [
        "flowalign.rollout.sample",
        "flowalign.rollout.Schedule",
        "flowalign.rollout.Noise",
        "flowalign.backbone.Backbone",
    ],
    "What passes between the rooms": [
        "flowalign.types.PromptBatch",
        "flowalign.types.Conditioning",
        "flowalign.types.Rollout",
        "flowalign.types.Scores",
        "flowalign.types.Detections",
        "flowalign.types.TeacherLabel",
        "flowalign.types.Gaussian",
        "flowalign.types.Reward",
        "flowalign.types.Detector",
        "flowalign.types.Teacher",
    ],
}
HEAD = """# Names that others rely on

Read off the sources when this page was built. These keep their name, meaning and order of
arguments; everything else may change with a version. `flowalign --help` lists the commands, and
`flowalign COMMAND --help` tells the options of one.
"""
Definition = ast.FunctionDef | ast.ClassDef


def page(root: Path) -> str:
    """The page in Markdown; root is that of the checkout."""
    parts = [HEAD]
    for title, names in NAMES.items():
        parts.append(f"## {title}")
        parts += [_entry(name, find(root, name)) for name in names]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, node: Definition) -> str:
    text = f"### `{name}` {{#{name}}}\n\n```python\n{signature(node)}\n```"
    said = ast.get_docstring(node)
    return f"{text}\n\n```text\n{said}\n```" if said else text


def find(root: Path, name: str) -> Definition:
    """The definition of a dotted name; LookupError where the sources have none."""
    module, _, attribute = name.rpartition(".")
    base = root.joinpath(*module.split("."))
    path = next(p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file())
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Definition) and node.name == attribute:
            return node
    raise LookupError(f"{path} defines no {attribute}, which scripts/docs/api.py lists")


def signature(node: Definition) -> str:
    """`def` or `class` with its arguments, folded where it is long."""
    if isinstance(node, ast.ClassDef):
        init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if init:
            return _folded(f"class {node.name}", init[0].args, "", skip_self=True)
        fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign)]
        methods = [
            f"{_folded(f'def {n.name}', n.args, _returns(n), skip_self=False)}: ..."
            for n in node.body
            if isinstance(n, ast.FunctionDef) and (n.name == "__call__" or n.name[0] != "_")
        ]
        return "\n    ".join([f"class {node.name}:", *fields, *methods])
    return _folded(f"def {node.name}", node.args, _returns(node), skip_self=False)


def _returns(node: ast.FunctionDef) -> str:
    return f" -> {ast.unparse(node.returns)}" if node.returns else ""


def _folded(head: str, arguments: ast.arguments, tail: str, *, skip_self: bool) -> str:
    text = ast.unparse(arguments).removeprefix("self, " if skip_self else "")
    line = f"{head}({text}){tail}"
    if len(line) <= 90:
        return line
    return f"{head}(\n    " + re.sub(r", (?=\*|\w+:|\*\*)", ",\n    ", text) + f",\n){tail}"


# Who asks what of a backbone -------------------------------------------------------------------


def backbone_members(root: Path) -> str:
    """A table of the attributes of `Backbone` that other modules use, and which ones do."""
    found: dict[str, set[str]] = {}
    for module, name in _used(root):
        found.setdefault(name, set()).add(module)
    own = _members(find(root, "flowalign.backbone.Backbone"))
    rows = ["| member | what it is | asked for by |", "|---|---|---|"]
    for name in sorted(found, key=lambda n: (-len(found[n]), n)):
        modules = ", ".join(f"`{module}`" for module in sorted(found[name]))
        written, said = own.get(name, (name, ""))
        rows.append(f"| `{written}` | {said} | {modules} |")
    return "\n".join(rows)


def _used(root: Path) -> Iterator[tuple[str, str]]:
    """(module, attribute) wherever a module says `backbone.attribute`."""
    for folder in ("flowalign", "rewards", "teachers", "eval"):
        for path in sorted((root / folder).glob("*.py")):
            if path.name == "backbone.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and _is_backbone(node.value):
                    yield str(path.relative_to(root)), node.attr


def _is_backbone(node: ast.expr) -> bool:
    """`backbone`, or `anything.backbone`, as a value (not the module of that name)."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "flowalign.backbone":
        return False
    return name == "backbone"


def _members(node: Definition) -> dict[str, tuple[str, str]]:
    """{member: (how it is written, the first sentence about it)}."""
    found: dict[str, tuple[str, str]] = {}
    for child in node.body:
        if not isinstance(child, ast.FunctionDef):
            continue
        said = " ".join((ast.get_docstring(child) or "").split()).partition(". ")[0]
        arguments = ast.unparse(child.args)
        short = re.sub(r": [^,=]*(\[[^\]]*\])?[^,=]*", "", arguments).removeprefix("self")
        found[child.name] = f"{child.name}({short.removeprefix(', ')})", said.rstrip(".") + "."
        if child.name == "__init__":
            for target in ast.walk(child):
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                    found.setdefault(target.attr, (target.attr, ATTRIBUTES.get(target.attr, "")))
    return found


ATTRIBUTES = {
    "pipe": "The diffusers pipeline.",
    "core": "The bare transformer, with its adapters.",
    "transformer": "The same, or its wrapped self after accelerate.prepare (assigned by the loop).",
    "device": "Where it computes.",
    "name": "The base's id, which saved adapters carry.",
    "dtype": "Of the frozen weights.",
    "latent_shape": "(C, h, w) of one latent.",
    "text": "Prompts to embeddings.",
    "decode_batch": "Images a VAE decode.",
}
