"""Rewards: what scores images. One module a reward, looked up by name, imported when first built.

A reward is any `flowalign.types.Reward`. A name is looked up, in this order, among the rewards
registered in this process, the REWARDS table, the installed entry points of the group
"flowalign.rewards", and last as a dotted path "package.module:attribute". Its module is one that
Python finds, else one in the current folder, else one beside the config. The name stands for either
a factory (a class or function that takes the options and returns a Reward), or a plain function
(images, prompts, metadata, **options) -> Scores, which is itself the reward. At a dotted path a
function is a factory only if its annotation says `-> Reward`: any other function of Python is
refused, and not called. A dotted path runs the code of its module, so commands that only examine a
config ask `own_code` first.
The annotations of a factory's options are checked when a config is read (`options.check_call`).
A reward that computes with torch may take the option `device`; runs fill it in (`build_on`).
What a reward may say of itself are the attributes of `RewardBase`. A reward of the user's may be a
subclass of it, or a callable that has some of them.
"""

from __future__ import annotations

if __name__ != "flowalign.rewards":
    raise ImportError("import this package as flowalign.rewards, so that nothing exists twice.")

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowalign.rewards.base import Cost, RewardBase, as_reward, reward_class
from flowalign.rewards.options import check_call, makes, suggestion
from flowalign.rewards.scoring import score
from flowalign.system.devices import resolve
from flowalign.system.packages import installed
from flowalign.types import Metadata, Reward

__all__ = [
    "REWARDS", "Cost", "RewardBase", "add_config_folder", "as_reward", "build", "build_on", "check",
    "check_prompts", "declared", "describe", "has_no_weights", "is_groupwise", "leaves", "load",
    "missing_packages", "names", "own_code", "register", "score", "with_device",
]  # fmt: skip

Factory = TypeVar("Factory", bound=Callable[..., Any])

REWARDS: dict[str, str] = {
    "aesthetic": "flowalign.rewards.aesthetic:Aesthetic",
    "clipscore": "flowalign.rewards.clipscore:ClipScore",
    "deqa": "flowalign.rewards.deqa:DeQA",
    "diversity": "flowalign.rewards.diversity:Diversity",
    "gated": "flowalign.rewards.combine:Gated",
    "geneval": "flowalign.rewards.geneval:GenEval",
    "hpsv2": "flowalign.rewards.hpsv2:HPSv2",
    "hpsv3": "flowalign.rewards.hpsv3:HPSv3",
    "imagereward": "flowalign.rewards.imagereward:ImageReward",
    "normalized": "flowalign.rewards.combine:Normalized",
    "ocr": "flowalign.rewards.ocr:OCR",
    "pickscore": "flowalign.rewards.pickscore:PickScore",
    "remote": "flowalign.rewards.service.client:Remote",
    "vlm": "flowalign.rewards.vlm:VLM",
    "weighted": "flowalign.rewards.combine:Weighted",
}

