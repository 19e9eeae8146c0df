"""Rewards: what scores images. One module a reward, looked up by name, imported when first built.

A reward is any `flowalign.types.Reward`. A name is looked up, in this order, among the rewards
registered in this process, the REWARDS table, the installed entry points of the group
"flowalign.rewards", and last as a dotted path "package.module:attribute". Its module is one that
Python finds, else one in the current folder, else one next to the config. The path names a class, a
function that takes the options and returns a Reward, or a plain function (images, prompts,
metadata, **options) -> Scores, which is itself the reward. A look-up always gives a class
(`base.as_class`); `RewardSpec`, a name with its options, answers for it before it is built.
A dotted path runs the code of its module, so commands that only examine a config ask
`RewardSpec.own_code` first.
The annotations of a class's options are checked when a config is read (`options.check_call`).
A reward that computes with torch may take the option `device`; runs fill it in.
`RewardBase` has the members of a reward. Your reward is a subclass of it, or a callable that has
some of these members.
"""

from __future__ import annotations

if __name__ != "flowalign.rewards":
    raise ImportError("import this package as flowalign.rewards, so that nothing exists twice.")

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from flowalign.config.section import did_you_mean
from flowalign.rewards import source
from flowalign.rewards.base import Cost, RewardBase, Wrapped, as_class
from flowalign.rewards.options import check_call, with_device
from flowalign.rewards.scoring import score, settings_kept
from flowalign.system.hub_files import HubFiles
from flowalign.system.packages import entry_points, installed
from flowalign.types import Metadata

__all__ = [
    "REWARDS", "Cost", "RewardBase", "RewardSpec", "add_config_folder", "build", "describe", "load",
    "names", "register", "score",
]  # fmt: skip

Factory = TypeVar("Factory", bound=Callable[..., Any])

