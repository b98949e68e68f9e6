"""What training has added to the odds of the classes trained on, in images of them: `Unseen.gained`.

A list with trained classes and new ones needs to know which images are of either kind. Trained texts tell that better
than frozen ones, but they lean to the classes they were trained on, and nothing that was trained with can say how far:
no image of a new class has been seen. So words that name no class stand in for new ones, as many as there are classes.
By how much the odds of the trained classes against these are higher with the trained texts than with the frozen ones,
on average over the shots, is taken off in every such list, by the steps that an image takes. The offset, which was
chosen with classes left out and the frozen texts, then means what it did, and shots are as sure to be of a trained
class as before: what the trained texts bring shows in who is who (docs/strong.md).
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

FEWEST = 4  # words that a backbone must know, and shots of a class: fewer are learned by heart
IMAGES = 500  # at most


@torch.no_grad()
def added_odds(method: Method, seen: Seen, classes: Classes, head: Head, seed: int = 1) -> tuple[float, ...]:
    """Log-odds after 0, 1, … steps, from what the trained method says about its shots; none where frozen texts do.

    They do where nothing was trained or it has no say, where the head asks no texts about new classes, with few shots,
    and for a method whose answers cannot be made of embeddings alone.
    """
    unseen, shots = head.unseen, len(seen.labels_N) / max(1, len(set(seen.labels_N.tolist())))
    if unseen is None or not unseen.among.text or not head.share or not method.num_trainable or classes.sentences:
        return ()
    free = free_words(method.backbone, classes)
    if not seen.frozen or shots < FEWEST or len(free) < FEWEST:
        return ()
    words = random.Random(f"words {seed}").sample(free, min(len(free), len(classes.names)))
    state = method.class_state(replace(classes, names=(*classes.names, *words)), novel=True)
    some = torch.arange(0, len(seen.labels_N), -(-len(seen.labels_N) // IMAGES))
    v_KNE = seen.v_KNE[:, some].to(method.backbone.device)
    frozen_KN, trained_KN = (
        Answering(method, state, replace(head, unseen=replace(unseen, gained=gained))).leads(v_KNE)
        for gained in ((), (0.0,))
    )
    if frozen_KN is None or trained_KN is None:
        return ()
    return tuple((trained_KN - frozen_KN).double().mean(1).tolist())