_registered: dict[str, Callable[..., Any]] = {}
_config_folders: list[Path] = []  # folders of configs, the latest first
_INPUTS = ["images", "prompts", "metadata"]  # a function that begins so is itself the reward


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a reward class, factory or function known as `name` in this process.

    A registered name comes before the table's, so it can replace a built-in reward. The same
    definition may be registered again (a notebook cell that is run twice); another one under a
    name that is taken raises ValueError.
    """

    def decorate(factory: Factory) -> Factory:
        old = _registered.get(name)
        if old is not None and _identity(old) != _identity(factory):
            raise ValueError(
                f"reward {name!r} is already registered by {_identity(old)}; choose another name."
            )
        _registered[name] = factory
        return factory

    return decorate


def names() -> list[str]:
    """Every reward that is known by name, sorted."""
    return sorted({*_registered, *REWARDS, *_entry_points()})


def build(name: str, **options: Any) -> Reward:
    """The reward of that name (or dotted path), built with these options.

    Raises ValueError as `check` does, and whatever the reward's own constructor raises.
    """
    check(name, options)
    factory = _find(name)
    if not _is_reward(factory):
        return factory(**options)
    # update_wrapper: a plain function keeps its name and what it says of itself (`groupwise`)
    return functools.update_wrapper(functools.partial(factory, **options), factory)


def build_on(
    device: str | torch.device | None, name: str, options: Mapping[str, Any]
) -> RewardBase:
    """As `build`, for a run: with the option `device` filled in, for a reward that takes it and is
    not given one (None = this thread's accelerator, or the CPU).

    Calls `connect()`. Raises ConnectionError or TimeoutError, which say what to do, if the reward's
    service does not answer.
    """
    reward = as_reward(build(name, **with_device(_find(name), options, device)))
    try:
        reward.connect()
    except (ConnectionError, TimeoutError) as error:
        remedy = "Start the service before the run, or correct its address."
        raise type(error)(f"reward {name!r} has no service: {error}. {remedy}") from error
    return reward


def with_device(
    factory: Callable[..., Any], options: Mapping[str, Any], device: str | torch.device | None
) -> Mapping[str, Any]:
    """The options with that device, if the factory has the option and they do not give it."""
    if options.get("device") is not None or "device" not in _parameters(factory):
        return options
    return {**options, "device": str(resolve(device))}


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if no reward has that name, or if it does not take these options.

    Imports the reward's module, but builds nothing and loads no model. What an option may be is
    read off the reward's signature: see `flowalign.rewards.options.check_call`.
    """
    factory = _find(name)
    check_call(f"reward {name!r}", factory, options, len(_INPUTS) * _is_reward(factory))


def declared(name: str, *, imports: bool = True) -> type[RewardBase]:
    """What the reward of that name says of itself before it is built, and without a model.

    imports: whether to look for it in the code at a dotted path; without, such a reward says
    nothing. Raises ValueError if no reward has that name.
    """
    if not imports and _is_path(name) and not _is_known(name):
        return RewardBase
    return reward_class(_find(name))


def check_prompts(
    name: str, options: Mapping[str, Any], prompts: Sequence[str], metadata: Metadata
) -> None:
    """Raise ValueError if the reward says that it cannot judge images of one of these prompts.

    name and options are those of `check`, which is called before. Loads no model.
    """
    for part, given in leaves(name, options):
        declared(part).check_prompts(prompts, metadata, **given)


def own_code(name: str, options: Mapping[str, Any]) -> list[str]:
    """The dotted paths that a reward and its options name, at any depth. To check or to build it
    runs the code of their modules; this runs none."""
    paths = [] if _is_known(name) else [name] if _is_path(name) else []
    todo: list[Any] = list(options.values())
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            todo += value
        elif isinstance(value, str) and _is_path(value) and not _is_known(value):
            paths.append(value)
    return paths


def leaves(
    name: str, options: Mapping[str, Any], *, imports: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, options) of the rewards that a composed one is made of, at any depth; of any other,
    its own. imports: as for `declared`."""
    parts = declared(name, imports=imports).made_of(**options)
    if not parts:
        yield name, dict(options)
    for part in parts:
        yield from leaves(part["name"], part.get("options") or {}, imports=imports)


def missing_packages(name: str, options: Mapping[str, Any]) -> list[str]:
    """Packages that a reward imports when it is built with these options, and that are not here."""
    needed = [
        package
        for part, given in leaves(name, options)
        for package in declared(part).packages(**given)
    ]
    return [package for package in dict.fromkeys(needed) if not installed(package)]


def is_groupwise(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a reward, or one that it is made of, compares all images of a prompt, as far as it
    says so before it is built."""
    return any(declared(part).groupwise is True for part, _ in leaves(name, options))


def has_no_weights(name: str) -> bool:
    """Whether a reward is known to be no weighted sum before it is built. One of the user's may set
    its `weights` when it is."""
    return name in REWARDS and name not in _registered and declared(name).weights is None


def describe(reward: Reward) -> dict[str, Any]:
    """What a reward's scores depend on, fit for JSON: its own `describe()`, and at least its name.

    The name of one that says nothing is its attribute `name`, else that of its class or function.
    A description that fails is no reason to lose results: it is replaced by its error.
    """
    reward = as_reward(reward)
    name = {"name": reward.name}
    try:
        return json.loads(json.dumps(name | reward.describe(), default=str))
    except Exception as error:
        return name | {"describe": f"{type(error).__name__}: {error}"}


def add_config_folder(config: str | Path) -> None:
    """Let dotted paths name modules that lie beside this config file. Commands call it."""
    folder = Path(config).absolute().parent
    _config_folders[:] = [folder, *(other for other in _config_folders if other != folder)]


def load(path: str, what: str = "reward") -> Any:
    """The object at a dotted path "package.module:attribute".

    Raises ValueError naming `what` was looked for where the module or attribute is missing; an
    ImportError that the module itself causes (a missing dependency) passes through.
    """
    module_name, _, attribute = path.partition(":")
    if not _is_path(path):
        raise ValueError(f"{what} {path!r} is no path of the form 'package.module:attribute'.")
    _make_importable(module_name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(missing + "."):
            raise
        raise ValueError(
            f"{what} {path!r}: there is no module {missing!r}. Install it, or put it into the "
            "current folder or beside the config."
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        have = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(
            f"{what} {path!r}: {module_name} has no {attribute!r}{suggestion(attribute, have)}."
        ) from error


def _make_importable(module: str) -> None:
    """Where Python finds no such module, but the current folder or that of a config has one, put
    that folder on the path, for whatever else it imports and for processes that are started. At
    its end: a file of the user's must not hide a module that a library imports later."""
    if installed(module.partition(".")[0]):
        return
    for folder in (Path.cwd(), *_config_folders):
        file = folder.joinpath(*module.split("."))
        if file.with_suffix(".py").is_file() or (file / "__init__.py").is_file():
            sys.path.append(str(folder))
            importlib.invalidate_caches()  # the file may be younger than Python's list of them
            return


def _find(name: str) -> Callable[..., Any]:
    """The factory or function behind a name, in the order that this module's head states."""
    if name in _registered:
        return _registered[name]
    if name in REWARDS:
        return load(REWARDS[name])
    points = _entry_points()
    if name in points:
        return points[name].load()
    module, _, attribute = name.partition(":")
    if module and attribute:
        factory = load(name)
        if not callable(factory):
            raise ValueError(f"reward {name!r} is a {type(factory).__name__}, not a callable.")
        if not _is_reward(factory) and not makes(factory, len(_INPUTS)):
            raise ValueError(
                f"reward {name!r} is no reward, and was not called. Name a function "
                f"({', '.join(_INPUTS)}) -> Scores, a class whose objects are called so, or a "
                "function that says `-> Reward` (flowalign.types)."
            )
        return factory
    raise ValueError(
        f"no reward {name!r}{suggestion(name, names())}; known are {names()}. Use one of them, "
        "register yours with @flowalign.rewards.register(name), or give its path as "
        "'package.module:attribute'."
    )


def _is_known(name: str) -> bool:
    """Whether a name is looked up in a table, and not as a path."""
    return name in _registered or name in REWARDS or name in _entry_points()


def _is_path(text: str) -> bool:
    module, _, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return all(part.isidentifier() for part in parts)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="flowalign.rewards")}


def _is_reward(factory: Callable[..., Any]) -> bool:
    return not inspect.isclass(factory) and _parameters(factory)[: len(_INPUTS)] == _INPUTS


def _parameters(factory: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(factory).parameters)
    except ValueError:  # a builtin without a signature
        return []


def _identity(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', repr(factory))}"
