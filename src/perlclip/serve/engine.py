"""Many adapters of one backbone in one batch.

A row is an image with an adapter to ask. The frozen base, h0 and the first refinement block's queries, keys and values
are computed once per image; then each row thinks with its own adapter's projectors (`RowThink`), through the same
frozen blocks, for as many steps as it was told or as it needs; and is answered by its own sheet (`sheets`). Rows whose
thinking has another shape, another depth above all, are a group of their own from there on; adapters whose method
does something else with the image (MMA, MaPLe, …) are asked one by one, each with all of its rows. Rows that look
through different lenses are batches of their own: the frozen tower sees another picture there.

Shapes: I images, B rows, b some of them, K steps, C classes, E embedding width, n projectors of P numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone import Backbone, FrozenImages
from perlclip.backbone.accel.cuda_graphs import FINE, SMALL, Compiled, graph_size, is_on
from perlclip.errors import PerlclipError
from perlclip.inference.classifier import Classifier
from perlclip.inference.judging import AnswerForm, Prediction
from perlclip.methods.perl import Perl, RowThink, Shape, Thinking, begin_thinking
from perlclip.serve.sheets import Sheet, Sheets, on_device
from perlclip.thinking.limits import Budget, Pace, clock
from perlclip.thinking.policy import ALL_STEPS, Plan, Policy, Steps, settled

GRAPHS = 4  # shapes and numbers of steps that are recorded, each in the sizes that come


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """An adapter that is ready to answer; `sheet` is None where its rows cannot be mixed with others'."""

    name: str
    classifier: Classifier
    sheet: Sheet | None
    shape: Shape | None  # of its thinking about images
    w_nP: Tensor | None  # its projectors

    @classmethod
    def of(cls, name: str, classifier: Classifier) -> "Loaded":
        """Make everything that an answer needs."""
        method = classifier.method.requires_grad_(False)
        sheet = Sheet.of(classifier.answering)
        if sheet is None or not isinstance(method, Perl) or not method.image_steps:
            return cls(name=name, classifier=classifier, sheet=sheet, shape=None, w_nP=None)
        w_nP = torch.stack([projector.numbers() for projector in method.thinkers("vision")])
        return cls(name=name, classifier=classifier, sheet=sheet, shape=method.shape("vision"), w_nP=w_nP)

    @property
    def lens(self) -> str:
        """Through which it looks at images."""
        return self.classifier.method.config.lens

    @property
    def steps(self) -> int | None:
        """That an image takes unless told otherwise."""
        return self.classifier.method.image_steps


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """A view of an image (3, size, size), the adapter to ask, what is wanted of the answer, and how far to think.

    Rows with the very same `pixels` are one image. `until` is a moment of `clock` after which no step is begun.
    """

    pixels: Tensor = field(repr=False)
    adapter: Loaded
    wanted: AnswerForm
    steps: Steps = None
    max_mean_steps: float | None = None
    until: float | None = None

    @property
    def plain(self) -> bool:
        """Whether it thinks all the way, as without being told anything."""
        return self.steps is None and self.max_mean_steps is None and self.until is None

    def plan(self) -> Plan | None:
        """Refused if the adapter cannot think so; None is all the way."""
        steps = "adaptive" if self.steps is None and self.until is not None else self.steps
        return self.adapter.classifier.plan(steps, self.max_mean_steps, None)


