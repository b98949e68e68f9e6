"""`Classifier`: images in, labels out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import overload

import numpy as np
import torch
from PIL import Image

from perlclip.adapter import load_adapter
from perlclip.backbone import Backbone
from perlclip.data.images import read_image
from perlclip.data.sets import ImageSource
from perlclip.errors import PerlclipError
from perlclip.methods.base import Method
from perlclip.prompts import DEFAULT_TEMPLATE, Classes, are_novel, check_class_names, check_template


@dataclass(frozen=True)
class Prediction:
    """The most probable label, its probability, and the best few of them, best first."""

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]


class Classifier:
    """A method with a list of class names, ready to label images; `novel` says that it was trained on others."""

    def __init__(
        self, method: Method, class_names: Sequence[str], template: str = DEFAULT_TEMPLATE, *, novel: bool = False
    ) -> None:
        check_class_names(class_names, unique=False)  # as in ImageNet, where only the label tells two of them apart
        check_template(template)
        self.method = method.eval()
        self.class_names = tuple(class_names)
        self.template = template
        self._state = method.class_state(Classes.spoken(class_names, template), novel=novel)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        class_names: Sequence[str] | None = None,
        template: str | None = None,
        backbone: Backbone | str | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "float32",
    ) -> "Classifier":
        """From an adapter folder. Other `class_names` (and `template`) may be given: the vocabulary is open.

        Names that the adapter was not trained on make the classes novel to it, which some methods answer differently.
        """
        adapter = load_adapter(folder, backbone=backbone, device=device, dtype=dtype)
        if class_names is not None:
            check_class_names(class_names)
        names = adapter.class_names if class_names is None else class_names
        novel = are_novel(names, adapter.class_names)
        return cls(adapter.method, names, adapter.template if template is None else template, novel=novel)

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is one image, not many
        self, images: ImageSource, *, top_k: int = ..., batch_size: int = ...
    ) -> Prediction: ...
    @overload
    def predict(
        self, images: Iterable[ImageSource], *, top_k: int = ..., batch_size: int = ...
    ) -> list[Prediction]: ...
    def predict(
        self, images: ImageSource | Iterable[ImageSource], *, top_k: int = 1, batch_size: int = 32
    ) -> Prediction | list[Prediction]:
        """Label one image, or several: paths, PIL images or uint8 arrays."""
        if isinstance(images, str | Path | Image.Image | np.ndarray):
            return next(self.predict_iter([images], top_k=top_k))
        return list(self.predict_iter(images, top_k=top_k, batch_size=batch_size))

    def predict_iter(
        self, images: Iterable[ImageSource], *, top_k: int = 1, batch_size: int = 32
    ) -> Iterator[Prediction]:
        """The same, one after the other, holding one batch in memory."""
        if top_k < 1 or batch_size < 1:
            raise PerlclipError(f"top_k and batch size must be at least 1, got {top_k} and {batch_size}")
        remaining = iter(images)
        while batch := list(islice(remaining, batch_size)):
            yield from self._predict_batch(batch, min(top_k, len(self.class_names)))

    @torch.no_grad()
    def _predict_batch(self, images: list[ImageSource], top_k: int) -> list[Prediction]:
        backbone = self.method.backbone
        pixels = torch.stack([backbone.preprocess.test_view(read_image(image)) for image in images])
        probabilities_BC = self.method.logits(pixels.to(backbone.device), self._state).softmax(-1)
        values_BT, indices_BT = (tensor.tolist() for tensor in probabilities_BC.topk(top_k))
        tops = [
            tuple((self.class_names[i], p) for i, p in zip(indices, values, strict=True))
            for indices, values in zip(indices_BT, values_BT, strict=True)
        ]
        return [Prediction(label=top[0][0], probability=top[0][1], top=top) for top in tops]
