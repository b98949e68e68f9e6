"""Every method without a shortcut, written to be read: `transformers`' own layers, every position, every row.

Nothing is kept between calls, so this is what the library's methods are compared with (tests) and timed against
(benchmarks). A form reads the parameters of the method it stands for, so gradients reach them:

    form = plain_form("perl")(clip, tokenizer, method)                   # a `CLIPModel` and its tokenizer
    form.logits(pixels, ["cat", "dog"], "a photo of a {}.")              # also: text, image, loss; PERL: trajectory

`perl.py` is the paper's method on one screen; `base.py` has the frozen CLIP that all forms step into.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from perlclip.errors import unknown_name

if TYPE_CHECKING:
    from perlclip.reference.base import Plain

# Found by name and imported on use, as `transformers` takes its time.
FORMS = {
    "zero-shot": "base.Plain",
    "ridge": "base.Plain",  # its texts; the head is beside it
    "gaussian": "base.Plain",
    "perl": "perl.PlainPerl",
    "coop": "prompts.PlainCoOp",
    "cocoop": "prompts.PlainCoCoOp",
    "kgcoop": "prompts.PlainKgCoOp",
    "provp": "prompts.PlainProVP",
    "tcp": "prompts.PlainTCP",
    "maple": "multimodal.PlainMaPLe",
    "promptsrc": "multimodal.PlainPromptSRC",
    "mma": "multimodal.PlainMMA",
    "mmrl": "multimodal.PlainMMRL",
    "mmrl++": "multimodal.PlainMMRLpp",
}


def plain_form(name: str) -> type["Plain"]:
    """The class that is a method's plain form."""
    if name not in FORMS:
        raise unknown_name("plain form", name, FORMS)
    module, form = FORMS[name].split(".")
    found: type[Plain] = getattr(import_module(f"perlclip.reference.{module}"), form)
    return found
