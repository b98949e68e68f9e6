"""The drawn world and its suite of fifteen tasks: data that needs no download."""

from perlclip.data.toybox.render import render
from perlclip.data.toybox.suite import TASKS, Task, checksum, load_toybox, toybox_names
from perlclip.data.toybox.world import WORDS, Scenes, caption_words, captions, is_held_out, sample_scenes

__all__ = [
    "TASKS", "WORDS", "Scenes", "Task", "caption_words", "captions", "checksum", "is_held_out", "load_toybox",
    "render", "sample_scenes", "toybox_names",
]  # fmt: skip