REWARDS: dict[str, str] = {
    "aesthetic": "flowalign.rewards.preference:Aesthetic",
    "clipscore": "flowalign.rewards.preference:ClipScore",
    "diversity": "flowalign.rewards.preference:Diversity",
    "dpg": "flowalign.rewards.dpg:DPG",
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
    return sorted(_table())


def build(name: str, **options: Any) -> RewardBase:
    """The reward of that name (or dotted path), built with these options.

    Raises ValueError as `RewardSpec.check` does, and whatever the reward's own constructor raises.
    """
    spec = RewardSpec(name, options)
    spec.check()
    with settings_kept(name):
        reward = spec.reward_class(**options)
    if isinstance(reward, Wrapped) and not callable(reward.reward):
        raise ValueError(f"{name!r} makes a {type(reward.reward).__name__}, which is no reward.")
    return reward


@dataclass(frozen=True)
class RewardSpec:
    """A reward's name and options, with all that is known of it before it is built.

    trusted: whether the code at a dotted path may be imported. If not, such a reward has the
    defaults of RewardBase.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trusted: bool = True

    @cached_property  # each look-up of a function would make another class
    def reward_class(self) -> type[RewardBase]:
        """The class that the look-up returns. Raises ValueError if no reward has that name."""
        code = _table().get(self.name, self.name)
        if not isinstance(code, str):
            return as_class(code, self.options)
        if ":" not in code:
            raise ValueError(
                f"no reward {self.name!r}.{did_you_mean(self.name, names())} Use one of {names()}, "
                "register yours with @flowalign.rewards.register(name), or give its path "
                "'package.module:attribute'."
            )
        if _is_dotted_path(self.name) and not self.trusted:
            return RewardBase
        return as_class(load(code), self.options)

    def parts(self) -> Iterator[RewardSpec]:
        """The rewards that a combination is made of, at any depth; any other reward itself."""
        components = self.reward_class.made_of(**self.options)
        if not components:
            yield self
        for component in components:
            options = component.get("options") or {}
            yield from replace(self, name=component["name"], options=options).parts()

    def check(self) -> None:
        """Raise ValueError if no reward has that name, or if it does not take these options.

        Imports the reward's module, but builds nothing and loads no model. What an option may be is
        read off the reward's signature: see `flowalign.rewards.options.check_call`.
        """
        check_call(f"reward {self.name!r}", self.reward_class, self.options)

    def check_prompts(self, prompts: Sequence[str], metadata: Metadata) -> None:
        """Raise ValueError if the reward cannot judge images of one of these prompts. Call `check`
        first. Loads no model."""
        for part in self.parts():
            part.reward_class.check_prompts(prompts, metadata, **part.options)

    @property
    def groupwise(self) -> bool:
        """Whether it, or one of its parts, compares all images of a prompt."""
        return any(part.reward_class.groupwise is True for part in self.parts())

    @property
    def differentiable(self) -> bool:
        """Whether it has a gradient."""
        return self.reward_class.differentiable is True

    @property
    def may_be_sum(self) -> bool:
        """Whether it may be a weighted sum. A user's reward may set its `weights` when built."""
        built_in = self.name in REWARDS and self.name not in _registered
        return not built_in or self.reward_class.weights is not None

    @property
    def cost(self) -> Cost | None:
        """What an image costs; None = not known."""
        return self.reward_class.image_cost(**self.options)

    @property
    def downloads(self) -> Mapping[str, float] | None:
        """{file: GB} that it needs; None = not known."""
        return self.reward_class.files(**self.options)

    @property
    def hub_files(self) -> list[HubFiles]:
        """What it reads from the Hub."""
        return self.reward_class.hub_files(**self.options)

    @property
    def missing_packages(self) -> list[str]:
        """Packages that the reward or its parts need and that are not installed."""
        needed: dict[str, None] = {}
        for part in self.parts():
            needed |= dict.fromkeys(part.reward_class.packages(**part.options))
        return [name for name in needed if not installed(name)]

    @property
    def own_code(self) -> list[str]:
        """The dotted paths in the name and the options, at any depth. Checking or building the
        reward runs the code of their modules; this property runs none."""
        return [*_dotted_paths([self.name, self.options])]

    @property
    def code_digests(self) -> dict[str, str]:
        """{name: digest of the code} of the reward, its parts, and the modules that its options
        name by a dotted path. Runs none of that code. See `flowalign.rewards.source`."""
        rewards = [self.name, *(part.name for part in replace(self, trusted=False).parts())]
        digests = {}
        for name in [*rewards, *self.own_code]:
            digest = source.digest(_table().get(name, name))
            if digest or name in rewards:
                digests[name] = digest or uuid4().hex  # unknown code: equal to no earlier digest
        return digests

    def build(self, device: str | torch.device | None = None) -> RewardBase:
        """Build the reward for a run. The option `device` is filled in if the reward takes it and
        the options lack it (None = this thread's accelerator, or the CPU).

        Calls `connect()`. Raises ValueError as `check` does, ConnectionError or TimeoutError if the
        reward's service does not answer, and whatever its constructor raises.
        """
        reward = build(self.name, **with_device(self.reward_class, self.options, device))
        vars(reward)["code_digests"] = self.code_digests
        try:
            reward.connect()
        except (ConnectionError, TimeoutError) as error:
            text = f"reward {self.name!r} has no service: {error}. Start it first."
            raise type(error)(text) from error
        return reward


def describe(reward: RewardBase) -> dict[str, Any]:
    """What a reward's scores depend on, fit for JSON: its own `describe()`, and at least its name
    and, if a `RewardSpec` built it, its code.

    A description that fails is no reason to lose results: it is replaced by its error.
    """
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


def _table() -> dict[str, Any]:
    """{name: its dotted path, or what was registered} of every reward that is known by name."""
    points = {point.name: point.value for point in entry_points("flowalign.rewards")}
    return points | REWARDS | _registered


def _is_dotted_path(text: str) -> bool:
    """Whether a name is a dotted path, and in no table."""
    module, _, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return all(part.isidentifier() for part in parts) and text not in _table()


def _dotted_paths(value: Any) -> Iterator[str]:
    """The dotted paths in a text, or in a list or mapping of texts, at any depth."""
    if isinstance(value, str):
        if _is_dotted_path(value):
            yield value
    elif isinstance(value, Mapping):
        yield from _dotted_paths([*value.values()])
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _dotted_paths(inner)