class Engine:
    """Answers rows; for one thread at a time.

    `compile="auto"` replays small batches as CUDA graphs where there is CUDA: those whose rows all think in one shape,
    all the way, about different images or about one.
    """

    def __init__(self, backbone: Backbone, *, compile: str = "auto") -> None:
        self.backbone, self.compile = backbone, compile
        self.pace = Pace()
        self._recorded: dict[tuple[Shape, int, bool, str], Compiled] = {}

    def warm_up(self, adapter: Loaded, batch_size: int) -> None:
        """Answer noise: once or, where batches are recorded, in every size that is, so that no user waits for that."""
        side, wanted = self.backbone.preprocess.size, adapter.classifier.judge.wanted()
        recorded = is_on(self.compile, self.backbone.device) and adapter.shape is not None
        most = min(batch_size, SMALL) if recorded else 1
        noise = list(torch.randn(most, 3, side, side, device=self.backbone.device))
        for size in {graph_size(n): n for n in range(1, most + 1)}.values():
            # An image each; and as many adapters about one.
            for views in [noise[:size], noise[:1] * size][: 2 if 1 < size <= FINE else 1]:
                for _ in range(2 if recorded else 1):  # the second time it is recorded
                    self.answer([ImageRow(pixels=view, adapter=adapter, wanted=wanted) for view in views])

    @torch.no_grad()
    def answer(self, rows: Sequence[ImageRow]) -> list[Prediction | PerlclipError]:
        """In their order; what is wrong with one adapter is no matter of the others."""
        answers: list[Prediction | PerlclipError] = [PerlclipError("no answer")] * len(rows)
        mixed: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            if row.adapter.sheet:
                mixed.setdefault(row.adapter.lens, []).append(i)
        for lens, mine in mixed.items():
            for i, found in zip(mine, self._mixed([rows[i] for i in mine], lens), strict=True):
                answers[i] = found
        others: dict[tuple[object, ...], list[int]] = {}
        for i, row in enumerate(rows):
            if not row.adapter.sheet:
                key = id(row.adapter), row.wanted, row.steps, row.max_mean_steps, row.until
                others.setdefault(key, []).append(i)
        for mine in others.values():
            for i, alone in zip(mine, _alone([rows[i] for i in mine]), strict=True):
                answers[i] = alone
        return answers

    def _mixed(self, rows: Sequence[ImageRow], lens: str) -> list[Prediction | PerlclipError]:
        """Rows of one lens."""
        images: dict[int, int] = {}
        image_B = [images.setdefault(id(row.pixels), len(images)) for row in rows]
        views = {id(row.pixels): row.pixels for row in rows}
        pixels = torch.stack([views[key] for key in images]).to(self.backbone.device, non_blocking=True)
        if (replayed := self._replay(rows, pixels, image_B, lens)) is not None:
            return _said(rows, replayed[0], [len(replayed[0]) - 1] * len(rows), replayed[1])
        frozen = self.backbone.frozen(pixels, lens)
        groups: dict[Shape, list[int]] = {}
        plans: list[Plan | None] = []
        for i, row in enumerate(rows):
            plans.append(row.plan() if row.adapter.shape else None)
            if row.adapter.shape:
                groups.setdefault(row.adapter.shape, []).append(i)
        stops, found = [0] * len(rows), []
        m_BF = self._middle(frozen, rows, image_B)
        # From the shallowest, on whose rows the others go on; and before h0 is asked for, which begins as a step does.
        for _, mine in sorted(groups.items(), key=lambda item: item[0].depths[0]):
            own_bF = None if m_BF is None else m_BF[torch.tensor(mine, device=pixels.device)]
            batch = _Batch([rows[i] for i in mine], [plans[i] for i in mine], own_bF)
            v_KbE = self._think(frozen, [image_B[i] for i in mine], batch)
            found.append((mine, v_KbE))
            for i, stop in zip(mine, batch.stops, strict=True):
                stops[i] = stop
        v0_BE = self.backbone.encode_image(frozen)
        if len(images) < len(rows):
            v0_BE = v0_BE[torch.tensor(image_B, device=pixels.device)]
        v_KBE = v0_BE.repeat(max(stops) + 1, 1, 1)
        for mine, v_KbE in found:
            mine_b = torch.tensor(mine, device=pixels.device)
            for k in range(len(v_KBE)):
                v_KBE[k, mine_b] = v_KbE[min(k, len(v_KbE) - 1)]
        return _said(rows, v_KBE, stops, m_BF)

    def _middle(self, frozen: FrozenImages, rows: Sequence[ImageRow], image_B: list[int]) -> Tensor | None:
        """What the image tower's middle says about each row's image, (B, F), if a head asks for it."""
        if not _reads_middle(rows):
            return None
        wanted = (row.adapter.shape.depths[0] for row in rows if row.adapter.shape)
        return frozen.middle(self.backbone.vision.middle, *wanted)[torch.tensor(image_B, device=frozen.device)]

    def _think(self, frozen: FrozenImages, image_b: list[int], batch: "_Batch") -> Tensor:
        """The embeddings of every step, (K+1, b, E); a row that has stopped keeps its last one."""
        rows, shape = batch.rows, batch.rows[0].adapter.shape
        assert shape
        own = None if image_b == list(range(len(frozen))) else torch.tensor(image_b, device=frozen.device)
        thinking = _begin(frozen, shape, max(batch.most), _projectors(rows), own)
        v = [self.backbone.vision.project(thinking.h_BD)]
        going = list(range(len(rows)))
        for budget, mine in batch.budgets.values():
            budget.begin(len(mine))
        for k in count():
            onwards = batch.going(going, k, v, self.pace)
            if not onwards:
                return torch.stack(v)
            if len(onwards) < len(going):
                place = {row: i for i, row in enumerate(going)}
                thinking = thinking.of(torch.tensor([place[row] for row in onwards], device=frozen.device))
                going = onwards
            began = clock()
            thinking = thinking.step()
            v_bE = self.backbone.vision.project(thinking.h_BD)
            if batch.timed:
                v_bE[0, 0].item()  # waits for the device
                self.pace.note(len(going), clock() - began)
            v.append(v_bE if len(going) == len(rows) else _replaced(v[-1], going, v_bE))
            for i in going:
                batch.stops[i] = k + 1
        raise AssertionError

    def _replay(
        self, rows: Sequence[ImageRow], pixels: Tensor, image_B: list[int], lens: str
    ) -> tuple[Tensor, Tensor] | None:
        """The embeddings of every step, and what the middle says, from a graph that was recorded for this size."""
        shape, steps, images = rows[0].adapter.shape, rows[0].adapter.steps or 0, len(pixels)
        if shape is None or len(rows) > SMALL or images not in (1, len(rows)):
            return None
        if any(row.adapter.shape != shape or row.adapter.steps != steps or not row.plain for row in rows):
            return None
        key = shape, steps, _reads_middle(rows), lens
        if key not in self._recorded and len(self._recorded) < GRAPHS:
            work = partial(_all_steps, self.backbone, *key)
            self._recorded[key] = Compiled(work, self.backbone.device, self.compile)
        compiled = self._recorded.get(key)
        if compiled is None or not compiled.on:
            return None
        more = graph_size(len(rows)) - len(rows)
        w_BnP = F.pad(_projectors(rows), (0, 0, 0, 0, 0, more))
        if images > 1:
            pixels, image_B = F.pad(pixels, (0, 0, 0, 0, 0, 0, 0, more)), [*image_B, *range(images, images + more)]
        else:
            image_B = [0] * (len(rows) + more)
        v_KBE, m_BF = compiled(pixels, w_BnP, on_device(image_B, pixels.device))
        return v_KBE[:, : len(rows)].clone(), m_BF[: len(rows)].clone()  # the next call writes there


