"""Texts encoded by CUDA graphs that many lists of them share.

A list of class texts is encoded once, and recording it would take longer than that. But lists can be padded to a few
sizes, and what a method has learned can be an input, so that what one list had recorded serves all others.
"""

from collections.abc import Callable
from threading import Lock

from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone.accel.cuda_graphs import SMALL, Compiled, graph_size, recording
from perlclip.backbone.tokens import Tokens
from perlclip.backbone.tower import Tower

FEWEST = 16  # texts of a graph
LENGTHS = 8  # tokens of a graph are a multiple of it


class TextGraphs:
    """`encode(ids_BN, eos_B, …)`, which gives (…, B, E), for texts of a few sizes.

    On other devices than CUDA it runs as it is, on the same padded texts.
    """

    def __init__(self, text: Tower, encode: Callable[..., Tensor]) -> None:
        self.text = text
        self.compiled = Compiled(lambda *inputs: [encode(*inputs)], text.norm.weight.device)
        self._lock = Lock()  # a graph's input and output are one place for all threads

    @staticmethod
    def takes(tokens: Tokens) -> bool:
        """Whether they are few: many keep the card busy while the next kernels are launched. No graph is in another."""
        return len(tokens.eos_B) <= SMALL and not recording()

    def __call__(self, tokens: Tokens, *inputs: Tensor) -> Tensor:
        """Of these texts, (…, C, E)."""
        C, N = tokens.ids_BN.shape
        more = max(FEWEST, graph_size(C, coarse=True)) - C
        # Behind EOS nothing counts, unless every row sees all others.
        longer = min(-N % LENGTHS, self.text.patches + self.text.starts - N) if self.text.causal else 0
        ids_BN, eos_B = F.pad(tokens.ids_BN, (0, longer, 0, more)), F.pad(tokens.eos_B, (0, more))
        with self._lock:
            return self.compiled(ids_BN, eos_B, *inputs)[0][..., :C, :].clone()
