"""`evaluate`: accuracy of a method on labelled images, class by class and, for PERL, step by step."""

from dataclasses import dataclass, field
from dataclasses import replace as copy_with
from typing import Any

import torch
from torch import Tensor

from perlclip.adapters.folder import Adapter
from perlclip.backbone.accel.cuda_graphs import SMALL, Compiled
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError
from perlclip.heads.answering import Answering
from perlclip.inference.cache import EvalCache, SetCache
from perlclip.methods.base import ClassState, Method
from perlclip.progress import progress_bar
from perlclip.text.classes import are_novel
from perlclip.thinking.limits import Budget, check_limits
from perlclip.thinking.policy import Plan, Steps, make_plan
from perlclip.thinking.thresholds import Thresholds


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Top-1 accuracy in percent over all images, with what stands behind it.

    If a number of steps was asked for, there is one row of answers, and `steps_B` says what each image took.
    """

    accuracy: float
    class_accuracy: dict[str, float]
    step_accuracy: list[float]
    total: int
    predictions_KB: Tensor = field(repr=False)
    probabilities_BC: Tensor = field(repr=False)
    labels_B: Tensor = field(repr=False)
    steps_B: Tensor | None = field(default=None, repr=False)

    @property
    def mean_steps(self) -> float | None:
        """Refinement steps that an image took."""
        return None if self.steps_B is None else self.steps_B.double().mean().item()

    def metrics(self) -> dict[str, Any]:
        """The numbers, without the tensors."""
        thought = {} if self.mean_steps is None else {"mean_steps": self.mean_steps}
        return {
            "accuracy": self.accuracy,
            "step_accuracy": self.step_accuracy,
            "class_accuracy": self.class_accuracy,
            "images": self.total,
            **thought,
        }


@torch.inference_mode()
def evaluate(
    trained: Method | Adapter,
    test_set: ImageSet,
    *,
    novel: bool | None = None,
    steps: Steps = None,
    max_mean_steps: float | None = None,
    thresholds: Thresholds | None = None,
    head: bool = True,
    batch_size: int = 64,
    workers: int = 0,
    compile: str = "auto",
    state: ClassState | None = None,
    cache: SetCache | None = None,
    progress: bool = True,
) -> Evaluation:
    """Classify every image among the set's own classes; the class texts are encoded once.

    `novel=True` says that these are not the classes trained on, which MMRL and MMRL++ answer differently; an adapter,
    such as `fit` gives, knows it by itself. PERL takes all K steps, or `steps` of them, or with `steps="adaptive"` as
    many as the `thresholds`, or else the adapter's, have each image take; `max_mean_steps` bounds their mean.
    `head=False` leaves out the adapter's head.

    `compile="auto"` replays small batches as CUDA graphs where there is CUDA. `state` is that of the set's classes, if
    the method has been asked for it already. A `cache` of the set, used again for other methods and seeds, spares what
    their tests have in common and changes no number.
    """
    if not len(test_set):
        raise PerlclipError("the test set has no images")
    method = trained
    if isinstance(trained, Adapter):
        method, thresholds = trained.method, thresholds or trained.thresholds
        novel = are_novel(test_set.class_names, trained.class_names) if novel is None else novel
    assert isinstance(method, Method)
    plan = _plan(method, steps, thresholds, max_mean_steps)
    backbone = method.backbone
    cache = cache or EvalCache(limit=0).of(test_set.name)
    if state is None:
        state = cache.class_state(method, test_set.classes, novel=bool(novel))
    elif state.classes != test_set.classes:
        raise PerlclipError("the class state is not that of the test set's classes")
    elif novel not in (None, state.novel):
        state = copy_with(state, novel=novel)
    answering = Answering(method, state, trained.head if head and isinstance(trained, Adapter) else None)
    predictions: list[Tensor] = []
    probabilities: list[Tensor] = []
    taken: list[Tensor] = []
    finite: list[Tensor] = []
    trajectory = Compiled(lambda pixels: [answering.trajectory(pixels)], backbone.device, compile, after=3)
    trajectory.on &= batch_size <= SMALL and cache.cache.limit == 0  # a graph cannot take what is kept
    with progress_bar("evaluate", len(test_set), show=progress) as bar:
        for images in cache.batches(test_set, backbone, batch_size, workers):
            if plan is not None:
                answer = answering.answer(plan, images)
                logits_KBC = answer.logits_BC[None]
                taken.append(answer.steps_B)
            else:
                logits_KBC = trajectory(images.pixels)[0] if trajectory.on else answering.trajectory(images)
            finite.append(torch.isfinite(logits_KBC).all())
            predictions.append(logits_KBC.argmax(-1))
            probabilities.append(logits_KBC[-1].softmax(-1))
            bar(len(images))
    # Only now is the card waited for.
    if not torch.stack(finite).all():
        raise PerlclipError("the method's answers are not finite numbers; its weights are unusable")
    labels_B = torch.as_tensor([int(label) for label in test_set.labels])
    predictions_KB = torch.cat(predictions, 1).cpu()
    correct_KB = predictions_KB == labels_B
    names = test_set.class_names
    return Evaluation(
        accuracy=_percent(correct_KB[-1]),
        class_accuracy={
            name if names.count(name) == 1 else f"{name} (label {c})": _percent(correct_KB[-1][labels_B == c])
            for c, name in enumerate(names)
            if (labels_B == c).any()
        },
        step_accuracy=[_percent(correct_B) for correct_B in correct_KB],
        total=len(labels_B),
        predictions_KB=predictions_KB,
        probabilities_BC=torch.cat(probabilities).cpu(),
        labels_B=labels_B,
        steps_B=torch.cat(taken).cpu() if taken else None,
    )


def _plan(method: Method, steps: Steps, thresholds: Thresholds | None, max_mean_steps: float | None) -> Plan | None:
    """None is all steps, every one of them looked at."""
    check_limits(max_mean_steps, None)
    if steps is None and max_mean_steps is None:
        return None
    limits = [] if max_mean_steps is None else [Budget(max_mean_steps)]
    return make_plan(method, steps, thresholds.within(max_mean_steps) if thresholds else None, limits)


def _percent(correct: Tensor) -> float:
    return 100.0 * correct.double().mean().item()