def _reads_middle(rows: Sequence[ImageRow]) -> bool:
    return any(row.adapter.sheet and row.adapter.sheet.middle is not None for row in rows)


def _begin(frozen: FrozenImages, shape: Shape, steps: int, w_BnP: Tensor, image_B: Tensor | None) -> Thinking:
    """Rows at step 0: of each image what it needs once, then by rows."""
    think = RowThink(shape, w_BnP)
    thinking = begin_thinking(frozen, shape.depths, steps, think)
    if image_B is None:
        return thinking
    return replace(replace(thinking, think=_no_thought).of(image_B), think=think)


def _no_thought(k: int, h_BD: Tensor) -> list[Tensor]:
    raise AssertionError("images do not think; rows do")


def _all_steps(
    backbone: Backbone, shape: Shape, steps: int, reads: bool, lens: str, pixels: Tensor, w_BnP: Tensor,
    image_B: Tensor,
) -> list[Tensor]:  # fmt: skip
    """What a graph records."""
    frozen = backbone.frozen(pixels, lens)
    depth = backbone.vision.middle
    m_BF = frozen.middle(depth, shape.depths[0])[image_B] if reads else w_BnP.new_zeros(len(image_B), 0)
    thinking = _begin(frozen, shape, steps, w_BnP, image_B)
    return [torch.stack([backbone.vision.project(h_BD) for h_BD in thinking.states(steps)]), m_BF]


