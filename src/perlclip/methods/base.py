"""The contract every method fulfils, and the registry that finds a method by name.

A method is one file: a `Config` dataclass, a `Method` subclass, `@register`. It gets a frozen backbone and adds its own
parameters, which are all of `method.parameters()`: the backbone is no submodule. Parameters are float32 whatever the
towers compute in.

Shapes: B images, C classes, E shared embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatch
from itertools import count
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from perlclip.backbone import Backbone
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.classes import Classes
from perlclip.text.templates import check_template

# Sentences among the settings, wherever a method has one by that name; "" stands for the data set's own.
TEMPLATES = ("template", "reference", "tail")

# Fused optimisers change parameters without telling autograd, so their steps are counted.
_steps = count()
_last_step = [0]
register_optimizer_step_post_hook(lambda *_: _last_step.__setitem__(0, next(_steps) + 1))


@dataclass(frozen=True)
class Kept:
    """A value, and what it was computed with; the parameters are held, so that no other can take their address."""

    value: Tensor
    parameters: tuple[Tensor, ...]
    stamp: tuple[Any, ...]


@dataclass(kw_only=True)
class ClassState:
    """What is constant for one list of classes, computed once: here the names; methods add their frozen parts.

    `novel` says that the method was trained on other classes, which some methods answer differently.
    """

    classes: Classes
    novel: bool = False
    kept: dict[str, Kept] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A method's settings; subclasses add annotated fields with defaults and check them further in `__post_init__`."""

    def __post_init__(self) -> None:
        for name, hint in setting_types(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            if not any(_fits(value, kind) for kind in hint):
                kinds = " or ".join(_spoken(kind) for kind in hint)
                raise PerlclipError(f"setting {name!r} must be of type {kinds}, got {value!r}")
            if name in TEMPLATES and value:
                check_template(value)

    def require(self, **limits: tuple[float, float]) -> None:
        """Each named number within its two bounds, which are allowed; infinities and NaN are not."""
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high or value == float("inf"):
                bound = f"at least {low} and finite" if high == float("inf") else f"in {low}..{high}"
                raise PerlclipError(f"{name} must be {bound}, got {value}")


def setting_types(config: type[Config]) -> dict[str, tuple[Any, ...]]:
    """The types that each setting may have."""
    hints = get_type_hints(config)
    return {
        f.name: get_args(hints[f.name]) if isinstance(hints[f.name], UnionType) else (hints[f.name],)
        for f in fields(config)
    }


def parse_setting(config: type[Config], name: str, text: str) -> Any:
    """`7`, `0.5`, `vision`, or `3,7,11` as the type that the setting has; templates are separated by `;`."""
    for kind in setting_types(config)[name]:
        try:
            if get_origin(kind) is tuple:
                item = get_args(kind)[0]
                parts = text.split(";" if item is str else ",")
                return tuple(item(part.strip()) for part in parts if part.strip())
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            return kind(text)
        except (ValueError, KeyError):
            continue
    kinds = " or ".join(_spoken(kind) for kind in setting_types(config)[name])
    raise PerlclipError(f"--set {name} takes a value of type {kinds}, got {text!r}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and len(value) > 0 and all(_fits(item, get_args(kind)[0]) for item in value)
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))


def _spoken(kind: Any) -> str:
    return f"list of {get_args(kind)[0].__name__}" if get_origin(kind) is tuple else str(kind.__name__)


