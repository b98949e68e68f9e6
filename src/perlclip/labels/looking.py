"""Images looked at once, for everything that is said about their labels.

Shapes: K stands for the steps 0..K, N images, B of a batch, C classes, E embedding width, F features, S small side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.adapters.folder import Adapter
from perlclip.data.decoding import check_on_error
from perlclip.data.images import Unreadable
from perlclip.data.loading import Lost, fixed_views
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError
from perlclip.heads.answering import Answering
from perlclip.heads.head import features
from perlclip.methods.base import Method
from perlclip.progress import progress_bar
from perlclip.text.classes import are_novel

SMALL = 16  # side of a small picture


@dataclass(frozen=True, kw_only=True)
class Looks:
    """What is known of the images that could be read: their places in the set, and what was seen in each.

    `features_NF` are unit vectors: the frozen CLIP's embeddings, or those of all of PERL's steps side by side.
    `frozen_NE` are the first of them. `texts_NC` are the logits of the class texts, an adapter's if there is one; with
    its head only where that is asked for. `nearest_N` is the frozen CLIP's cosine to the nearest class text, and
    `small_N3SS` are the images themselves, 16 by 16.
    """

    places: tuple[int, ...]
    features_NF: Tensor
    frozen_NE: Tensor
    texts_NC: Tensor
    nearest_N: Tensor
    small_N3SS: Tensor
    lost: tuple[Unreadable, ...] = ()

    def __len__(self) -> int:
        return len(self.places)


@torch.inference_mode()
def look(
    trained: Method | Adapter,
    images: ImageSet,
    *,
    batch_size: int = 64,
    workers: int = 0,
    on_error: str = "stop",
    head: bool = False,
    progress: bool = True,
) -> Looks:
    """Every image once, decoded and encoded; its label is not looked at.

    An adapter's head has learned the very labels that may be in question: it is only asked with `head`.
    """
    check_on_error(on_error)
    method = trained.method if isinstance(trained, Adapter) else trained
    novel = isinstance(trained, Adapter) and are_novel(images.class_names, trained.class_names)
    backbone, state = method.backbone, method.class_state(images.classes, novel=novel)
    answering = Answering(method, state, trained.head if head and isinstance(trained, Adapter) else None)
    lost: Lost | None = {} if on_error == "skip" else None
    t0_CE, found = backbone.encode_text(images.prompts), []
    with progress_bar("look at images", len(images), show=progress) as bar:
        for pixels, _ in fixed_views(images, backbone.preprocess, batch_size, backbone.device, workers, lost):
            if not len(pixels):
                continue
            frozen = method.frozen(pixels)
            answering.middle(frozen)  # before what goes on from there
            logits_KBC, v_KBE = method.look(frozen, state)
            f_BF, v0_BE = features("all", v_KBE, method.image_steps)[-1], backbone.encode_image(frozen)
            logits_BC = answering.logits(frozen) if answering.head else logits_KBC[-1]
            nearest_B = (v0_BE @ t0_CE.T).max(-1).values
            one = (f_BF, v0_BE, logits_BC, nearest_B, F.adaptive_avg_pool2d(pixels.float(), SMALL))
            found.append([each.float().cpu() for each in one])
            bar(len(pixels))
    missing = lost or {}
    if not found:
        why = f": {missing[0].reason}" if missing else ""
        raise PerlclipError(f"none of the {len(images)} images can be read{why}")
    features_NF, frozen_NE, texts_NC, nearest_N, small_N3SS = (torch.cat(parts) for parts in zip(*found, strict=True))
    if not (torch.isfinite(features_NF).all() and torch.isfinite(texts_NC).all()):
        raise PerlclipError("what the backbone says of the images is no number; try --dtype float32")
    return Looks(
        places=tuple(i for i in range(len(images)) if i not in missing), features_NF=features_NF, frozen_NE=frozen_NE,
        texts_NC=texts_NC, nearest_N=nearest_N, small_N3SS=small_N3SS, lost=tuple(missing[i] for i in sorted(missing)),
    )  # fmt: skip