class _Batch:
    """How far the rows of one shape think."""

    def __init__(self, rows: Sequence[ImageRow], plans: Sequence[Plan | None], m_BF: Tensor | None) -> None:
        self.rows, self.m_BF = rows, m_BF
        self.most = [plan.steps if plan else row.adapter.steps or 0 for row, plan in zip(rows, plans, strict=True)]
        self.policies: list[Policy] = [plan.policy if plan else ALL_STEPS for plan in plans]
        self.stops = [0] * len(rows)
        self.timed = any(row.until is not None for row in rows)
        self.budgets: dict[int, tuple[Budget, list[int]]] = {}
        for i, plan in enumerate(plans):
            for limit in plan.limits if plan else ():
                assert isinstance(limit, Budget)
                self.budgets.setdefault(id(limit), (limit, []))[1].append(i)
        limited = {i for _, mine in self.budgets.values() for i in mine}
        self.judged = [i for i, policy in enumerate(self.policies) if policy is not ALL_STEPS or i in limited]
        self._before: tuple[list[int], Tensor] | None = None

    def going(self, rows: Sequence[int], k: int, v: Sequence[Tensor], pace: Pace) -> list[int]:
        """Which of these rows take step k + 1."""
        onwards = [i for i in rows if k < self.most[i]]
        if self.judged:
            onwards = self._unsettled(onwards, k, v)
        if self.timed and onwards:
            end = clock() + (pace.estimate(len(onwards)) or 0.0)
            onwards = [i for i in onwards if (until := self.rows[i].until) is None or end <= until]
        return onwards

    def _unsettled(self, rows: list[int], k: int, v: Sequence[Tensor]) -> list[int]:
        """Without those whose answer is settled, and of those with a budget as many as it has left."""
        judged = [i for i in self.judged if i in set(rows)]
        if not judged:
            return rows
        judged_b = torch.tensor(judged, device=v[0].device)
        m_bF = None if self.m_BF is None else self.m_BF[judged_b]
        sheets = Sheets([sheet for i in judged if (sheet := self.rows[i].adapter.sheet)], m_bF)
        now_bC = sheets.answer(torch.stack([v_BE[judged_b] for v_BE in v]), [k] * len(judged))
        before_bC = None
        if self._before is not None:
            known, before = self._before
            at_b = torch.tensor([known.index(i) for i in judged], device=now_bC.device)
            before_bC = before[at_b, : sheets.width]
        self._before = judged, now_bC
        value = dict(zip(judged, settled(now_bC, before_bC).tolist(), strict=True))
        done = {i for i, s in value.items() if s >= (self.policies[i].lead if k else self.policies[i].first)}
        for budget, mine in self.budgets.values():
            wanting = sorted((i for i in mine if i in value and i not in done), key=lambda i: value[i])
            done |= set(wanting[budget.grant(len(wanting)) :])
        return [i for i in rows if i not in done]


