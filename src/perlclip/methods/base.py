"""The contract every method fulfils, and the registry that finds a method by name.

A method is one file: a `Config` dataclass, a `Method` subclass, `@register`. It gets a frozen backbone and adds its own
parameters, which are all of `method.parameters()`: the backbone is no submodule.

Shapes: B images, C classes, E shared embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone
from perlclip.errors import PerlclipError, unknown_name

# Which values the parameters have: their storage and in-place version counters.
Stamp = tuple[tuple[int, int], ...]


@dataclass(kw_only=True)
class ClassState:
    """What is constant for one list of classes, computed once: here the prompts; methods add their frozen parts."""

    prompts: tuple[str, ...]
    kept: dict[str, tuple[Stamp, Tensor]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A method's settings; subclasses add fields with defaults and check them further in `__post_init__`."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kind = getattr(self, f.name), type(f.default)
            if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
                raise PerlclipError(f"setting {f.name!r} must be of type {kind.__name__}, got {value!r}")


class Method(nn.Module):
    """A frozen CLIP plus a few trained parameters."""

    name: ClassVar[str]
    summary: ClassVar[str]
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

    def class_state(self, prompts: Sequence[str]) -> ClassState:
        """Everything about these classes that training does not change."""
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

    def similarity(self, v_BE: Tensor, t_CE: Tensor) -> Tensor:
        """tau v tᵀ with CLIP's frozen logit scale, in float32."""
        with torch.autocast(v_BE.device.type, enabled=False):
            return self.backbone.logit_scale * v_BE.float() @ t_CE.float().T

    def class_embeddings(self, state: ClassState) -> Tensor:
        """`encode_text`, encoded once per evaluation."""
        return self.keep(state, self.encode_text)

    def keep(self, state: ClassState, encode: Callable[[ClassState], Tensor]) -> Tensor:
        """`encode(state)`, kept until a parameter changes in place; never kept while gradients are recorded."""
        if torch.is_grad_enabled() or any(p.is_inference() for p in self.parameters()):
            return encode(state)
        stamp = tuple((p.data_ptr(), p._version) for p in self.parameters())
        kept = state.kept.get(encode.__name__)
        if kept is None or kept[0] != stamp:
            kept = state.kept[encode.__name__] = stamp, encode(state)
        return kept[1]


_REGISTRY: dict[str, type[Method]] = {}


def register(name: str, *, summary: str, venue: str) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: make a method known by name."""

    def add(cls: type[Method]) -> type[Method]:
        cls.name, cls.summary, cls.venue = name, summary, venue
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
    settings = cls.config_class(**config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = cls(backbone, settings)
    return method.to(backbone.device)


def config_dict(method: Method) -> dict[str, Any]:
    """A method's settings as plain data."""
    return asdict(method.config)
