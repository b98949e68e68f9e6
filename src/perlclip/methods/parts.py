"""What several methods are built from: learned words, frozen class texts, deep prompts in both towers.

Shapes: B images, C classes, n prompts, N rows, D tower width, E shared width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from perlclip.backbone import Backbone, Images, SharedText, Tower, cls_rows
from perlclip.errors import PerlclipError
from perlclip.methods.base import ClassState, Method, cosine_distance, full_precision
from perlclip.methods.settings import Config, later
from perlclip.text.classes import Classes
from perlclip.text.templates import DEFAULT_TEMPLATE

PHRASE = "a photo of a"
WORDS = len(PHRASE.split())
CENTER = 0.75  # the share that recipes of ours take off: chosen on validation images (docs/strong.md)


@dataclass(kw_only=True)
class FrozenTextState(ClassState):
    """The class embeddings themselves, where nothing about the text is trained."""

    t_CE: Tensor


@dataclass(frozen=True, kw_only=True)
class CenteredConfig(Config):
    """Settings of a method whose images are centered."""

    adjustable: ClassVar[frozenset[str]] = frozenset({"center"})

    center: float = later(0.0)  # share of the shots' mean embedding that is taken off images before they meet texts

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(center=(0.0, 2.0))


class HeadAlone(Method):
    """The frozen CLIP, to be given a head, which is all that is learned."""

    head_alone = True

    def prepare(self, classes: Classes) -> FrozenTextState:
        """Encode the prompts, once and for all."""
        return FrozenTextState(classes=classes, t_CE=self.backbone.encode_text(classes.prompts()))

    def encode_text(self, state: ClassState) -> Tensor:
        """The embeddings made by `prepare`."""
        assert isinstance(state, FrozenTextState)
        return state.t_CE


@dataclass(kw_only=True)
class PromptState(ClassState):
    """The class texts as rows of the text tower."""

    text: SharedText


@dataclass(kw_only=True)
class ReferenceState(PromptState):
    """The same, and the frozen CLIP's embedding of each class, made when it is first asked for."""

    reference: Callable[[], Tensor]

    @cached_property
    def t0_CE(self) -> Tensor:
        """Unit vectors, (C, E)."""
        # As good as can be, whatever the moment it is first asked for: in full precision, and fit for a graph.
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.text.eos_C.device):
            return self.reference()


@dataclass(frozen=True, kw_only=True)
class WordsConfig(Config):
    """Settings of learned words, with the values of CoOp's authors' base-to-novel runs."""

    tokens: int = 4  # M, learned vectors
    init: str = PHRASE  # the words whose first M tokens they start as; "" for random

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf))


class LearnedWords(Method):
    """Learned vectors in the place of the words before the class name; the image tower is frozen (CoOp's form)."""

    config: WordsConfig

    def __init__(self, backbone: Backbone, config: WordsConfig) -> None:
        super().__init__(backbone, config)
        self.context = learned_words(backbone, config.tokens, config.init)

    def names_behind(self, classes: Classes, tail: str = "{}.") -> SharedText:
        """The sentences from the class name on, behind free positions for the learned words."""
        return self.backbone.shared_text(classes.prompts(tail), free=self.config.tokens)

    def prepare(self, classes: Classes) -> PromptState:
        """The names behind M free positions."""
        return PromptState(classes=classes, text=self.names_behind(classes))

    def encode_text(self, state: ClassState) -> Tensor:
        """The learned sentence of each class, (C, E)."""
        assert isinstance(state, PromptState)
        return self.backbone.text.project(state.text.put_words(self.context).pool())

    def guided_loss(self, images: Images, labels: Tensor, state: ClassState, weight: float) -> Tensor:
        """Cross-entropy plus a pull of every class of the list towards the frozen text, whether in the batch or not."""
        assert isinstance(state, ReferenceState)
        t_CE = self.class_embeddings(state)
        classification = self.classify(self.encode_image(images), t_CE, labels)
        return classification + weight * cosine_distance(t_CE, state.t0_CE)

    def sentence(self, template: str) -> str:
        """The learned words and the name, whatever the template."""
        return "V " * self.config.tokens + "{}."


def target_sentence(classes: Classes, chosen: str, known: Mapping[str, str], by_target: bool) -> str:
    """What is said of these classes: the setting or, where it goes `by_target`, the authors' text for that data set.

    Nothing stands for the data set's own template.
    """
    return known.get(classes.dataset, "") if by_target and classes.dataset else chosen


def learned_words(backbone: Backbone, count: int, phrase: str) -> nn.Parameter:
    """Vectors in the place of words: the phrase's first `count` tokens, or N(0, 0.02) without a phrase."""
    rows_nD = backbone.word_rows(phrase, count) if phrase else torch.randn(count, backbone.text.width) * 0.02
    return nn.Parameter(rows_nD.clone())


def require_start(method: Method, setting: str, block: int, *towers: Tower) -> None:
    """A block from which a method is at work must be there in each tower."""
    shallowest = min(tower.depth for tower in towers)
    if block >= shallowest:
        raise PerlclipError(f"{method.name}: {setting} must be below the tower's {shallowest} blocks, got {block}")


# ---- deep prompts ----


def require_depth(method: Method, depth: int) -> None:
    """Prompts for more blocks than there are would be lost."""
    shallowest = min(method.backbone.vision.depth, method.backbone.text.depth)
    if depth > shallowest:
        raise PerlclipError(f"{method.name}: depth must be at most the tower's {shallowest} blocks, got {depth}")


def sentences_with_room(backbone: Backbone, classes: Classes, template: str, tokens: int) -> SharedText:
    """Sentences whose first words are learned; the class name must not be among those words.

    More words than "a photo of a" has stand before the name alone, as with the authors.
    """
    if template == DEFAULT_TEMPLATE and tokens > WORDS:
        return backbone.shared_text(classes.prompts("{}."), free=tokens)
    sentence = template or classes.template
    try:
        backbone.word_rows(sentence.partition("{}")[0], tokens)
    except PerlclipError as error:
        raise PerlclipError(f"{tokens} words before the name are to be learned in {sentence!r}: {error}") from error
    return backbone.shared_text(classes.prompts(sentence))


def prompted_text(text: SharedText, prompts: list[Tensor]) -> Tensor:
    """The text tower with prompts[k] at rows 1..n of the input of block k + 1, read at EOS: (C, D)."""
    return text.put_words(prompts[0]).pool(
        before=lambda i, text: text.put(prompts[i]) if 0 < i < len(prompts) else text
    )


def prompted_image(vision: Tower, x_BND: Tensor, prompts: list[Tensor]) -> Tensor:
    """The vision tower with prompts[k] behind the patches at the input of block k + 1, read out: (B, D).

    A pooling head sees the last rows: there, prompts stand before the patches, which is the same to attention.
    """
    norm, N, before = vision.embed.norm, x_BND.shape[1], not vision.starts
    assert isinstance(norm, nn.Module)
    for i in range(vision.depth):
        if i < len(prompts):
            rows_nD = prompts[i].to(x_BND.dtype)
            rows_nD = rows_nD if i else norm(rows_nD)  # the first prompts pass the first norm
            rows_BnD = rows_nD.expand(len(x_BND), -1, -1)
            x_BND = torch.cat([rows_BnD, x_BND[:, -N:]] if before else [x_BND[:, :N], rows_BnD], 1)
        x_BND = vision.block(i, x_BND) if i < vision.depth - 1 else x_BND
    return vision.read(x_BND, cls_rows(x_BND))
