"""What an adapter answers for one list of classes: its method's text classifier and, where it has one, its head.

Made once per class list; whoever asks an adapter, asks this: `Classifier`, `evaluate`, adaptive thinking, analyses.

Shapes: K stands for the steps 0..K, B images, C classes, E embedding width, F that of the head's features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perlclip.backbone import Images
from perlclip.heads.head import Head, features, sees_frozen
from perlclip.heads.unseen import means_of
from perlclip.methods.base import ClassState, Method, full_precision
from perlclip.text.classes import Classes, class_keys
from perlclip.thinking.policy import Answer, Plan, Stages, image_trajectory, require_steps


class Answering:
    """A method with a class list, and what a head adds to each class on it: text l_text + W f + M m + b.

    In a list with trained classes and new ones, `mass` (a weight and a bias for features, to which `mass_text` times
    the texts are added and from which `gained_S` is taken off, by the steps taken; or else the texts) says how probable
    the classes of either kind are together.
    """

    def __init__(self, method: Method, state: ClassState, head: Head | None = None) -> None:
        self.method, self.state = method, state
        self.head = None if head is None or head.idle else head
        self.t0_CE: Tensor | None = None
        self.weight_CF: Tensor | None = None
        self.beyond: tuple[Tensor, Tensor] | None = None  # the middle's weight and bias
        self.mass: tuple[Tensor, Tensor] | None = None
        self.mass_text, self.gained_S = 0.0, torch.empty(0)
        if self.head is None:
            return
        if self.head.share < 1:
            with torch.no_grad():
                self.t0_CE = method.backbone.encode_text(state.classes.prompts())
        self._take(self.head)

    def _take(self, head: Head) -> None:
        """What the head says about each class on the list."""
        keys, column = class_keys(self.state.classes.names), {}
        spoken = head.scale or head.middle is not None
        if spoken or head.unseen:
            column = {key: i for i, key in enumerate(class_keys(head.class_names))}
        known = [i for i, key in enumerate(keys) if key in column]
        new = sorted(set(range(len(keys))) - set(known))
        columns = [column[keys[i]] for i in known]
        trained_C = torch.zeros(len(keys), dtype=torch.bool)
        trained_C[known] = True
        # Sentences of their own say more than the names of the trained classes would: no difference to go by.
        self.mixed, unseen = bool(known and new), head.unseen if new and not self.state.classes.sentences else None
        if not (known and spoken) and unseen is None:
            self.mixed = False
            return
        weight_CF, bias_C = torch.zeros(len(keys), head.weight_CE.shape[1]), torch.zeros(len(keys))
        text_C = torch.ones(len(keys))
        if spoken:
            weight_CF[known], bias_C[known] = head.scale * head.weight_CE[columns], head.scale * head.bias_C[columns]
            text_C[known] = head.text
        if known and head.middle:
            middle_CF, middle_C = torch.zeros(len(keys), head.middle.weight_CF.shape[1]), torch.zeros(len(keys))
            middle_CF[known], middle_C[known] = head.middle.weight_CF[columns], head.middle.bias_C[columns]
            self.beyond = self._there(middle_CF), self._there(middle_C)
        if unseen is not None:
            assert head.gaussians is not None
            rule, kept = unseen.among if known else unseen.alone, head.gaussians
            t_CE, t_KE = self._texts(head)
            means_CE = torch.zeros(len(keys), kept.means_CE.shape[1], dtype=torch.float64)
            means_CE[known], means_CE[new] = kept.means_CE[columns], means_of(kept, t_KE, t_CE[new], rule)
            w_CE, b_C = (rule.scale * each for each in kept.scores_of(means_CE, rule.strength))
            weight_CF[new], bias_C[new], text_C[new] = w_CE[new].float(), b_C[new].float(), rule.text
            if known:
                b_C = b_C + unseen.offset * trained_C
                if unseen.gained:
                    steps, last = self.method.image_steps or 0, len(unseen.gained) - 1
                    gained = [unseen.gained[min(k, last)] for k in range(steps + 1)]
                    self.mass_text, self.gained_S = rule.text, self._there(torch.tensor(gained))
                else:
                    w_CE = w_CE + rule.text * self.method.backbone.logit_scale * t_CE.double()
                    b_C = b_C - rule.text * self.method.taken_off(t_CE)
                self.mass = self._there(w_CE.float()), self._there(b_C.float())
        self.weight_CF, self.bias_C, self.text_C, self.trained_C = map(
            self._there, (weight_CF, bias_C, text_C, trained_C)
        )

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.method.backbone.device)

    @torch.no_grad()
    def _texts(self, head: Head) -> tuple[Tensor, Tensor]:
        """Embeddings that go with the features, on the CPU: of the list, and of the classes trained on."""
        classes = self.state.classes
        trained = Classes.spoken(head.class_names, classes.template, classes.dataset)
        if sees_frozen(self.method, head.features):
            texts = [self.method.backbone.encode_text(each.plain().prompts()) for each in (classes, trained)]
        else:
            texts = [self.method.class_embeddings(each) for each in (self.state, self.method.class_state(trained))]
        return texts[0].float().cpu(), texts[1].float().cpu()

    def logits(self, images: Images) -> Tensor:
        """The answer, (B, C)."""
        if self.head is None:
            return self.method.logits(self.method.frozen(images), self.state)
        return self.trajectory(images)[-1]

    def trajectory(self, images: Images) -> Tensor:
        """What would be answered after each step, (K+1, B, C); (1, B, C) for a method that answers at once."""
        return self.both(images)[0]

    def both(self, images: Images) -> tuple[Tensor, Tensor]:
        """The trajectory, and that of the method's texts alone, from one look."""
        images = self.method.frozen(images)
        if self.head is None:
            logits_KBC = self.method.trajectory(images, self.state)
            return logits_KBC, logits_KBC
        more_BC = self.middle(images)
        logits_KBC, v_KBE = self.method.look(images, self.state)
        v0_BE = self.method.backbone.encode_image(images) if self.t0_CE is not None else v_KBE[0]
        return self._finish(logits_KBC, self._features(v_KBE), v0_BE, more_BC), logits_KBC

    def middle(self, images: Images) -> Tensor | None:
        """What the tower's middle adds to each class, (B, C)."""
        if self.head is None or self.head.middle is None or self.beyond is None:
            return None
        return self.from_middle(self.method.frozen(images).middle(self.head.middle.depth, self.method.image_depth))

    def from_middle(self, m_BF: Tensor) -> Tensor | None:
        """The same from its features."""
        if self.beyond is None:
            return None
        with full_precision(m_BF.device):
            return m_BF @ self.beyond[0].T + self.beyond[1]

    def scores(self, images: Images) -> tuple[Tensor, Tensor]:
        """Each class's score whatever the others are, with the head's where it has one, and of texts alone: (B, C)."""
        images = self.method.frozen(images)
        more_BC = self.middle(images)
        logits_KBC, v_KBE = self.method.look(images, self.state)
        texts_BC, head = self.method.scores(logits_KBC, v_KBE, self.state), self.head
        if head is None:
            return texts_BC, texts_BC
        with full_precision(texts_BC.device):
            if self.t0_CE is not None:
                texts_BC = self._texts_of(texts_BC, self.method.backbone.encode_image(images))
            if self.weight_CF is None:
                return texts_BC, texts_BC
            both_BC = self._sum(texts_BC, self._features(v_KBE)[-1], more_BC)
            return torch.where(self.trained_C, both_BC, texts_BC), texts_BC

    def finish(self, logits_KBC: Tensor, v_KBE: Tensor, more_BC: Tensor | None = None) -> Tensor:
        """The same from a trajectory and embeddings of PERL's, whose step 0 is zero-shot CLIP, and the middle."""
        return logits_KBC if self.head is None else self._finish(logits_KBC, self._features(v_KBE), v_KBE[0], more_BC)

    def stages(self, compile: str = "off") -> Stages:
        """What `Plan.answer` goes through with images, each stage as a graph where `compile` is on."""
        finish = self._stopped if self.head else None
        return Stages(require_steps(self.method), self.state, finish, compile, None if finish is None else self.middle)

    def answer(self, plan: Plan, images: Images) -> Answer:
        """Each image after as many steps as the plan has it take."""
        return plan.answer(images, self.stages())

    def image_trajectory(self, v_KBE: Tensor, more_BC: Tensor | None = None) -> Tensor:
        """What is answered if images with these embeddings stop after each step, as adaptive thinking has them."""
        method = require_steps(self.method)
        return image_trajectory(method, v_KBE, self.state, self._stopped if self.head else None, more_BC)

    def _stopped(self, logits_BC: Tensor, v: Sequence[Tensor], more_BC: Tensor | None) -> Tensor:
        """The last answer of images that took these steps."""
        return self._finish(logits_BC, self._features(torch.stack(list(v)))[-1], v[0], more_BC, len(v) - 1)

    def _features(self, v_kBE: Tensor) -> Tensor:
        assert self.head is not None
        return features(self.head.features, v_kBE, self.method.image_steps)

    def _finish(
        self, logits: Tensor, seen: Tensor, v0_BE: Tensor, more_BC: Tensor | None, step: int | None = None
    ) -> Tensor:
        """Logits (…, B, C), features (…, B, F) and what the middle adds to the answer, of all steps or of one."""
        head = self.head
        assert head is not None
        with full_precision(logits.device):
            logits = self._texts_of(logits, v0_BE)
            if self.weight_CF is None:
                return logits
            both = self._sum(logits, seen, more_BC)
            if not self.mixed:
                return both
            mass = self._mass(logits, seen, more_BC, step)
            known, other = (_together(mass, kind_C) - _together(both, kind_C) for kind_C in self.kinds)
            return both + torch.where(self.trained_C, known, other).detach()  # which is no class's own

    def leads(self, v_KBE: Tensor) -> Tensor | None:
        """Log-odds of trained classes against new ones in a list that has both, without the tower's middle.

        For images with these embeddings that stop after each step, (K+1, B), or that are answered at once, (1, B); None
        where an answer takes more than embeddings.
        """
        method = self.method
        if method.image_steps is None:
            logits_BC = method.answers(v_KBE, self.state)
            if logits_BC is None:
                return None
            logits_KBC = logits_BC[None]
        else:
            v_KBE = v_KBE[: method.image_steps + 1]
            logits_KBC = image_trajectory(require_steps(method), v_KBE, self.state)
        with full_precision(v_KBE.device):
            mass_KBC = self._mass(self._texts_of(logits_KBC, v_KBE[0]), self._features(v_KBE), None)
            known, new = (_together(mass_KBC, kind_C) for kind_C in self.kinds)
        return (known - new)[..., 0]

    def _texts_of(self, logits: Tensor, v0_BE: Tensor) -> Tensor:
        """The method's logits with zero-shot's share."""
        if self.t0_CE is None or self.head is None:
            return logits
        return self.head.share * logits + (1 - self.head.share) * self._zero_shot(v0_BE, self.t0_CE)

    def _mass(self, texts: Tensor, seen: Tensor, more_BC: Tensor | None, step: int | None = None) -> Tensor:
        """Logits whose sums over trained and new classes say how probable they are together, (…, B, C)."""
        head = self.head
        assert head is not None
        if self.mass is None:
            return texts + head.offset * self.trained_C
        mass = seen @ self.mass[0].T + self.mass[1]
        if len(self.gained_S):
            last = len(self.gained_S) - 1
            one = step is not None or not last  # for all rows; where only texts think, images take no steps
            gained = self.gained_S[min(step or 0, last)] if one else self.gained_S[:, None, None]
            mass = mass + self.mass_text * texts - gained * self.trained_C
        return mass if more_BC is None or head.middle is None else mass + head.middle.among * more_BC

    def _zero_shot(self, v0_BE: Tensor, t0_CE: Tensor) -> Tensor:
        """What the frozen CLIP says, (B, C)."""
        assert self.head is not None
        return (self.method if self.head.centered else self.method.backbone).similarity(v0_BE, t0_CE)

    @property
    def first_off_C(self) -> Tensor | None:
        """What the center takes off zero-shot's part, (C,), where it does."""
        if self.t0_CE is None or self.head is None or not self.head.centered:
            return None
        return self.method.taken_off(self.t0_CE)

    def _sum(self, logits: Tensor, seen: Tensor, more_BC: Tensor | None) -> Tensor:
        assert self.weight_CF is not None
        both = self.text_C * logits + (seen @ self.weight_CF.T + self.bias_C)
        return both if more_BC is None else both + more_BC

    @property
    def kinds(self) -> tuple[Tensor, Tensor]:
        """Which classes were trained on, and which were not."""
        return self.trained_C, ~self.trained_C


def _together(logits: Tensor, some_C: Tensor) -> Tensor:
    return logits.masked_fill(~some_C, float("-inf")).logsumexp(-1, keepdim=True)
