"""What training has added to the odds of the classes trained on, in images of them: `Unseen.gained`.

A list with trained classes and new ones needs to know which images are of either kind. Trained texts tell that better
than frozen ones, but they lean to the classes they were trained on, and nothing that was trained with can say how far:
no image of a new class has been seen. So words that name no class stand in for new ones, as many as there are classes.
By how much the odds of the trained classes against these are higher with the trained texts than with the frozen ones,
on average over the shots, is taken off in every such list. The offset, which was chosen with classes left out and the
frozen texts, then means what it did, and images of trained classes are as sure to be of one as before: what the trained
texts bring shows in the others (docs/strong.md).
"""

import random
from dataclasses import replace

import torch

from perlclip.heads.answering import Answering
from perlclip.heads.head import Head
from perlclip.methods.base import Method
from perlclip.text.classes import Classes
from perlclip.training.shots import Seen
from perlclip.trust.rejection import free_words

FEWEST = 4  # words that a backbone must know


@torch.no_grad()
def added_odds(method: Method, seen: Seen, classes: Classes, head: Head, seed: int = 1) -> float | None:
    """Log-odds, from what the trained method says about its shots; None where frozen texts have to do.

    They have where nothing was trained or it has no say, where the head asks no texts about new classes, and for a
    method whose answers cannot be made of embeddings alone.
    """
    unseen = head.unseen
    if unseen is None or not unseen.among.text or not head.share or not method.num_trainable or classes.sentences:
        return None
    free = free_words(method.backbone, classes)
    if not seen.frozen or len(free) < FEWEST:
        return None
    words = random.Random(f"words {seed}").sample(free, min(len(free), len(classes.names)))
    state = method.class_state(replace(classes, names=(*classes.names, *words)), novel=True)
    v_KNE = seen.v_KNE.to(method.backbone.device)
    logits_NC = method.answers(v_KNE, state)
    if logits_NC is None:
        return None
    frozen_N, trained_N = (
        Answering(method, state, replace(head, unseen=replace(unseen, gained=gained))).lead(logits_NC, v_KNE)
        for gained in (None, 0.0)
    )
    return (trained_N - frozen_N).double().mean().item()
