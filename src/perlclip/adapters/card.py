"""The model card of an adapter: what it is, what it was trained on and how, how good it is, how to load it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from perlclip.errors import shell_word
from perlclip.trust.record import Trust

_CARD = """\
---
{header}
---

# {title}

A {method} adapter of {num_trainable:,} parameters{head} for the frozen CLIP {backbone}, made with
perlclip {version}. It classifies images into {num_classes} classes, or into any others that are named at
prediction time.

## Use

```python
import perlclip

classifier = perlclip.Classifier.from_pretrained({folder})
print(classifier.predict("image.jpg").label)
```

or {command}.{adaptive}{trust}

## Classes

Prompt: {template}

{classes}

## Training

{training}

## Metrics

{metrics}

## Backbone

{backbone}{family}, weights with SHA-256 fingerprint `{fingerprint}`. The adapter is refused on any other.
"""


def model_card(info: Mapping[str, Any], title: str, *, dataset: str | None = None) -> str:
    """The card as Markdown with the YAML header that model hubs read; `dataset` is a name that they know."""
    from huggingface_hub import ModelCardData  # only who saves an adapter waits for it

    results = _results(info, dataset)
    header = ModelCardData(
        library_name="perlclip",
        base_model=info["base_model_name_or_path"],
        datasets=[dataset] if dataset else None,
        metrics=["accuracy"] if results else None,
        pipeline_tag="zero-shot-image-classification",
        tags=["perlclip", info["method"], "few-shot", "clip"],
        model_name=title if results else None,
        eval_results=results or None,
    )
    return _CARD.format(
        header=header.to_yaml(),
        backbone=as_code(info["base_model_name_or_path"]),
        method=as_markdown(info["method"]),
        title=as_markdown(title),
        folder=json.dumps(title, ensure_ascii=False),
        command=as_code(f"perlclip predict {shell_word(title)} image.jpg"),
        num_trainable=info["num_trainable"],
        head=f" and a head of {info['head']['numbers']:,} numbers" if info.get("head", {}).get("numbers") else "",
        version=info["perlclip_version"],
        num_classes=len(info["class_names"]),
        template=as_code(info.get("sentence", info["templates"][0])),
        classes="\n".join(f"- {as_markdown(name)}" for name in info["class_names"]),
        training=_table({**info["training"], **{f"method: {k}": v for k, v in info["config"].items()}}),
        metrics=_table(info["metrics"]),
        fingerprint=info["backbone_fingerprint"],
        family=_family(info),
        adaptive=_adaptive(info),
        trust=_trust(info),
    )


def _results(info: Mapping[str, Any], dataset: str | None) -> list[Any]:
    """Accuracies in percent, by what they were measured on, in the form that the hub makes a table of."""
    from huggingface_hub import EvalResult

    source = dataset or info["training"].get("source") or "own images"
    found = {"": info["metrics"], **info["metrics"]}
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=str(dataset or "imagefolder"),
            dataset_name=str(source),
            dataset_split=split or None,
            metric_type="accuracy",
            metric_name="accuracy, %",
            metric_value=values["accuracy"],
        )
        for split, values in found.items()
        if isinstance(values, Mapping) and isinstance(values.get("accuracy"), int | float)
    ]


def title_of(card: bytes) -> str | None:
    """What a card was called when `model_card` made it."""
    found = re.search(rb"from_pretrained\((\".*\")\)$", card, re.M)
    try:
        return str(json.loads(found[1])) if found else None
    except ValueError:
        return None


_SPECIAL = re.compile(r"([\\`*\[\]<>&$|~#]|(?<!\w)_|_(?!\w))")  # an underscore within a word is one
_LEADING = re.compile(r"([-+]|\d+[.)])(?=\s|$)|[-=]{3}")  # what begins a list or a rule


def as_markdown(text: str) -> str:
    """Words that mean nothing but themselves in Markdown, on one line."""
    line = _SPECIAL.sub(r"\\\1", " ".join(text.split()))
    found = _LEADING.match(line)
    return f"{line[: found.end() - 1]}\\{line[found.end() - 1 :]}" if found else line


def as_code(text: str) -> str:
    """The same as code, between more backticks than there are in it."""
    line = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    space = " " * (line.startswith("`") or line.endswith("`"))
    return f"{fence}{space}{line}{space}{fence}"


def _family(info: Mapping[str, Any]) -> str:
    size = f", for images of {info['image_size']} pixels" if "image_size" in info else ""
    return f" ({as_markdown(info['backbone_family'])}{size})" if "backbone_family" in info else ""


def _adaptive(info: Mapping[str, Any]) -> str:
    if "adaptive" not in info:
        return ""
    taken = f"{info['adaptive']['chosen'][0]:.1f} of {info['config']['steps']} on the training images"
    return f' With `steps="adaptive"` an image takes only the refinement steps it needs, {taken}.'


def _trust(info: Mapping[str, Any]) -> str:
    if "trust" not in info:
        return ""
    found = Trust.from_json(info["trust"])
    return (
        f"\n\n## How sure\n\nProbabilities are calibrated on {found.images} images that were held out ({found.how}): "
        "logits are divided by the temperature. `predict(…, reject=True)` says which images are none of the classes, "
        "`predict(…, coverage=0.9)` gives a set of labels that holds the right one so often, for images like these."
        f"\n\n{_table(found.summary())}"
    )


def readable_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter's config for a person to read: without the scores of every image held out."""
    return {**info, **({"trust": Trust.from_json(info["trust"]).summary()} if "trust" in info else {})}


def _table(values: Mapping[str, Any]) -> str:
    rows = flat(values)
    if not rows:
        return "Not recorded."
    lines = (f"| {as_markdown(key)} | {as_markdown(value)} |" for key, value in rows)
    return "\n".join(["| what | value |", "| --- | --- |", *lines])


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
    return str(value)
