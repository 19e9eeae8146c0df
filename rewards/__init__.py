"""Rewards: what scores images. One module a reward, looked up by name, imported when first built.

A reward is any `flowalign.types.Reward`. A name is looked up, in this order, among the rewards
registered in this process, the REWARDS table, the installed entry points of the group
"flowalign.rewards", and last as a dotted path "package.module:attribute". Its module is one that
Python finds, else one in the current folder, else one next to the config. A name stands for a
factory (a class or function that takes the options and returns a Reward), or for a plain function
(images, prompts, metadata, **options) -> Scores, which is itself the reward. A dotted path runs the
code of its module, so commands that only examine a config ask `own_code` first.
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
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from flowalign.config.section import did_you_mean
from flowalign.rewards import source
from flowalign.rewards.base import Cost, RewardBase, as_reward, reward_class
from flowalign.rewards.options import check_call
from flowalign.rewards.scoring import score, settings_kept
from flowalign.system.devices import resolve
from flowalign.system.packages import entry_points, installed
from flowalign.types import Metadata, Reward

__all__ = [
    "REWARDS", "Cost", "RewardBase", "add_config_folder", "as_reward", "build", "build_on", "check",
    "check_prompts", "code_of", "declared", "describe", "has_no_weights", "is_groupwise", "leaves",
    "load", "missing_packages", "names", "own_code", "register", "score", "with_device",
]  # fmt: skip

Factory = TypeVar("Factory", bound=Callable[..., Any])

REWARDS: dict[str, str] = {
    "aesthetic": "flowalign.rewards.preference:Aesthetic",
    "clipscore": "flowalign.rewards.preference:ClipScore",
    "diversity": "flowalign.rewards.preference:Diversity",
    "dpg": "flowalign.rewards.dpg:DPG",
    "gated": "flowalign.rewards.combine:Gated",
    "geneval": "flowalign.rewards.geneval:GenEval",
    "geneval2": "flowalign.rewards.geneval2:GenEval2",
    "hpsv2": "flowalign.rewards.preference:HPSv2",
    "imagereward": "flowalign.rewards.imagereward:ImageReward",
    "normalized": "flowalign.rewards.combine:Normalized",
    "ocr": "flowalign.rewards.ocr:OCR",
    "pickscore": "flowalign.rewards.preference:PickScore",
    "product": "flowalign.rewards.combine:Product",
    "remote": "flowalign.rewards.service.client:Remote",
    "similarity": "flowalign.rewards.preference:Similarity",
    "vlm": "flowalign.rewards.vlm:VLM",
    "weighted": "flowalign.rewards.combine:Weighted",
}

_registered: dict[str, Callable[..., Any]] = {}
_INPUTS = 3  # images, prompts, metadata


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a reward class, factory or function known as `name` in this process.

    A registered name comes before the table's, so it can replace a built-in reward. The same
    definition may be registered again (a notebook cell that is run twice); another one under a
    name that is taken raises ValueError.
    """

    def decorate(factory: Factory) -> Factory:
        old = _registered.setdefault(name, factory)
        if (old.__module__, old.__qualname__) != (factory.__module__, factory.__qualname__):
            raise ValueError(f"reward {name!r} is already registered, by {old!r}.")
        _registered[name] = factory
        return factory

    return decorate


def names() -> list[str]:
    """Every reward that is known by name, sorted."""
    return sorted({*_registered, *_paths()})


def build(name: str, **options: Any) -> Reward:
    """The reward of that name (or dotted path), built with these options.

    Raises ValueError as `check` does, and whatever the reward's own constructor raises.
    """
    check(name, options)
    factory = _find(name)
    if not _is_reward(factory, options):
        with settings_kept(name):
            reward: Reward = factory(**options)
        if not callable(reward):
            raise ValueError(f"{name!r} makes a {type(reward).__name__}, which is no reward.")
        return reward
    # update_wrapper: a plain function keeps its name and what it says of itself (`groupwise`)
    return functools.update_wrapper(functools.partial(factory, **options), factory)


def build_on(
    device: str | torch.device | None, name: str, options: Mapping[str, Any]
) -> RewardBase:
    """As `build`, for a run: with the option `device` filled in, for a reward that takes it and is
    not given one (None = this thread's accelerator, or the CPU).

    Calls `connect()`. Raises ConnectionError or TimeoutError if the reward's service does not
    answer.
    """
    reward = as_reward(build(name, **with_device(_find(name), options, device)))
    vars(reward)["code_digests"] = code_of(name, options)
    try:
        reward.connect()
    except (ConnectionError, TimeoutError) as error:
        raise type(error)(f"reward {name!r} has no service: {error}. Start it first.") from error
    return reward


def with_device(
    factory: Callable[..., Any], options: Mapping[str, Any], device: str | torch.device | None
) -> Mapping[str, Any]:
    """The options with that device, if the factory has the option and they do not give it."""
    if options.get("device") is not None or "device" not in inspect.signature(factory).parameters:
        return options
    return {**options, "device": str(resolve(device))}


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if no reward has that name, or if it does not take these options.

    Imports the reward's module, but builds nothing and loads no model. What an option may be is
    read off the reward's signature: see `flowalign.rewards.options.check_call`.
    """
    factory = _find(name)
    check_call(f"reward {name!r}", factory, options, _INPUTS * _is_reward(factory, options))


def declared(name: str, *, imports: bool = True) -> type[RewardBase]:
    """What the reward of that name says of itself before it is built, and without a model.

    imports: whether to look for it in the code at a dotted path; without, such a reward says
    nothing. Raises ValueError if no reward has that name.
    """
    return RewardBase if _is_dotted_path(name) and not imports else reward_class(_find(name))


def leaves(
    name: str, options: Mapping[str, Any], *, imports: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, options) of the rewards that a composed one is made of, at any depth; of any other,
    its name and options. imports: as for `declared`."""
    parts = declared(name, imports=imports).made_of(**options)
    if not parts:
        yield name, dict(options)
    for part in parts:
        yield from leaves(part["name"], part.get("options") or {}, imports=imports)