class Method(nn.Module):
    """A frozen CLIP plus a few trained parameters."""

    name: ClassVar[str]
    summary: ClassVar[str]
    where: ClassVar[str]
    venue: ClassVar[str]
    config_class: ClassVar[type[Config]] = Config

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config

    @property
    def num_trainable(self) -> int:
        """Trained parameters, to the unit."""
        return sum(p.numel() for p in self.parameters())

    def class_state(self, classes: Classes | Sequence[str], *, novel: bool = False) -> ClassState:
        """Everything about these classes that training does not change; `novel`: others were trained on.

        `classes` are names with a template, or just prompts.
        """
        with torch.no_grad():
            state = self.prepare(Classes.of(classes))
        state.novel = novel
        return state

    def prepare(self, classes: Classes) -> ClassState:
        """The method's part of `class_state`."""
        raise NotImplementedError

    def encode_text(self, state: ClassState) -> Tensor:
        """Unit class embeddings, (C, E)."""
        raise NotImplementedError

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Unit image embeddings, (B, E)."""
        raise NotImplementedError

    def logits(self, pixels: Tensor, state: ClassState) -> Tensor:
        """Scaled cosine of each image with each class, (B, C)."""
        return self.similarity(self.encode_image(pixels), self.class_embeddings(state))

    def trajectory(self, pixels: Tensor, state: ClassState) -> Tensor:
        """Logits of every refinement step, (K+1, B, C); (1, B, C) for a method that answers at once."""
        return self.logits(pixels, state)[None]

    def loss(self, pixels: Tensor, labels: Tensor, state: ClassState) -> Tensor:
        """The training objective; cross-entropy unless the method says otherwise."""
        return F.cross_entropy(self.logits(pixels, state), labels)

    def classify(self, v_BE: Tensor, t_CE: Tensor, labels: Tensor) -> Tensor:
        """CE(tau v Tᵀ, y), the part that all losses have in common."""
        return F.cross_entropy(self.similarity(v_BE, t_CE), labels)

    def frozen_image(self, pixels: Tensor) -> Tensor:
        """The frozen CLIP's image embeddings, without a graph unless the pixels ask for one."""
        with self.no_graph(pixels):
            return self.backbone.encode_image(pixels)

    def image_rows(self, pixels: Tensor, stop: int = 0) -> Tensor:
        """The image before block `stop`, all of it frozen."""
        with self.no_graph(pixels):
            return self.backbone.vision.run(self.backbone.vision.embed(pixels), 0, stop)

    def sentence(self, template: str) -> str:
        """What is said of a class when the data set's template is this one; V is a learned word."""
        return getattr(self.config, "template", "") or template

    def no_graph(self, pixels: Tensor) -> torch.set_grad_enabled:
        """Frozen work on images records no graph, unless someone wants gradients with respect to the pixels."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad)

    def similarity(self, v_BE: Tensor, t_CE: Tensor) -> Tensor:
        """tau v tᵀ with CLIP's frozen logit scale, in float32."""
        with torch.autocast(v_BE.device.type, enabled=False):
            return self.backbone.logit_scale * v_BE.float() @ t_CE.float().T

    def class_embeddings(self, state: ClassState) -> Tensor:
        """`encode_text`, encoded once per evaluation."""
        return self.keep(state, self.encode_text)

    def keep(self, state: ClassState, encode: Callable[[ClassState], Tensor]) -> Tensor:
        """`encode(state)`, kept until a parameter changes; never kept while gradients are recorded."""
        parameters = tuple(self.parameters())
        if torch.is_grad_enabled() or any(p.is_inference() for p in parameters):
            return encode(state)
        stamp = self.stamp()
        kept = state.kept.get(encode.__name__)
        if kept is None or kept.stamp != stamp:
            kept = state.kept[encode.__name__] = Kept(encode(state), parameters, stamp)
        return kept.value

    def stamp(self) -> tuple[Any, ...]:
        """What an answer depends on beside the input: other when a parameter, a setting or the precision is."""
        device = self.backbone.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        versions = [(id(p), p.data_ptr(), -1 if p.is_inference() else p._version) for p in self.parameters()]
        return (*versions, _last_step[0], self.config, autocast)


def full_precision(device: torch.device) -> torch.autocast:
    """Without autocast, for what is computed once and kept."""
    return torch.autocast(device.type, enabled=False)


def cosine_distance(a_BE: Tensor, b_BE: Tensor) -> Tensor:
    """1 - mean cosine of paired unit vectors."""
    return 1 - (a_BE * b_BE).sum(-1).mean()


_REGISTRY: dict[str, type[Method]] = {}


def register(name: str, *, summary: str, where: str, venue: str) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: make a method known by name, with what it trains, where in the towers, and its paper."""

    def add(cls: type[Method]) -> type[Method]:
        cls.name, cls.summary, cls.where, cls.venue = name, summary, where, venue
        _REGISTRY[name] = cls
        return cls

    return add


def list_methods(pattern: str = "*") -> list[str]:
    """Names of the methods, or of those that match a pattern such as `mm*`."""
    return [name for name in _REGISTRY if fnmatch(name, pattern)]


def method_class(name: str) -> type[Method]:
    """The class registered under a name."""
    if name not in _REGISTRY:
        raise unknown_name("method", name, _REGISTRY)
    return _REGISTRY[name]


def create_method(name: str, backbone: Backbone, *, seed: int = 1, **config: Any) -> Method:
    """A method by name, its parameters initialised from `seed` (alike on every device)."""
    cls = method_class(name)
    known = {f.name for f in fields(cls.config_class)}
    for key in config:
        if key not in known:
            raise unknown_name(f"setting of method {name!r}:", key, known)
    try:
        settings = cls.config_class(**config)
    except PerlclipError as error:
        raise PerlclipError(f"{name}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = cls(backbone, settings)
    return method.to(backbone.device)


def config_dict(method: Method) -> dict[str, Any]:
    """A method's settings as plain data."""
    return asdict(method.config)
