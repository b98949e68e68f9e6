"""The model card of an adapter: what it is, what it was trained on and how, how good it is, how to load it."""

from collections.abc import Mapping
from typing import Any

_CARD = """\
---
{header}
---

# {title}

A {method} adapter of {num_trainable:,} parameters{head} for the frozen CLIP `{backbone}`, made with
perlclip {version}. It classifies images into {num_classes} classes, or into any others that are named at
prediction time.

## Use

```python
import perlclip

classifier = perlclip.Classifier.from_pretrained("{title}")
print(classifier.predict("image.jpg").label)
```

or `perlclip predict {title} image.jpg`.{adaptive}

## Classes

Prompt: `{template}`

{classes}

## Training

{training}

## Metrics

{metrics}

## Backbone

`{backbone}`, weights with SHA-256 fingerprint `{fingerprint}`. The adapter is refused on any other.
"""


def model_card(info: Mapping[str, Any], title: str) -> str:
    """The card as Markdown with the YAML header that model hubs read."""
    from huggingface_hub import ModelCardData  # only who saves an adapter waits for it

    header = ModelCardData(
        library_name="perlclip",
        base_model=info["base_model_name_or_path"],
        pipeline_tag="zero-shot-image-classification",
        tags=["perlclip", info["method"], "few-shot", "clip"],
    )
    return _CARD.format(
        header=header.to_yaml(),
        backbone=info["base_model_name_or_path"],
        method=info["method"],
        title=title,
        num_trainable=info["num_trainable"],
        head=f" and a head of {info['head']['numbers']:,} numbers" if info.get("head", {}).get("numbers") else "",
        version=info["perlclip_version"],
        num_classes=len(info["class_names"]),
        template=info.get("sentence", info["templates"][0]),
        classes="\n".join(f"- {name}" for name in info["class_names"]),
        training=_table({**info["training"], **{f"method: {k}": v for k, v in info["config"].items()}}),
        metrics=_table(info["metrics"]),
        fingerprint=info["backbone_fingerprint"],
        adaptive=_adaptive(info),
    )


def _adaptive(info: Mapping[str, Any]) -> str:
    if "adaptive" not in info:
        return ""
    taken = f"{info['adaptive']['chosen'][0]:.1f} of {info['config']['steps']} on the training images"
    return f' With `steps="adaptive"` an image takes only the refinement steps it needs, {taken}.'


def _table(values: Mapping[str, Any]) -> str:
    rows = list(flat(values))
    if not rows:
        return "Not recorded."
    return "\n".join(["| what | value |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)])


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as rows of key and text."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{key}: ")
        else:
            rows.append((f"{prefix}{key}", _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return str(value).replace("|", "\\|").replace("\n", " ")
