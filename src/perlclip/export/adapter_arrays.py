"""An adapter as the small arrays that the ONNX file of its backbone takes, and what turns its outputs into an answer.

All that an adapter does behind its embeddings, the readout of the steps, its head, the share of zero-shot's answer and
the temperature, is a mean of probabilities and linear maps of the embeddings v_0..v_K and of what the tower's middle
says, m, so that a few lines of numpy are enough (`examples/onnx_predict.py`):

    l = text log(Σ_k readout_k softmax(logits_k - center_k)) + weight [v_0 … v_K] + weight_mean unit(Σ_k v_k)
        + weight_middle m + bias
    p = softmax(l / temperature)

`center`, what the center takes off each class's logits, is there where an adapter has one.
Before all of it, the lens of an adapter that has one shows the pixels x to the tower as lens_gain (lens x lensᵀ) +
lens_offset; of a lens that leaves all in its place `lens` is empty.

The file is numpy's `.npz`, without pickles. Shapes: K steps, C classes, E shared width, D width of the tower, R rank.
"""

import io
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perlclip.adapters.folder import Adapter
from perlclip.errors import PerlclipError
from perlclip.files import require_writable, write_files
from perlclip.heads.answering import Answering
from perlclip.inference.classifier import Classifier
from perlclip.methods.base import Method
from perlclip.methods.parts import HeadAlone, LearnedWords
from perlclip.methods.perl import Perl, Projector
from perlclip.methods.zero_shot import ZeroShot
from perlclip.text.classes import Classes


@torch.no_grad()
def export_adapter(
    adapter: Adapter, path: str | Path, *, class_names: Sequence[str] | None = None, template: str | None = None,
    head: bool = True,
) -> Path:  # fmt: skip
    """Write an adapter's arrays, for its own classes or for others."""
    path = Path(path)
    require_writable(path.parent)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **adapter_arrays(adapter, class_names, template, head=head))
    write_files({path: buffer.getvalue()})
    return path


@torch.no_grad()
def adapter_arrays(
    adapter: Adapter, class_names: Sequence[str] | None = None, template: str | None = None, *, head: bool = True
) -> dict[str, np.ndarray]:
    """By the names that they have in the file."""
    classifier = Classifier(adapter, class_names, template, head=head)
    method, backbone = adapter.method, adapter.method.backbone
    steps, depth, projector = _thoughts(method)
    names = classifier.class_names
    state = method.class_state(Classes.spoken(names, classifier.template))
    t_KCE = method.class_embedding_steps(state).float()
    arrays = {name: tensor.float() for name, tensor in projector.items()}
    arrays |= {"classes": t_KCE, **_finish(Answering(method, state, adapter.head if head else None), steps, t_KCE)}
    if method.center:
        arrays["center"] = torch.stack([method.taken_off(t_CE) for t_CE in t_KCE])
    if lens := backbone.lens(method.config.lens):
        arrays |= lens.arrays()
    words = {"class_names": list(names), "fingerprint": backbone.fingerprint, "template": classifier.template}
    numbers = {"steps": steps, "depth": depth, "temperature": classifier.temperature}
    return {
        **{name: tensor.detach().cpu().numpy() for name, tensor in arrays.items()},
        **{name: np.array(value) for name, value in (words | numbers).items()},
    }


def _thoughts(method: Method) -> tuple[int, int, dict[str, Tensor]]:
    """How many steps an image takes, from which depth, and phi; nothing of it for a method that leaves images alone."""
    D = method.backbone.vision.width
    if isinstance(method, ZeroShot | HeadAlone | LearnedWords) and type(method).logits is Method.logits:
        shapes = {"norm_weight": (D,), "norm_bias": (D,), "down_weight": (1, D), "down_bias": (1,)}
        shapes |= {"up_weight": (1, D), "up_bias": (D,)}
        return 0, -1, {name: torch.zeros(shape) for name, shape in shapes.items()}
    if not isinstance(method, Perl):
        raise PerlclipError(f"{method.name!r} changes the image tower in a way that the ONNX file has no input for")
    depths = method.config.depths("vision")
    if len(depths) > 1 or method.specific or not method.image_steps:
        raise PerlclipError(
            "of PERL, the ONNX file has what thinks with one projector at one depth of the image tower; this adapter "
            f"has variant {method.config.variant!r}, modalities {method.config.modalities!r}, depth {list(depths)}"
        )
    phi = method.projectors["vision"]
    assert isinstance(phi, Projector)
    tensors = {"norm_weight": phi.norm.weight, "norm_bias": phi.norm.bias, "down_weight": phi.down.weight}
    tensors |= {"down_bias": phi.down.bias, "up_weight": phi.up.weight.T, "up_bias": phi.up.bias}
    return method.image_steps, depths[0], tensors


def _finish(answering: Answering, steps: int, t_KCE: Tensor) -> dict[str, Tensor]:
    """Weights of the steps, and of the embeddings: what the head and zero-shot's share add."""
    method, head = answering.method, answering.head
    (_, C, E), K = t_KCE.shape, steps + 1
    look_back = method.readout.weight if isinstance(method, Perl) else None
    readout_K = torch.tensor([look_back(k) if look_back else float(k == steps) for k in range(K)])
    weight_CKE, mean_CE, bias_C, text = torch.zeros(C, K, E), torch.zeros(C, E), torch.zeros(C), 1.0
    middle_CF = torch.zeros(C, 0)
    if head is not None:
        if answering.weight_CF is not None and answering.mixed:
            raise PerlclipError(
                "a list that mixes classes trained on with others has no head in ONNX: export with --no-head"
            )
        headed = answering.weight_CF
        text = 1.0 if headed is None else answering.text_C[0].item()
        if answering.t0_CE is not None:
            weight_CKE[:, 0] += text * (1 - head.share) * method.backbone.logit_scale * answering.t0_CE.float().cpu()
            if answering.first_off_C is not None:
                bias_C = bias_C - text * (1 - head.share) * answering.first_off_C.float().cpu()
            text *= head.share
        if headed is not None:
            w_CF, bias_C = headed.float().cpu(), bias_C + answering.bias_C.float().cpu()
            if answering.beyond is not None and head.middle is not None:
                if head.middle.depth != method.backbone.vision.middle:
                    raise PerlclipError(f"the head reads after block {head.middle.depth}, which the ONNX file does not")
                middle_CF, middle_C = (each.float().cpu() for each in answering.beyond)
                bias_C = bias_C + middle_C
            if head.features == "mean":
                mean_CE = w_CF
            elif head.features == "all":
                weight_CKE += w_CF.view(C, K, E) / sqrt(K)
            else:
                weight_CKE[:, 0 if head.features == "first" else -1] += w_CF
    return {
        "readout": readout_K / readout_K.sum(),
        "weight": weight_CKE.flatten(1),
        "weight_mean": mean_CE,
        "weight_middle": middle_CF,
        "bias": bias_C,
        "text": torch.tensor(text),
    }
