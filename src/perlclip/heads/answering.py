"""What an adapter answers for one list of classes: its method's text classifier and, where it has one, its head.

Made once per class list; whoever asks an adapter, asks this: `Classifier`, `evaluate`, adaptive thinking, analyses.

Shapes: K stands for the steps 0..K, B images, C classes, T those of them that were trained on, E embedding width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perlclip.backbone import Images
from perlclip.heads.head import Head, features
from perlclip.methods.base import ClassState, Method, full_precision
from perlclip.text.classes import class_keys
from perlclip.thinking.policy import Answer, Plan, Stages, image_trajectory, require_steps


class Answering:
    """A method with a class list, and the columns of a head that are on the list, in its order."""

    def __init__(self, method: Method, state: ClassState, head: Head | None = None) -> None:
        self.method, self.state = method, state
        self.head = None if head is None or head.idle else head
        if self.head is None:
            return
        device = method.backbone.device
        column = {key: i for i, key in enumerate(class_keys(self.head.class_names))} if self.head.scale else {}
        keys = class_keys(state.classes.names)
        columns = [column[key] for key in keys if key in column]
        self.trained_T = torch.tensor([i for i, key in enumerate(keys) if key in column], device=device)
        self.weight_TE, self.bias_T = self.head.weight_CE[columns].to(device), self.head.bias_C[columns].to(device)
        self.t0_CE: Tensor | None = None
        if self.head.share < 1:
            with torch.no_grad():
                self.t0_CE = method.backbone.encode_text(state.classes.prompts())

    def logits(self, images: Images) -> Tensor:
        """The answer, (B, C)."""
        return self.method.logits(images, self.state) if self.head is None else self.trajectory(images)[-1]

    def trajectory(self, images: Images) -> Tensor:
        """What would be answered after each step, (K+1, B, C); (1, B, C) for a method that answers at once."""
        return self.both(images)[0]

    def both(self, images: Images) -> tuple[Tensor, Tensor]:
        """The trajectory, and that of the method's texts alone, from one look."""
        if self.head is None:
            logits_KBC = self.method.trajectory(images, self.state)
            return logits_KBC, logits_KBC
        images = self.method.frozen(images)
        logits_KBC, v_KBE = self.method.look(images, self.state)
        v0_BE = self.method.backbone.encode_image(images) if self.t0_CE is not None else v_KBE[0]
        return self._finish(logits_KBC, self._features(v_KBE), v0_BE), logits_KBC

    def scores(self, images: Images) -> tuple[Tensor, Tensor]:
        """Each class's score whatever the others are, with the head's where it has one, and of texts alone: (B, C)."""
        images = self.method.frozen(images)
        logits_KBC, v_KBE = self.method.look(images, self.state)
        texts_BC, head = self.method.scores(logits_KBC, v_KBE, self.state), self.head
        if head is None:
            return texts_BC, texts_BC
        with full_precision(texts_BC.device):
            if self.t0_CE is not None:
                zero_BC = self.method.similarity(self.method.backbone.encode_image(images), self.t0_CE)
                texts_BC = head.share * texts_BC + (1 - head.share) * zero_BC
            if not len(self.trained_T):
                return texts_BC, texts_BC
            seen_BF = self._features(v_KBE)[-1]
            both_BT = head.text * texts_BC[:, self.trained_T] + head.scale * (seen_BF @ self.weight_TE.T + self.bias_T)
            return texts_BC.index_copy(-1, self.trained_T, both_BT), texts_BC

    def finish(self, logits_KBC: Tensor, v_KBE: Tensor) -> Tensor:
        """The same from a trajectory and embeddings of PERL's, whose step 0 is zero-shot CLIP."""
        return logits_KBC if self.head is None else self._finish(logits_KBC, self._features(v_KBE), v_KBE[0])

    def stages(self, compile: str = "off") -> Stages:
        """What `Plan.answer` goes through with images, each stage as a graph where `compile` is on."""
        return Stages(require_steps(self.method), self.state, self._stopped if self.head else None, compile)

    def answer(self, plan: Plan, images: Images) -> Answer:
        """Each image after as many steps as the plan has it take."""
        return plan.answer(images, self.stages())

    def image_trajectory(self, v_KBE: Tensor) -> Tensor:
        """What is answered if images with these embeddings stop after each step, as adaptive thinking has them."""
        method = require_steps(self.method)
        return image_trajectory(method, v_KBE, self.state, self._stopped if self.head else None)

    def _stopped(self, logits_BC: Tensor, v: Sequence[Tensor]) -> Tensor:
        """The last answer of images that took these steps."""
        return self._finish(logits_BC, self._features(torch.stack(list(v)))[-1], v[0])

    def _features(self, v_kBE: Tensor) -> Tensor:
        assert self.head is not None
        return features(self.head.features, v_kBE, self.method.image_steps)

    def _finish(self, logits: Tensor, seen: Tensor, v0_BE: Tensor) -> Tensor:
        """Logits (…, B, C) and features (…, B, F) to the answer."""
        head = self.head
        assert head is not None
        with full_precision(logits.device):
            if self.t0_CE is not None:
                logits = head.share * logits + (1 - head.share) * self.method.similarity(v0_BE, self.t0_CE)
            if not len(self.trained_T):
                return logits
            scores = head.scale * (seen @ self.weight_TE.T + self.bias_T)
            if len(self.trained_T) == logits.shape[-1]:
                return head.text * logits + scores
            text = logits[..., self.trained_T]
            both = head.text * text + scores
            mass = text.logsumexp(-1, keepdim=True) - both.logsumexp(-1, keepdim=True) + head.offset
            return logits.index_copy(-1, self.trained_T, both + mass.detach())  # which is no class's own
