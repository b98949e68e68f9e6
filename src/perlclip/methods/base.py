"""The contract every method fulfils.

A method is one file: a `Config` dataclass, a `Method` subclass, `@register` with its recipes. It gets a frozen backbone
and adds its own parameters, which are all of `method.parameters()`: the backbone is no submodule. Parameters are
float32 whatever the towers compute in.

For images, methods take pixels or a `FrozenImages`, which holds what the frozen tower has made of them already. For
classes they take a `ClassState`, made once for a list of classes; it also keeps the class embeddings, for as long as
the method's parameters have the same `version`.

Shapes: B images, C classes, E shared embedding width; K stands for the steps 0..K.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar, Self
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone, FrozenImages, Images
from perlclip.errors import PerlclipError
from perlclip.methods.recipe import Recipe, Rule
from perlclip.methods.settings import Config
from perlclip.text.classes import Classes


class Encoding:
    """Class embeddings, and whose they are: a method's, at a version of its parameters.

    A backward pass through one of these spoils it. That is how an own training loop is noticed whose optimiser changes
    parameters without telling PyTorch, as fused ones do.
    """

    def __init__(self, method: "Method", t_KCE: Tensor) -> None:
        self.method, self.version, self.t_KCE = method, method.version, t_KCE
        self.parameters = tuple(method.parameters())
        self.spoilt = False
        mine = ref(self)
        trained = [p for p in self.parameters if p.requires_grad]
        watch: Any = Tensor.register_post_accumulate_grad_hook
        hooks = [watch(p, lambda _: _spoil(mine())) for p in trained]
        finalize(self, lambda: [hook.remove() for hook in hooks])

    def holds(self, method: "Method") -> bool:
        """Whether it would come out the same now."""
        same = self.method is method and self.version == method.version and not self.spoilt
        return same and all(a is b for a, b in zip_longest(self.parameters, method.parameters()))


def _spoil(encoding: Encoding | None) -> None:
    if encoding is not None:
        encoding.spoilt = True


@dataclass(kw_only=True)
class ClassState:
    """What is constant for one list of classes, computed once: here the names; methods add their frozen parts.

    `novel` says that the method was trained on other classes, which some methods answer differently; `replay`, that
    its texts may be encoded by CUDA graphs.
    """

    classes: Classes
    novel: bool = False
    replay: bool = False
    encoding: Encoding | None = field(default=None, repr=False)


class Method(nn.Module):
    """A frozen CLIP plus a few trained parameters."""

    name: ClassVar[str]
    summary: ClassVar[str]
    where: ClassVar[str]
    venue: ClassVar[str]
    recipes: ClassVar[dict[str, Recipe]]
    rules: ClassVar[tuple[Rule, ...]]
    config_class: ClassVar[type[Config]] = Config
    head_alone: ClassVar[bool] = False  # whether a head is all that is learned
    head_by: ClassVar[str] = "discriminant"  # how a head is made, see `choose_head`
    made_for: tuple[str, str, int] = ("", "", 0)  # the recipe, data set and shots whose settings it has
    as_written: bool = False  # names are taken as they are, not as CLIP reads them: so it was with 0.1.0's adapters
    center_E: Tensor | None
    given: frozenset[str] = frozenset()  # settings that its maker chose, which no recipe changes

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        self._changes = 0
        # Room for what `take_center` takes off images, where the method has a setting for that.
        room = torch.zeros(backbone.embed_dim) if hasattr(config, "center") else None
        self.register_buffer("center_E", room, persistent=False)

    @classmethod
    def trains(cls, config: Config) -> bool:
        """Whether there is anything to train with these settings."""
        return True

    @property
    def num_trainable(self) -> int:
        """Trained parameters, to the unit."""
        return sum(p.numel() for p in self.parameters())

    @property
    def num_learned(self) -> int:
        """Numbers that the shots have set: trained parameters, and the center of images."""
        return sum(tensor.numel() for tensor in self.learned().values())

    def learned(self) -> dict[str, Tensor]:
        """All numbers that the shots have set, by name: what an adapter is."""
        center = {"center": self.center_E} if self.center and self.center_E is not None else {}
        return {**dict(self.named_parameters()), **center}

    @property
    def image_steps(self) -> int | None:
        """Refinement steps that an image takes unless told otherwise; None for a method that answers at once."""
        return None

    @property
    def image_depth(self) -> int | None:
        """After how many frozen blocks it goes on from an image's rows; None if it does not."""
        return None

    def class_state(self, classes: Classes | Sequence[str], *, novel: bool = False) -> ClassState:
        """Everything about these classes that training does not change; `novel`: others were trained on.

        `classes` are names with a template, or just prompts.
        """
        found = Classes.of(classes)
        with torch.no_grad():
            state = self.prepare(found if self.as_written else found.plain())
        state.novel = novel
        return state

    def prepare(self, classes: Classes) -> ClassState:
        """The method's part of `class_state`."""
        raise NotImplementedError

    def encode_text(self, state: ClassState) -> Tensor:
        """Unit class embeddings, (C, E)."""
        raise NotImplementedError

    def encode_image(self, images: Images) -> Tensor:
        """Unit image embeddings, (B, E): CLIP's own, unless the method says otherwise."""
        return self.backbone.encode_image(self.frozen(images))

    @property
    def sees_as_clip(self) -> bool:
        """Whether an answer is the plain similarity of CLIP's own image embedding with the class embeddings."""
        mine = type(self)
        return all(getattr(mine, name) is getattr(Method, name) for name in ("encode_image", "logits", "trajectory"))

    def encode_text_steps(self, state: ClassState) -> Tensor:
        """Class embeddings of every refinement step, (K+1, C, E); (1, C, E) for a method that answers at once."""
        return self.encode_text(state)[None]

    def logits(self, images: Images, state: ClassState) -> Tensor:
        """Scaled cosine of each image with each class, (B, C)."""
        return self.similarity(self.encode_image(images), self.class_embeddings(state))

    def trajectory(self, images: Images, state: ClassState) -> Tensor:
        """Logits of every refinement step, (K+1, B, C); (1, B, C) for a method that answers at once."""
        return self.logits(images, state)[None]

    def encode_image_steps(self, images: Images) -> Tensor:
        """Image embeddings of every refinement step, (K+1, B, E); (1, B, E) for a method that answers at once."""
        return self.encode_image(images)[None]

    def look(self, images: Images, state: ClassState) -> tuple[Tensor, Tensor]:
        """`trajectory` and `encode_image_steps` in one; the classes are constants, gradients reach the images alone.

        Where logits are the plain similarity, one pass gives both.
        """
        if type(self).logits is Method.logits and type(self).trajectory is Method.trajectory:
            with torch.no_grad():
                t_CE = self.class_embeddings(state)
            v_BE = self.encode_image(images)
            return self.similarity(v_BE, t_CE)[None], v_BE[None]
        images = self.frozen(images)
        return self.trajectory(images, state), self.encode_image_steps(images)

    def answers(self, v_KBE: Tensor, state: ClassState) -> Tensor | None:
        """The logits of images with these embeddings, (1, B, E), at once: (B, C); None where it takes more."""
        return self.similarity(v_KBE[-1], self.class_embeddings(state)) if self.sees_as_clip else None

    def scores(self, logits_KBC: Tensor, v_KBE: Tensor, state: ClassState) -> Tensor:
        """Of what `look` gave, each class's score whatever the others are: scale times cosine, last step, (B, C)."""
        return logits_KBC[-1]

    def loss(self, images: Images, labels: Tensor, state: ClassState) -> Tensor:
        """The training objective; cross-entropy unless the method says otherwise."""
        return F.cross_entropy(self.logits(images, state), labels)

    def classify(self, v_BE: Tensor, t_CE: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        """CE(tau v Tᵀ, y), the part that all losses have in common; `scale` is a share of tau."""
        return F.cross_entropy(self.backbone.similarity(v_BE, t_CE, scale), labels)

    def frozen(self, images: Images) -> FrozenImages:
        """What the frozen image tower makes of them, through the method's lens."""
        return self.backbone.frozen(images, self.config.lens)

    def sentence(self, template: str) -> str:
        """What is said of a class when the data set's template is this one; V is a learned word."""
        return getattr(self.config, "template", "") or template

    def similarity(self, v_BE: Tensor, t_CE: Tensor) -> Tensor:
        """What answers are made of: tau (v - c) tᵀ, with c the center that is taken off images, (B, C)."""
        if self.center and self.center_E is not None:
            v_BE = v_BE.float() - self.center_E
        return self.backbone.similarity(v_BE, t_CE)

    @torch.no_grad()
    def take_center(self, center_E: Tensor) -> None:
        """From now on the method's share of the images' mean embedding is taken off them."""
        assert self.center_E is not None
        self.center_E.copy_(self.center * center_E)  # in place: recorded graphs read it there
        self.changed()

    def taken_off(self, t_CE: Tensor) -> Tensor:
        """By how much images are less similar to each of these texts for it, (C,)."""
        if not self.center or self.center_E is None:
            return t_CE.new_zeros(len(t_CE))
        return self.backbone.similarity(self.center_E.to(t_CE), t_CE)

    @property
    def center(self) -> float:
        """The share of the images' mean embedding that is taken off them before they meet texts."""
        return float(getattr(self.config, "center", 0.0))

    def class_embeddings(self, state: ClassState) -> Tensor:
        """`encode_text`, made once for a state and a version of the parameters; anew while gradients are recorded."""
        return self.encode_text(state) if torch.is_grad_enabled() else self.class_embedding_steps(state)[-1]

    def class_embedding_steps(self, state: ClassState) -> Tensor:
        """`encode_text_steps` in the same way."""
        # A parameter with a gradient is in the middle of an own loop, and may change unnoticed.
        if torch.is_grad_enabled() or any(p.grad is not None for p in self.parameters()):
            return self.encode_text_steps(state)
        kept = state.encoding
        if kept is None or not kept.holds(self):
            kept = state.encoding = Encoding(self, self.encode_text_steps(state))
        return kept.t_KCE

    @property
    def version(self) -> tuple[Any, ...]:
        """What an answer depends on beside its input: another one after a training, a change of a parameter or setting.

        `fit` raises it with every step (`changed`); other changes in place are counted by PyTorch, but for those
        through `p.data`, after which one calls `changed`.
        """
        device = self.backbone.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        written = sum(0 if p.is_inference() else p._version for p in self.parameters())
        return self._changes, written, self.config, autocast

    def changed(self) -> None:
        """The parameters are no longer what they were."""
        self._changes += 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`method.to(device)` takes the backbone along: a copy of it, as others may share this one."""
        moved = fn(torch.empty(0, device=self.backbone.device))
        if moved.dtype in (torch.float16, torch.bfloat16):
            raise PerlclipError("a method's parameters stay in float32; load its backbone in another dtype instead")
        self.backbone = self.backbone.to(moved.device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


def full_precision(device: torch.device) -> torch.autocast:
    """Without autocast, for what is computed once and kept."""
    return torch.autocast(device.type, enabled=False)


def cosine_distance(a_BE: Tensor, b_BE: Tensor) -> Tensor:
    """1 - mean cosine of paired unit vectors."""
    return 1 - (a_BE * b_BE).sum(-1).mean()


def config_dict(method: Method) -> dict[str, Any]:
    """A method's settings as plain data."""
    return method.config.as_dict()