def _projectors(rows: Sequence[ImageRow]) -> Tensor:
    """Each row's own, (b, n, P): those of each adapter once, then by rows."""
    place: dict[int, int] = {}
    own: list[Tensor] = []
    for row in rows:
        if id(row.adapter) not in place:
            assert row.adapter.w_nP is not None
            place[id(row.adapter)] = len(own)
            own.append(row.adapter.w_nP)
    if len(own) == 1:
        return own[0].expand(len(rows), -1, -1)
    w_AnP = torch.stack(own)
    if len(own) == len(rows):
        return w_AnP
    return w_AnP[on_device([place[id(row.adapter)] for row in rows], w_AnP.device)]


def _replaced(v_BE: Tensor, rows: Sequence[int], v_bE: Tensor) -> Tensor:
    return v_BE.index_copy(0, torch.tensor(rows, device=v_BE.device), v_bE)


def _said(
    rows: Sequence[ImageRow], v_KBE: Tensor, stops: Sequence[int], m_BF: Tensor | None
) -> list[Prediction | PerlclipError]:
    """Embeddings to answers."""
    logits_BC = Sheets([sheet for row in rows if (sheet := row.adapter.sheet)], m_BF).answer(v_KBE, stops)
    temperature_B1 = on_device([[float(row.adapter.classifier.temperature)] for row in rows], logits_BC.device)
    p_BC = (logits_BC / temperature_B1).softmax(-1)
    most = max(row.wanted.top_k for row in rows)
    values_BT, indices_BT = (tensor.tolist() for tensor in p_BC.topk(most))
    scores = _scores(rows, v_KBE, stops, m_BF)
    answers: list[Prediction | PerlclipError] = []
    for i, row in enumerate(rows):
        classifier, wanted = row.adapter.classifier, row.wanted
        try:
            if i in scores:
                answers += classifier.judge.several(*scores[i], wanted)
                continue
            judged: tuple[bool | None, tuple[str, ...] | None] = (None, None)
            if wanted.threshold is not None or wanted.coverage is not None:
                own_1C = p_BC[i : i + 1, : len(classifier.class_names)]
                rejected, labels = classifier.judge.verdicts(own_1C, v_KBE[0, i : i + 1], wanted)
                judged = rejected[0], labels[0]
            taken = None if row.adapter.steps is None else stops[i]
            values, indices = values_BT[i][: wanted.top_k], indices_BT[i][: wanted.top_k]
            answers.append(classifier.judge.prediction(values, indices, taken, *judged))
        except PerlclipError as error:
            answers.append(error)
    return answers


def _scores(
    rows: Sequence[ImageRow], v_KBE: Tensor, stops: Sequence[int], m_BF: Tensor | None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Of rows that are asked for several labels, each class's scores, (1, C), with and without the head."""
    asked = [i for i, row in enumerate(rows) if row.wanted.sigmoids]
    if not asked:
        return {}
    asked_b = torch.tensor(asked, device=v_KBE.device)
    sheets = Sheets([sheet for i in asked if (sheet := rows[i].adapter.sheet)], None if m_BF is None else m_BF[asked_b])
    both_BC, texts_BC = sheets.scores(v_KBE[:, asked_b], [stops[i] for i in asked])
    own = [(slice(b, b + 1), slice(len(rows[i].adapter.classifier.class_names))) for b, i in enumerate(asked)]
    return {i: (both_BC[mine], texts_BC[mine]) for i, mine in zip(asked, own, strict=True)}


def _alone(rows: Sequence[ImageRow]) -> Sequence[Prediction | PerlclipError]:
    """Rows of one adapter that are asked for the same, by its own classifier."""
    row, classifier = rows[0], rows[0].adapter.classifier
    try:
        left = None if row.until is None else max(1.0, 1000 * (row.until - clock()))
        plan = classifier.plan(row.steps, row.max_mean_steps, left)
        return classifier.answer(torch.stack([each.pixels for each in rows]), row.wanted, plan)
    except PerlclipError as error:
        return [error] * len(rows)
