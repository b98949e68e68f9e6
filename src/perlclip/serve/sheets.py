"""What an adapter answers, as plain tensors: so that rows of many adapters are answered by a few operations.

A sheet is what `Answering` does with the embeddings of an image, written for a row among rows that have other classes,
readouts and heads: class lists are padded to the longest one, and what differs is a number or a matrix of each row's
own. tests/serve/test_engine.py compares it with `Classifier`, in every combination.

Shapes: K stands for the steps 0..K, B rows, b some of them, C classes (of the longest list), E embedding width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.heads.answering import Answering
from perlclip.methods.base import full_precision
from perlclip.methods.perl import Perl

PAD = -1e9  # the logit of a class that is on other lists only
FEW = 8  # matrices that are multiplied one by one; more of them in one go,
GATHERED_ON = ("cuda",)  # on devices where each would be a launch
ROOM = 2**27  # products that are made at once, of which a part is picked


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Class embeddings, how the steps are read out, and the head, if there is one."""

    classes: int
    scale: float
    texts: tuple[Tensor, ...]  # (C, E) of each step that is read out, or of the last one alone
    weights: tuple[float, ...] = ()  # of each step in the readout; none: the step where the image stops is all
    share: float = 1.0
    offset: float = 0.0
    center: Tensor | None = None  # (E,), taken off images before they meet texts
    first: Tensor | None = None  # the frozen CLIP's class embeddings (C, E), where share < 1
    first_off_C: Tensor | None = None  # what the center takes off its answer, where it does
    features: str = ""
    learned: tuple[Tensor, ...] = ()  # the head's weight (C, E), for "all" features of each step
    bias_C: Tensor | None = None
    text_C: Tensor | None = None  # weight of the texts less one
    trained_C: Tensor | None = None  # 1 for a class that the head was trained on, 0 for others
    mixed: bool = False  # whether there are both
    middle: Tensor | None = None  # (C, F), of what the image tower's middle says
    middle_C: Tensor | None = None
    among: float = 0.0  # how much of that is in `mass`
    mass: Tensor | None = None  # (C, E), by which it is said how probable either are together, if not by the texts
    mass_C: Tensor | None = None
    mass_text: float = 0.0  # how much of the texts is in it
    gained: tuple[float, ...] = ()  # what is taken off trained classes there after 0, 1, … steps

    @classmethod
    @torch.no_grad()
    def of(cls, answering: Answering) -> "Sheet | None":
        """None for methods whose answer is made in another way: they are asked themselves."""
        method, head = answering.method, answering.head
        if not (
            method.sees_as_clip or (isinstance(method, Perl) and (method.image_steps or not method.readout.weight))
        ):
            return None
        if head and head.middle and head.middle.depth != method.backbone.vision.middle:
            return None
        t_KCE = method.class_embedding_steps(answering.state)
        weight = method.readout.weight if isinstance(method, Perl) else None
        texts = tuple(t_KCE) if weight else (t_KCE[-1].clone(),)
        weights = tuple(weight(k) for k in range(len(t_KCE))) if weight else ()
        center_E = method.center_E.clone() if method.center and method.center_E is not None else None
        scale, classes = method.backbone.logit_scale, t_KCE.shape[1]
        plain = cls(classes=classes, scale=scale, texts=texts, weights=weights, center=center_E)
        if head is None:
            return plain
        shared = replace(plain, share=head.share, first=answering.t0_CE, first_off_C=answering.first_off_C)
        if answering.weight_CF is None:
            return shared
        pieces = (method.image_steps or 0) + 1 if head.features == "all" else 1
        mass, mass_C = answering.mass or (None, None)
        middle, middle_C = answering.beyond or (None, None)
        return replace(
            shared, offset=head.offset if mass is None else 0.0, features=head.features,
            bias_C=answering.bias_C,
            learned=tuple(part_CE / sqrt(pieces) for part_CE in answering.weight_CF.chunk(pieces, 1)),
            text_C=answering.text_C - 1, trained_C=answering.trained_C.float(), mixed=answering.mixed,
            middle=middle, middle_C=middle_C, among=head.middle.among if head.middle else 0.0, mass=mass, mass_C=mass_C,
            mass_text=answering.mass_text, gained=tuple(answering.gained_S.tolist()),
        )  # fmt: skip

    def taken_off_after(self, stop: int) -> float:
        """Of an image that took so many steps."""
        return self.gained[min(stop, len(self.gained) - 1)] if self.gained else 0.0

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        own = (
            self.first_off_C, self.bias_C, self.text_C, self.trained_C,
            self.middle, self.middle_C, self.mass, self.mass_C,
        )  # fmt: skip
        tensors = (*self.texts, *self.learned, self.center, self.first, *own)
        return sum(each.nbytes for each in tensors if each is not None)


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers as a tensor there. On CUDA nothing is waited for, as a plain copy would for all that has been begun.

    So the host has prepared the answers to a batch by the time when the card has made its embeddings.
    """
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Sheets:
    """Rows, each with its sheet, and what the image tower's middle says about them, (B, F), if any asks for it."""

    def __init__(self, sheets: Sequence[Sheet], m_BF: Tensor | None = None) -> None:
        self.sheets, self.m_BF = sheets, m_BF
        self.width = max(sheet.classes for sheet in sheets)
        first: dict[int, int] = {}
        for i, sheet in enumerate(sheets):
            first.setdefault(id(sheet), i)
        self._firsts = list(first.values())  # of each sheet the first row that has it
        place = {key: n for n, key in enumerate(first)}
        self._place = [place[id(sheet)] for sheet in sheets]
        self._index_BC: Tensor | None = None

    @torch.no_grad()
    def answer(self, v_KBE: Tensor, stops: Sequence[int]) -> Tensor:
        """Logits of rows that stop after these steps, (B, C); beyond its stop a row's embedding is that of the stop."""
        with full_precision(v_KBE.device):
            device, v_KBE = v_KBE.device, v_KBE.float()
            logits_BC = self._read_out(self._centered(v_KBE), stops)
            valid_BC = torch.arange(self.width, device=device) < self._column("classes", device)
            logits_BC = torch.where(valid_BC, self._finish(logits_BC, v_KBE, stops), PAD)
        return logits_BC

    def _centered(self, v_XBE: Tensor) -> Tensor:
        """Embeddings as they meet texts, each row's own center taken off."""
        centers = [sheet.center for sheet in self.sheets]
        given = [i for i, center_E in enumerate(centers) if center_E is not None]
        if not given:
            return v_XBE
        off_bE = torch.stack([center_E for center_E in centers if center_E is not None]).to(v_XBE)
        return v_XBE - _put(off_bE.new_zeros(len(centers), off_bE.shape[1]), given, off_bE)

    def _read_out(self, v_KBE: Tensor, stops: Sequence[int]) -> Tensor:
        logits_BC = v_KBE.new_zeros(len(stops), self.width)
        for k, v_BE in enumerate(v_KBE):
            last = [i for i, sheet in enumerate(self.sheets) if not sheet.weights and stops[i] == k]
            if last:
                found_bC = self._dot(v_BE, last, [self.sheets[i].texts[0] for i in last])
                logits_BC = _put(logits_BC, last, found_bC)
            looking = [i for i, sheet in enumerate(self.sheets) if sheet.weights and stops[i] >= k]
            if looking:
                some = [self.sheets[i] for i in looking]
                found_bC = self._dot(v_BE, looking, [sheet.texts[k] for sheet in some])
                there_bC = torch.arange(self.width, device=v_BE.device) < _numbers([s.classes for s in some], v_BE)
                logp_bC = torch.where(there_bC, found_bC, PAD).log_softmax(-1)
                logp_bC = logp_bC + _numbers([log(sheet.weights[k]) for sheet in some], v_BE)
                before_bC = logits_BC if len(looking) == len(stops) else logits_BC[_places(looking, v_BE)]
                logits_BC = _put(logits_BC, looking, torch.logaddexp(before_bC, logp_bC) if k else logp_bC)
        totals = [
            log(sum(s.weights[: stop + 1])) if s.weights else 0 for s, stop in zip(self.sheets, stops, strict=True)
        ]
        return logits_BC - _numbers(totals, v_KBE)

    @torch.no_grad()
    def scores(self, v_KBE: Tensor, stops: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of rows that took all steps, `Answering.scores`: with heads and of texts alone, (B, C)."""
        with full_precision(v_KBE.device):
            v_KBE, rows = v_KBE.float(), range(len(self.sheets))
            last_BE = self._centered(v_KBE[-1])
            texts_BC = self._mixed(self._dot(last_BE, rows, [sheet.texts[-1] for sheet in self.sheets]), v_KBE)
            return self._headed(texts_BC, v_KBE, stops, shared=False), texts_BC

    def _finish(self, logits_BC: Tensor, v_KBE: Tensor, stops: Sequence[int]) -> Tensor:
        """What heads make of it; see `perlclip.heads.head`."""
        return self._headed(self._mixed(logits_BC, v_KBE), v_KBE, stops)

    def _mixed(self, logits_BC: Tensor, v_KBE: Tensor) -> Tensor:
        """With zero-shot's share."""
        mixed = [i for i, sheet in enumerate(self.sheets) if sheet.first is not None]
        if not mixed:
            return logits_BC
        firsts = [self.sheets[i].first for i in mixed]
        first_BC = _put(torch.zeros_like(logits_BC), mixed, self._dot(v_KBE[0], mixed, firsts))
        first_BC = first_BC - self._spread([sheet.first_off_C for sheet in self.sheets], logits_BC)
        share_B1 = self._column("share", logits_BC.device)
        return share_B1 * logits_BC + (1 - share_B1) * first_BC

    def _headed(self, logits_BC: Tensor, v_KBE: Tensor, stops: Sequence[int], *, shared: bool = True) -> Tensor:
        """With the head's scores; `shared`: as logits of one softmax, of which new classes keep their part."""
        headed = [i for i, sheet in enumerate(self.sheets) if sheet.learned]
        if not headed:
            return logits_BC
        text_BC, bias_BC, trained_BC = (
            self._spread([getattr(sheet, name) for sheet in self.sheets], logits_BC)
            for name in ("text_C", "bias_C", "trained_C")
        )
        more_BC = self._middles(logits_BC, headed)
        both_BC = (1 + text_BC) * logits_BC + self._scores(v_KBE, stops, headed) + bias_BC + more_BC
        known_BC = trained_BC > 0
        if not shared:
            return torch.where(known_BC, both_BC, logits_BC)
        mixed_B1 = self._column("mixed", logits_BC.device) > 0
        if not mixed_B1.any():
            return both_BC
        valid_BC = torch.arange(self.width, device=logits_BC.device) < self._column("classes", logits_BC.device)
        offsets_BC = self._column("offset", logits_BC.device) * trained_BC
        gained = [[sheet.taken_off_after(stop)] for sheet, stop in zip(self.sheets, stops, strict=True)]
        taken_BC = on_device(gained, logits_BC.device) * trained_BC
        mass_BC = self._masses(logits_BC + offsets_BC, v_KBE, stops, more_BC) - taken_BC
        hidden = float("-inf")
        shift_BC = torch.zeros_like(both_BC)
        for kind_BC in (known_BC, ~known_BC & valid_BC):
            of_B1, is_B1 = (
                each.masked_fill(~kind_BC, hidden).logsumexp(-1, keepdim=True) for each in (mass_BC, both_BC)
            )
            shift_BC = torch.where(kind_BC, of_B1 - is_B1, shift_BC)
        return torch.where(mixed_B1, both_BC + shift_BC, both_BC)

    def _middles(self, like_BC: Tensor, headed: Sequence[int]) -> Tensor:
        """What the image tower's middle adds, (B, C); zero where no head reads it."""
        reading = [i for i in headed if self.sheets[i].middle is not None]
        if not reading:
            return torch.zeros_like(like_BC)
        assert self.m_BF is not None
        found_bC = self._dot(self.m_BF, reading, [self.sheets[i].middle for i in reading], scaled=False)
        bias_BC = self._spread([sheet.middle_C for sheet in self.sheets], like_BC)
        return _put(torch.zeros_like(like_BC), reading, found_bC) + bias_BC

    def _masses(self, texts_BC: Tensor, v_KBE: Tensor, stops: Sequence[int], more_BC: Tensor) -> Tensor:
        """Logits whose sums over trained and new classes say how probable they are together."""
        having = [i for i, sheet in enumerate(self.sheets) if sheet.mass is not None]
        for kind in {self.sheets[i].features for i in having}:
            mine = [i for i in having if self.sheets[i].features == kind]
            seen_BE = self._seen(kind, v_KBE, stops, 0)
            found_bC = self._dot(seen_BE, mine, [self.sheets[i].mass for i in mine], scaled=False)
            bias_BC = self._spread([sheet.mass_C for sheet in self.sheets], v_KBE)
            bias_BC = bias_BC + self._column("among", v_KBE.device) * more_BC
            bias_BC = bias_BC + self._column("mass_text", v_KBE.device) * texts_BC
            texts_BC = _put(texts_BC, mine, found_bC + bias_BC[_places(mine, v_KBE)])
        return texts_BC

    def _scores(self, v_KBE: Tensor, stops: Sequence[int], headed: Sequence[int]) -> Tensor:
        """W f; zero where there is no head."""
        scores_BC = v_KBE.new_zeros(len(stops), self.width)
        for kind in {self.sheets[i].features for i in headed}:
            mine = [i for i in headed if self.sheets[i].features == kind]
            for j in range(max(len(self.sheets[i].learned) for i in mine)):
                having = [i for i in mine if j < len(self.sheets[i].learned)]
                seen_BE = self._seen(kind, v_KBE, stops, j)
                found_bC = self._dot(seen_BE, having, [self.sheets[i].learned[j] for i in having], scaled=False)
                scores_BC = scores_BC.index_add(0, _places(having, v_KBE), found_bC)
        return scores_BC

    def _seen(self, kind: str, v_KBE: Tensor, stops: Sequence[int], j: int) -> Tensor:
        """Features of a kind, as `heads.head.FEATURES` has them: the last step's, or part j of "all"."""
        if kind == "first":
            return v_KBE[0]
        if kind == "last":
            return v_KBE[-1]
        if kind == "all":
            return v_KBE[min(j, len(v_KBE) - 1)]
        taken_KB1 = torch.arange(len(v_KBE), device=v_KBE.device)[:, None, None] <= _numbers(stops, v_KBE)
        return F.normalize((v_KBE * taken_KB1).sum(0), dim=-1)

    def _dot(
        self, v_BE: Tensor, rows: Sequence[int], matrices: Sequence[Tensor | None], *, scaled: bool = True
    ) -> Tensor:
        """Each of these rows times its own matrix, times CLIP's scale: (b, C), zero beyond its own classes."""
        v_bE = v_BE if len(rows) == len(v_BE) else v_BE[_places(rows, v_BE)]
        v_bE = v_bE * self.sheets[0].scale if scaled else v_bE
        if v_bE.device.type in GATHERED_ON and len(self._firsts) > FEW:
            return self._gathered(v_bE, rows, matrices)
        found_bC = v_bE.new_zeros(len(rows), self.width)
        for m_CE, places in _own(matrices):
            if len(places) == len(rows):
                found_bC[:, : len(m_CE)] = v_bE @ m_CE.T
            else:
                at_b = _places(places, v_bE)
                found_bC[at_b, : len(m_CE)] = v_bE[at_b] @ m_CE.T
        return found_bC

    def _gathered(self, v_bE: Tensor, rows: Sequence[int], matrices: Sequence[Tensor | None]) -> Tensor:
        """The same in one product with all matrices, one below the other, of which each row picks its own classes.

        That is many times the arithmetic, and still less than launching each product, or copying matrices row by row.
        """
        m_ME = self._below(rows, matrices, v_bE.new_zeros(1, v_bE.shape[1]))
        index_BC = self._index(v_bE.device)
        index_bC = index_BC if len(rows) == len(index_BC) else index_BC[_places(rows, v_bE)]
        chunk = max(1, ROOM // len(m_ME))
        parts = [slice(i, i + chunk) for i in range(0, len(v_bE), chunk)]
        return torch.cat([(v_bE[part] @ m_ME.T).gather(1, index_bC[part]) for part in parts])

    def _spread(self, vectors: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """A vector of classes for each row, padded with zeros, (B, C); None is all zeros."""
        return self._below(range(len(vectors)), vectors, like.new_zeros(1))[self._index(like.device)]

    def _below(self, rows: Sequence[int], tensors: Sequence[Tensor | None], zero: Tensor) -> Tensor:
        """What these rows' sheets have, one below the other; zeros for those that have none, and one row at the end."""
        if len(rows) == len(self.sheets):
            own = [tensors[i] for i in self._firsts]
        else:
            of = {self._place[i]: tensor for i, tensor in zip(rows, tensors, strict=True)}
            own = [of.get(n) for n in range(len(self._firsts))]
        for n, i in enumerate(self._firsts):
            if own[n] is None:
                own[n] = zero.expand(self.sheets[i].classes, *zero.shape[1:])
        return torch.cat([each for each in (*own, zero) if each is not None])

    def _index(self, device: torch.device) -> Tensor:
        """Where each row's classes stand among those of all sheets one below the other; of padding, at the end."""
        if self._index_BC is None:  # the same for every step
            counts = [self.sheets[i].classes for i in self._firsts]
            starts = [0, *accumulate(counts)]
            own = [[starts[n] for n in self._place], [counts[n] for n in self._place]]
            start_B1, count_B1 = on_device(own, device)[..., None]
            c_C = torch.arange(self.width, device=device)
            self._index_BC = torch.where(c_C < count_B1, c_C + start_B1, starts[-1])
        return self._index_BC

    def _column(self, name: str, device: torch.device) -> Tensor:
        return on_device([[float(getattr(sheet, name))] for sheet in self.sheets], device)


Own = list[tuple[Tensor, list[int]]]  # different tensors, and which rows have them


def _own(tensors: Sequence[Tensor | None]) -> Own:
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            found.setdefault(id(tensor), (tensor, []))[1].append(place)
    return list(found.values())


def _places(rows: Sequence[int], like: Tensor) -> Tensor:
    return on_device(rows, like.device)


def _numbers(values: Sequence[float], like: Tensor) -> Tensor:
    """A column, (b, 1)."""
    return on_device([float(value) for value in values], like.device)[:, None]


def _put(whole_BC: Tensor, rows: Sequence[int], part_bC: Tensor) -> Tensor:
    return part_bC if len(rows) == len(whole_BC) else whole_BC.index_copy(0, _places(rows, whole_BC), part_bC)
