"""`evaluate`: accuracy of a method on labelled images, class by class and, for PERL, step by step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError
from perlclip.memory import Memory, SetMemory
from perlclip.methods.base import Method
from perlclip.progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Top-1 accuracy in percent over all images, with what stands behind it."""

    accuracy: float
    class_accuracy: dict[str, float]
    step_accuracy: list[float]
    total: int
    predictions_KB: Tensor = field(repr=False)
    probabilities_BC: Tensor = field(repr=False)
    labels_B: Tensor = field(repr=False)

    def metrics(self) -> dict[str, Any]:
        """The numbers, without the tensors."""
        return {
            "accuracy": self.accuracy,
            "step_accuracy": self.step_accuracy,
            "class_accuracy": self.class_accuracy,
            "images": self.total,
        }


@torch.inference_mode()
def evaluate(
    method: Method,
    test_set: ImageSet,
    *,
    novel: bool = False,
    batch_size: int = 64,
    workers: int = 0,
    progress: bool = True,
    memory: SetMemory | None = None,
) -> Evaluation:
    """Classify every image among the set's own classes; the class texts are encoded once.

    `novel=True` says that these are not the classes trained on, which MMRL and MMRL++ answer differently. A `memory`
    of the set, used again for other methods and seeds, spares what their tests have in common and changes no number.
    """
    if not len(test_set):
        raise PerlclipError("the test set has no images")
    backbone = method.backbone
    memory = memory or Memory(limit=0).of(test_set.name)
    state = memory.class_state(method, test_set.classes, novel=novel)
    predictions: list[Tensor] = []
    probabilities: list[Tensor] = []
    with progress_bar("evaluate", len(test_set), show=progress) as bar:
        for pixels, batch in memory.batches(test_set, backbone, batch_size, workers):
            with memory.recall(batch, pixels, backbone.vision):
                logits_KBC = method.trajectory(pixels, state)
            if not torch.isfinite(logits_KBC).all():
                raise PerlclipError("the method's answers are not finite numbers; its weights are unusable")
            predictions.append(logits_KBC.argmax(-1).cpu())
            probabilities.append(logits_KBC[-1].softmax(-1).cpu())
            bar(len(pixels))
    labels_B = torch.as_tensor([int(label) for label in test_set.labels])
    predictions_KB = torch.cat(predictions, 1)
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
        probabilities_BC=torch.cat(probabilities),
        labels_B=labels_B,
    )


def _percent(correct: Tensor) -> float:
    return 100.0 * correct.double().mean().item()
