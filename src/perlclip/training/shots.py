"""What a trained method says about its own shots: looked at once, for its head and for its thresholds.

Shapes: K stands for the steps 0..K, N images, b some of them, C classes, E embedding width, F the head's features.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from perlclip.data.loading import fixed_views
from perlclip.data.sets import ImageSet
from perlclip.heads.head import features, sees_frozen
from perlclip.methods.base import ClassState, Method

CENTER_IMAGES = 512  # at most, to center images by
FEATURES = "first"  # see `heads.head.FEATURES`
BATCH = 32  # as the studio looks at images: of more, ViT-B/16 on a card wants kernels made first, for seconds


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Images in the test view: zero-shot's logits, the method's, the head's features, embeddings of every step."""

    labels_N: Tensor
    zero_NC: Tensor
    centered_NC: Tensor | None  # the same centered as the method is, if it is
    adapted_NC: Tensor
    features_NF: Tensor
    v_KNE: Tensor
    v0_NE: Tensor  # of the frozen CLIP
    cosines_NC: Tensor  # the method's scores of each class, whatever the others are
    texts_CE: Tensor  # class embeddings that go with the features
    frozen: bool  # whether training does not change the features: they are the frozen CLIP's embeddings
    middle_NF: Tensor | None  # what the tower's middle says, where it is the frozen one that looks

    def of(self, place_b: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Embeddings of every step, and the middle's, of some of the images."""
        v_KbE, m_NF = self.v_KNE[:, place_b].to(device), self.middle_NF
        return v_KbE, None if m_NF is None else m_NF[place_b].to(device)


@torch.no_grad()
def center_of(method: Method, images: ImageSet, workers: int = 0) -> Tensor:
    """The mean of the classes' mean embeddings in the frozen CLIP, (E,), so that no class counts more than another."""
    most = max(1, CENTER_IMAGES // max(1, len(images.by_class())))
    places = [where[:most] for where in images.by_class().values()]
    some, found = images.select([i for where in places for i in where]), []
    for pixels, _ in fixed_views(some, method.backbone.preprocess, BATCH, method.backbone.device, workers):
        found.append(method.backbone.encode_image(method.frozen(pixels)).float())
    ends = list(accumulate(map(len, places)))[:-1]
    means = [v_NE.mean(0) for v_NE in torch.cat(found).tensor_split(ends)]
    return torch.stack(means).mean(0)


@torch.no_grad()
def look_at(method: Method, images: ImageSet, state: ClassState, workers: int = 0) -> Seen:
    """Every image once, all steps; `state` is that of their classes. What comes back is on the CPU."""
    backbone, found, unchanged = method.backbone, [], sees_frozen(method, FEATURES)
    t0_CE = backbone.encode_text(state.classes.prompts())
    for pixels, _ in fixed_views(images, backbone.preprocess, BATCH, backbone.device, workers):
        frozen = method.frozen(pixels)
        m_BF = (
            frozen.middle(backbone.vision.middle, method.image_depth) if unchanged else pixels.new_empty(len(pixels), 0)
        )
        logits_KBC, v_KBE = method.look(frozen, state)
        v0_BE, f_BF = backbone.encode_image(frozen), features(FEATURES, v_KBE, method.image_steps)[-1]
        zero = backbone.similarity(v0_BE, t0_CE), method.similarity(v0_BE, t0_CE)
        said = *zero, logits_KBC[-1], method.scores(logits_KBC, v_KBE, state)
        found.append([each.cpu() for each in (*said, f_BF, v0_BE.float(), v_KBE.transpose(0, 1), m_BF)])
    joined = (torch.cat(parts) for parts in zip(*found, strict=True))
    zero_NC, centered_NC, adapted_NC, cosines_NC, features_NF, v0_NE, v_NKE, m_NF = joined
    texts_CE = t0_CE if unchanged else method.class_embeddings(state)
    return Seen(
        labels_N=torch.as_tensor([int(label) for label in images.labels]), zero_NC=zero_NC,
        centered_NC=centered_NC if method.center else None,
        adapted_NC=adapted_NC, cosines_NC=cosines_NC, features_NF=features_NF, v_KNE=v_NKE.transpose(0, 1), v0_NE=v0_NE,
        texts_CE=texts_CE.float().cpu(), frozen=unchanged, middle_NF=m_NF if unchanged else None,
    )  # fmt: skip
