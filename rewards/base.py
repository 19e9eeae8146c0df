"""The interface of a reward, `RewardBase`, and what wraps anything else in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from flowalign.system.hub_files import HubFiles
from flowalign.system.images import stacked
from flowalign.types import Metadata, Scores

CLIP_L = {"openai/clip-vit-large-patch14": 1.7}  # GB
VIT_H = 2 * 632e6 * 257  # operations of CLIP ViT-H/14 at 224 pixels: 2 x weights x tokens
VIT_L = 2 * 304e6 * 257  # CLIP ViT-L/14 at 224 pixels
KEPT_H, KEPT_L = 0.44e9, 0.37e9  # bytes that they keep of an image for its gradient, in float32
INPUTS = 3  # images, prompts, metadata


@dataclass(frozen=True)
class Cost:
    """What one image costs: operations of the forward pass on the device, in float32; seconds on
    one CPU thread; and bytes that are kept from there for the image's gradient, at their peak."""

    flops: float = 0.0
    seconds: float = 0.0
    kept: float = 0.0


class RewardBase:
    """A reward, with a default for each member.

    A subclass overrides what differs. Any other callable works as well: `Wrapped` copies MEMBERS
    from it. The class methods are called with the options, before the reward is built; they must
    not load a model.

    name: for logs and results; by default the name of the class.
    code_digests: of its code, by name; set where it is built by its name.
    settings: what its scores depend on, as JSON, such as `engine`, `model` and the options that
        matter. Recorded with results, as other engines give other numbers.
    groupwise: called with all images of one prompt at a time, and may compare them.
    differentiable: whether it has `with_gradient`.
    headline: the part of its scores that the benchmark reports; None = the value.
    columns: parts that the tables of an evaluation show as well.
    averaged: whether it counts in the average of an evaluation.
    weights: {part: weight} of a weighted sum of parts, as the advantage gdpo needs; None = no sum.
    licence: of its code and weights, where their repositories say so.
    imports: names of the optional packages that it needs.
    choice: the option that chooses what scores, and its default; choices {its value: licence}.
    cost: of an image, with the default options; None = not known.
    downloads: {file: GB} with the default options; None = not known.
    resizes: options that choose another model or image size, so that neither is known.
    reads: {option: (its default, its files on the Hub)} of options that name models and weights.
    """

    name: str = ""
    code_digests: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    groupwise: bool = False
    differentiable: bool = False
    headline: str | None = None
    columns: tuple[str, ...] = ()
    averaged: bool = True
    weights: Mapping[str, float] | None = None
    licence: str = ""
    choice: tuple[str, str | None] = ("model", None)
    choices: Mapping[str, str] = {"tiny": "Apache-2.0, ships with flowalign"}
    imports: tuple[str, ...] = ()
    cost: Cost | None = None
    downloads: Mapping[str, float] | None = {}
    resizes: frozenset[str] = frozenset({"model", "weights", "architecture"})
    reads: Mapping[str, tuple[str, Callable[[str], list[HubFiles]]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.name or cls.__name__
        if "__call__" in vars(cls):
            cls.__call__ = _any_images(cls.__call__)

    @classmethod
    def check_options(cls, *_: Any, **options: Any) -> None:
        """Raise ValueError for options that do not go together."""

    @classmethod
    def check_prompts(cls, prompts: Sequence[str], metadata: Metadata, **options: Any) -> None:
        """Raise ValueError if images of one of these prompts cannot be judged."""

    @classmethod
    def packages(cls, *_: Any, **options: Any) -> tuple[str, ...]:
        """The optional packages that it needs with these options."""
        return cls.imports

    @classmethod
    def made_of(cls, **options: Any) -> list[Mapping[str, Any]]:
        """The components {name, options} of a composed reward; [] for any other."""
        return []

    @classmethod
    def image_cost(cls, **options: Any) -> Cost | None:
        """The cost of an image with these options; zero for the tiny models."""
        if "tiny" in (options.get("model"), cls.chosen(**options)):
            return Cost()
        return None if cls.resizes & options.keys() else cls.cost

    @classmethod
    def files(cls, **options: Any) -> Mapping[str, float] | None:
        """{file: GB} to download with these options; {} for the tiny models, which ship with us."""
        if "tiny" in (options.get("model"), cls.chosen(**options)):
            return {}
        return None if cls.resizes & options.keys() else cls.downloads

    @classmethod
    def hub_files(cls, **options: Any) -> list[HubFiles]:
        """The files on the Hub that `reads` gives for these options."""
        reads = {} if cls.files(**options) == {} else cls.reads
        places = (find(options.get(o) or default) for o, (default, find) in reads.items())
        return [files for place in places for files in place]

    @classmethod
    def chosen(cls, **options: Any) -> Any:
        """The value of the option that chooses what scores."""
        option, default = cls.choice
        return options.get(option, default)

    def connect(self) -> None:
        """Called before a run. Raises ConnectionError or TimeoutError if a service that it needs
        does not answer."""

    def resize_factor(self, height: int, width: int) -> float:
        """The factor by which images of this size are resized before they are judged; 1 if
        unknown."""
        return 1.0

    def counts(
        self, metadata: Mapping[str, Any], parts: Mapping[str, float]
    ) -> Mapping[str, float]:
        """{part: weight} of an image's scores in the means of an evaluation. Any other part has
        weight 1; 0 = the part is no metric."""
        return {}

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings}

    def with_gradient(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """The value [B] of images [B,3,H,W] in [0,1], with a gradient where they have one. It may
        differ a little from that of `__call__`, which sees 8 bits a channel."""
        raise NotImplementedError

    def __call__(self, images: Any, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] with their B prompts and metadata -> Scores of B. A subclass
        gets tensors; a caller may pass PIL images, one image with its prompt, and no metadata."""
        raise NotImplementedError


def question_counts(metadata: Mapping[str, Any], parts: Mapping[str, float]) -> Mapping[str, float]:
    """{part: number of questions} of a reward that asks the questions in an image's metadata, for
    `RewardBase.counts`. The parts of a skill `a - b` and of `a` are means over these questions. The
    first question was not asked if the part `left_out` is 1."""
    counts = {"left_out": 0}
    skipped = 1 if parts.get("left_out") == 1 else 0
    for skill in metadata.get("skills", ())[skipped:]:
        for name in {skill, skill.split("-")[0].strip()}:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _any_images(call: Callable[..., Scores]) -> Callable[..., Scores]:
    """`__call__` of a reward, for images and prompts as a caller may give them."""

    @wraps(call)
    def wrapped(self: Any, images: Any, prompts: Any, metadata: Metadata | None = None) -> Scores:
        prompts = [prompts] if isinstance(prompts, str) else prompts
        metadata = [{}] * len(prompts) if metadata is None else metadata
        return call(self, stacked(images), prompts, metadata)

    return wrapped


# Members that are copied from a class, function or object that is no RewardBase.
MEMBERS = (
    "name", "groupwise", "differentiable", "headline", "columns", "weights", "check_options",
    "check_prompts", "packages", "made_of", "hub_files", "connect", "describe", "with_gradient",
)  # fmt: skip


class Wrapped(RewardBase):
    """A reward that is no RewardBase: a function, or an object with some of its members."""

    def __init__(self, reward: Any, **options: Any) -> None:
        self.reward = reward
        self.options = options  # of a function
        self.name = getattr(reward, "__name__", type(reward).__name__)
        _adopt(self, reward)

    def __call__(self, images: Any, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return self.reward(images, prompts, metadata, **self.options)


def as_class(factory: Callable[..., Any], options: Mapping[str, Any]) -> type[RewardBase]:
    """The class of a reward: a RewardBase itself, a subclass of Wrapped for anything else.

    A function that begins with the inputs of a reward, three parameters without a default that no
    option is for, is the reward. Any other function, and a class, makes it from the options.
    """
    if inspect.isclass(factory) and issubclass(factory, RewardBase):
        return factory
    signature = inspect.signature(factory)
    parameters = [*signature.parameters.values()]
    required = [p for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    inputs = [p for p in required[:INPUTS] if p.name not in options]
    is_reward = len(inputs) == INPUTS and not inspect.isclass(factory)
    if is_reward:
        signature = signature.replace(parameters=parameters[INPUTS:])

    class WrappedReward(Wrapped):
        __signature__ = signature

        @wraps(factory.__init__ if inspect.isclass(factory) else factory)  # for its annotations
        def __init__(self, **options: Any) -> None:
            if is_reward:
                super().__init__(factory, **options)
            else:
                super().__init__(factory(**options))

    _adopt(WrappedReward, factory)
    return WrappedReward


def _adopt(wrapper: Any, wrapped: Any) -> None:
    """Give a wrapper, a class or an object, the MEMBERS of what it wraps."""
    for name in MEMBERS:
        value = getattr(wrapped, name, None)
        if name == "weights" and not isinstance(value, Mapping):
            continue  # weights of a network
        if inspect.isclass(wrapper) and callable(value):
            value = staticmethod(value)
        if value is not None and not isinstance(value, property):
            setattr(wrapper, name, value)