def check_prompts(
    name: str, options: Mapping[str, Any], prompts: Sequence[str], metadata: Metadata
) -> None:
    """Raise ValueError if the reward says that it cannot judge images of one of these prompts.

    name, options: as for `check`, which is called before. Loads no model.
    """
    for part, given in leaves(name, options):
        declared(part).check_prompts(prompts, metadata, **given)


def own_code(name: Any, options: Any = ()) -> list[str]:
    """The dotted paths that a reward and its options name, at any depth. To check or to build it
    runs the code of their modules; this runs none."""
    if isinstance(name, str):
        return [name] * _is_dotted_path(name) + own_code(options)
    values = name.values() if isinstance(name, Mapping) else name
    nested = (value for value in values if isinstance(value, str | Mapping | Sequence))
    return [path for value in nested for path in own_code(value)]


def missing_packages(name: str, options: Mapping[str, Any]) -> list[str]:
    """Packages that a reward imports when it is built with these options, and that are not here."""
    parts = leaves(name, options)
    needed = [package for part, given in parts for package in declared(part).packages(**given)]
    return [package for package in dict.fromkeys(needed) if not installed(package)]


def is_groupwise(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a reward, or one that it is made of, compares all images of a prompt, as far as it
    says so before it is built."""
    return any(declared(part).groupwise is True for part, _ in leaves(name, options))


def is_differentiable(name: str) -> bool:
    """Whether a reward has a gradient, as far as it says so before it is built."""
    return declared(name).differentiable is True


def has_no_weights(name: str) -> bool:
    """Whether a reward is known to be no weighted sum before it is built. One of the user's may set
    its `weights` when it is."""
    return name in REWARDS and name not in _registered and declared(name).weights is None


def code_of(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """{name: digest of its code} of a reward, of those that it is made of, and of the modules that
    its options name by a dotted path. Runs none of that code. See `flowalign.rewards.source`."""
    needed = [name, *(part for part, _ in leaves(name, options, imports=False))]
    digests = {}
    for part in [*needed, *own_code(options)]:
        module = _paths().get(part, part).partition(":")[0]
        found = source.digest(_registered.get(part, module))
        if found or part in needed:
            digests[part] = found or uuid4().hex  # not known: of nothing that was scored before
    return digests


def describe(reward: Reward) -> dict[str, Any]:
    """What a reward's scores depend on, fit for JSON: its own `describe()`, and at least its name
    and, if it was built by its name (`build_on`), its code.

    A description that fails is no reason to lose results: it is replaced by its error.
    """
    reward = as_reward(reward)
    name = {"name": reward.name}
    code = {"code": reward.code_digests} if reward.code_digests else {}
    try:
        return json.loads(json.dumps(name | reward.describe() | code, default=str))
    except Exception as error:
        return name | code | {"describe": f"{type(error).__name__}: {error}"}


def add_config_folder(config: str | Path) -> None:
    """Let dotted paths name modules in the current folder or next to this config file."""
    for folder in (Path.cwd(), Path(config).absolute().parent):
        if str(folder) not in sys.path:  # last: a file there must not hide an installed module
            sys.path.append(str(folder))
    importlib.invalidate_caches()  # a file may be younger than Python's list of them


def load(path: str, what: str = "reward") -> Any:
    """The object at a dotted path "package.module:attribute".

    Raises ValueError naming `what` was looked for where the module or attribute is missing.
    """
    add_config_folder(Path.cwd() / "config")
    try:
        return pkgutil.resolve_name(path)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{what} {path!r}: {error}. Give 'package.module:attribute' of a module that is "
            "installed, in the current folder or next to the config."
        ) from error


def _find(name: str) -> Callable[..., Any]:
    """The factory or function behind a name, in the order that this module's head states."""
    if name in _registered:
        return _registered[name]
    path = _paths().get(name, name)
    if ":" not in path:
        raise ValueError(
            f"no reward {name!r}.{did_you_mean(name, names())} Use one of {names()}, register "
            "yours with @flowalign.rewards.register(name), or give its path "
            "'package.module:attribute'."
        )
    return load(path)


def _is_dotted_path(text: str) -> bool:
    """Whether a name is a dotted path, and in no table."""
    module, _, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return all(part.isidentifier() for part in parts) and text not in names()


def _paths() -> dict[str, str]:
    """The dotted path of every reward that the table or an installed package names."""
    return {point.name: point.value for point in entry_points("flowalign.rewards")} | REWARDS


def _is_reward(factory: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether it is a function that begins with the inputs of a reward: three parameters without
    a default that no option is for."""
    first = [*inspect.signature(factory).parameters.values()][:_INPUTS]
    needed = [p for p in first if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    inputs = [parameter for parameter in needed if parameter.name not in options]
    return not inspect.isclass(factory) and len(inputs) == _INPUTS
