"""The rules of the house: who imports whom, how long a function is, what a wheel holds."""

import ast
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import house  # scripts/house.py
import pytest

from flowalign.backbone import families
from flowalign.system.folder import RunFolder

ROOT = Path(__file__).parent.parent
ROOMS = ("flowalign.rewards", "flowalign.teachers", "flowalign.eval")
# DESIGN section 3: a room imports only rooms of a lower level.
LEVELS = {
    room: level
    for level, rooms in enumerate(
        (
            ("system", "types", "credit"), ("sde", "config"), ("backbone",), ("rewards",),
            ("training",), ("report", "checks"), ("teachers", "eval"), ("commands",),
        )
    )
    for room in rooms
}  # fmt: skip
# Registries, whose entries are above them: a text names what is imported when it is asked for.
BY_NAME = {
    "flowalign.eval.__main__": {"flowalign.commands.evaluate"},  # python -m flowalign.eval is it
    "flowalign.config.stages.rewards": {
        f"flowalign.teachers.{name}" for name in ("grpo", "nft", "awm", "gradient", "dpo")
    },
    "flowalign.config.stages.students": {
        f"flowalign.training.student.{name}" for name in ("opd", "sft")
    },
}
PURE = ("flowalign.sde", "flowalign.credit", "flowalign.training.losses")
HEAVY = ("diffusers", "transformers", "peft", "accelerate")
CONFIGS = [  # one a run; those with an underscore are used by others, variants change others
    path
    for path in sorted(ROOT.glob("configs/**/[!_]*.yaml"))
    if not {"accelerate", "variants"} & {*path.parts}
]
MODULES = house.modules(ROOT)


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a tree imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            whole = [f"{base}.{alias.name}" for alias in node.names]
            submodules = [name for name in whole if name in MODULES]
            yield from submodules
            if len(submodules) < len(whole):
                yield base


