"""Sentences that class names are put into, and the one rule of what such a sentence is."""

from perlclip.errors import PerlclipError

DEFAULT_TEMPLATE = "a photo of a {}."

# The seven that CoOp's code selects from OpenAI's eighty for ImageNet (their prompt-engineering notebook).
IMAGENET_7 = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)

# The sixty of the same eighty that PromptSRC's teacher averages, here by the words that change.
IMAGENET_60 = (
    "a photo of a {}.",
    *(
        f"a {kind} photo of {article} {{}}."
        for kind in ("bad", "bright", "cropped", "close-up", "low resolution", "blurry", "pixelated")
        for article in ("a", "the")
    ),
    *(f"a {kind} photo of the {{}}." for kind in ("dark", "black and white", "good")),
    "a jpeg corrupted photo of a {}.",
    *(f"a photo of {what} {{}}." for what in ("many", "my", "the", "one", "a large", "a nice", "a weird")),
    *(f"a photo of {article} {kind} {{}}." for kind in ("hard to see", "clean", "dirty") for article in ("a", "the")),
    "a photo of the cool {}.",
    *(
        f"a {thing} of {article} {{}}."
        for thing in ("sculpture", "rendering", "painting", "doodle", "sketch", "rendition")
        for article in ("a", "the")
    ),
    *(f"a {thing} of a {{}}." for thing in ("drawing", "tattoo")),
    *(f"{article} {kind} {{}}." for kind in ("embroidered", "plastic", "origami") for article in ("a", "the")),
    *(f"{article} {{}} in a video game." for article in ("a", "the")),
    *("graffiti of a {}.", "art of a {}.", "itap of the {}.", "the toy {}.", "a cartoon {}."),
)


def check_template(template: str) -> None:
    """A template has exactly one plain `{}`."""
    if (
        not isinstance(template, str)
        or template.count("{}") != 1
        or template.count("{") != 1
        or template.count("}") != 1
    ):
        raise PerlclipError(f"template {template!r} must contain one {{}} where the class name goes")