def under(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def allowed(module: str, name: str) -> bool:
    """May this module of flowalign import that one?"""
    if name.startswith("."):
        return False  # absolute imports only: one name for everything
    if module in PURE and under(name, *HEAVY):
        return False
    if not under(name, "flowalign"):
        return not under(name, "rewards", "teachers", "eval")
    if module == "flowalign" or name == "flowalign":  # the face; its version is no room
        return True
    here, there = house.room(module), house.room(name)
    return here == there or LEVELS[there] < LEVELS[here]


def violations(module: str, source: str) -> list[str]:
    tree = ast.parse(source)
    wrong = [f"imports {name}" for name in imported(tree) if not allowed(module, name)]
    named = set(house.by_name(tree, MODULES)) - BY_NAME.get(module, set())
    wrong += [f"names {name}" for name in named if not allowed(module, name)]
    return [f"{module} {text}" for text in wrong]


def test_a_module_imports_and_names_only_what_it_may() -> None:
    wrong = [text for name, path in MODULES.items() for text in violations(name, path.read_text())]
    assert wrong == []


@pytest.mark.parametrize("kind", ["*.py", "*.md"])
def test_a_full_name_in_a_text_is_there(kind: str) -> None:
    """`flowalign.module.name`, in a docstring, a comment or a document but for the log."""
    folders = ("flowalign/**", "rewards/**", "teachers/**", "eval/**", "docs", "docs/rewards")
    names: dict[str, Path] = {}
    for folder in (*folders, ".github", "."):
        for path in ROOT.glob(f"{folder}/{kind}"):
            if path.name not in ("CHANGELOG.md", "changelog.md"):
                texts = re.findall(r"`(flowalign(?:\.\w+)+)(?:\(.*?\))?`", path.read_text())
                names |= dict.fromkeys(texts, path)
    for group in ("advantages", "algorithms", "backbones"):  # of entry points
        names.pop(f"flowalign.{group}", None)
    stale = []
    for name, path in names.items():
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            stale.append(f"{path}: {name}")
    assert not stale and len(names) > 5


def test_no_room_is_above_its_budget() -> None:
    assert house.above_budget(ROOT) == []


def test_the_house_has_its_entries() -> None:
    names = {p.name for p in (ROOT / "flowalign").iterdir() if p.name != "__pycache__"}
    rooms = {name if (ROOT / "flowalign" / name).is_dir() else f"{name}.py" for name in LEVELS}
    assert names == {"__init__.py", *rooms}


def test_a_name_in_a_run_s_folder_stands_once() -> None:
    names = {path.name for path in vars(RunFolder("run")).values() if path.suffix} - {"README.md"}
    texts = [
        (module, node.value)
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert sorted(texts) == [("flowalign.system.folder", name) for name in sorted(names)]


def test_a_line_does_one_thing() -> None:
    scripts = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("benchmarks/*.py"), ROOT / "train.py"]
    texts = [
        f"{path.relative_to(ROOT)}:{text}"
        for path in (*MODULES.values(), *scripts)
        for text in house.dense(ast.parse(path.read_text()))
    ]
    assert texts == []


@pytest.mark.parametrize(
    "line",
    [
        "a, b = x, len(y)",
        "self.a, self.b = a, b",
        "f(a := b)",
        "a = [x] * (y > 0)",
        "a = 's' * (y > 0)",
        "for a in b if c else (): pass",
        "[x for y in z for x in y if x]",
        "a = b if c else d if e else f",
    ],
)
def test_a_dense_line_is_seen(line: str) -> None:
    assert list(house.dense(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["a, b = b, len(a)", "a, b = x[0] / 2, y[1] / 2", "if a := b: pass", "a = [x] * 3"]
)
def test_a_plain_line_is_not_called_dense(line: str) -> None:
    assert not list(house.dense(ast.parse(line)))


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("flowalign", "rewards", "teachers", "eval", "configs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    subprocess.run([sys.executable, "-m", "build", "-w", "-o", tmp_path, tree], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"flowalign", "flowalign_t2i-0.1.0.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in MODULES.values()}
    rooms = tuple(f"{room.split('.')[1]}/" for room in ROOMS)
    assert {f"flowalign/{m}" if m.startswith(rooms) else m for m in modules} <= names
    kinds = ("json", "jsonl", "safetensors")
    data = [p for kind in kinds for p in ROOT.glob(f"flowalign/backbone/tiny/**/*.{kind}")]
    assert {str(path.relative_to(ROOT)) for path in data} <= names
    assert "flowalign/report/templates/report.html.j2" in names


def test_a_clone_in_the_current_folder_does_not_hide_the_package(tmp_path: Path) -> None:
    """Its folder would be found as a namespace package of that name."""
    (tmp_path / "flowalign").mkdir()
    code = "import flowalign; assert flowalign.__file__"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_only_the_backbone_knows_a_family_by_name() -> None:
    """A family is one file there, and all else derives from what it says."""
    names = {family.name for family in families().values()} | {"klein", "qwenimage", "zimage"}
    names |= {family.pipeline.removesuffix("Pipeline").lower() for family in families().values()}
    said = re.compile(rf"(?i)(?<![a-z])({'|'.join(sorted(names))})(?!5)")  # configs/sd35_medium
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, path in MODULES.items()
        if not name.startswith("flowalign.backbone")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if said.search(line)
    ]
    assert found == []


@pytest.mark.slow
def test_a_bare_import_reaches_what_documents_write() -> None:
    """`flowalign.rewards.register` and the like; `import flowalign` alone loads nothing heavy."""
    text = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    names = {*re.findall(r"\bflowalign\.(\w+(?:\.\w+)?)\b(?![./])", text)}
    modules = {name.removeprefix("flowalign.") for name in MODULES}
    names = {name for name in names if name.partition(".")[0] in modules} - modules
    assert "rewards.register" in names
    heavy = "{'torch', 'diffusers', 'matplotlib', 'PIL', 'numpy'}"
    code = f"import sys, flowalign; assert not {heavy} & set(sys.modules); "
    code += "from operator import attrgetter; attrgetter(*sys.argv[1:])(flowalign)"
    subprocess.run([sys.executable, "-c", code, "rewards", *names], cwd=ROOT, check=True)
