"""A Label Studio ML backend: it suggests a class for each image, and learns from what you decide.

    python examples/label_studio_backend.py --backbone openai/clip-vit-base-patch16 --folder pets --port 9090

In Label Studio: Settings > Model > Connect Model, http://127.0.0.1:9090; the labels are <Choices> of an <Image>. Before
anything is labelled it answers as zero-shot CLIP. Each decision is kept as a small file in FOLDER/labels; at every
tenth (`--every`), and when training is asked for, an adapter is trained on all of them and saved as FOLDER/adapter,
which `perlclip predict` takes as well. docs/tools.md has what to install.
"""

import argparse
import json
import os
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from label_studio_ml.api import init_app
from label_studio_ml.model import LabelStudioMLBase

import perlclip

FOLDER, BACKBONE, EVERY = "PERLCLIP_FOLDER", "PERLCLIP_BACKBONE", "PERLCLIP_EVERY"  # also for processes that train

OLD = version("label-studio-ml").startswith("1.")  # PyPI's; 2 is on GitHub, and asks for a little more


@lru_cache(maxsize=1)
def load_backbone(name: str) -> perlclip.Backbone:
    return perlclip.load_backbone(name)


@lru_cache(maxsize=1)
def load_classifier(folder: Path, changed: int, names: tuple[str, ...], backbone: str) -> perlclip.Classifier:
    """Of the adapter that was saved then, or of none."""
    if changed:
        return perlclip.Classifier.from_pretrained(folder, backbone=load_backbone(backbone))
    return perlclip.Classifier(perlclip.create_method("zero-shot", load_backbone(backbone)), list(names))


class PerlBackend(LabelStudioMLBase):
    """One project: its decisions and its adapter are in a folder, which all processes share."""

    TRAIN_EVENTS = ("ANNOTATION_CREATED", "ANNOTATION_UPDATED", "ANNOTATION_DELETED", "START_TRAINING")

    @property
    def folder(self) -> Path:
        return Path(os.environ.get(FOLDER, "perlclip-label-studio"))

    @property
    def backbone(self) -> str:
        return os.environ.get(BACKBONE, "openai/clip-vit-base-patch16")

    def control(self) -> tuple[str, str, str, tuple[str, ...]]:
        """The names of <Choices> and <Image>, the field with the address, and the choices."""
        for name, tag in self.parsed_label_config.items():
            if tag["type"] == "Choices" and tag["inputs"] and tag["inputs"][0]["type"] == "Image":
                return name, tag["to_name"][0], tag["inputs"][0]["value"], tuple(tag["labels"])
        raise perlclip.PerlclipError("the labelling interface has no <Choices> of an <Image>")

    def path(self, task, field):
        """The image as a file, fetched by the package where it has to be."""
        return self.get_local_path(task["data"][field], **({} if OLD else {"task_id": task.get("id")}))

    def predict(self, tasks, context=None, **_):
        """A choice for each task, and how probable it is; one whose image cannot be read gets none."""
        name, image, field, choices = self.control()
        saved = self.folder / "adapter" / "adapter_config.json"
        changed = saved.stat().st_mtime_ns if saved.exists() else 0
        classifier = load_classifier(saved.parent, changed, choices, self.backbone)
        paths = [self.path(task, field) for task in tasks]
        answers = []
        for one in classifier.predict(paths, on_error="skip"):
            if isinstance(one, perlclip.Prediction) and one.label in choices:
                value = {"choices": [one.label]}
                result = [{"from_name": name, "to_name": image, "type": "choices", "value": value}]
                answers.append({"result": result, "score": one.probability, "model_version": str(changed)})
            else:
                answers.append({"result": [], "score": 0.0, "model_version": str(changed)})
        return answers

    def fit(self, tasks=(), event=None, data=None, **_):
        """Keep what was decided, and train now and then. Version 1 of the package gives (empty) tasks first."""
        name, _, field, choices = self.control()
        labels = self.folder / "labels"
        labels.mkdir(parents=True, exist_ok=True)
        if task := (data or {}).get("task"):
            place = labels / f"{int(task['id'])}.json"
            results = (data.get("annotation") or {}).get("result") or []
            chosen = [one["value"]["choices"][0] for one in results if one["from_name"] == name]
            if event == "ANNOTATION_DELETED" or not chosen:
                place.unlink(missing_ok=True)
            else:
                place.write_text(json.dumps([self.path(task, field), chosen[0]]))
        known = [json.loads(path.read_text()) for path in sorted(labels.glob("*.json"))]
        known = [(path, choice) for path, choice in known if choice in choices]
        asked = event == "START_TRAINING" or len(known) % int(os.environ.get(EVERY, "10")) == 0
        if not asked or len({choice for _, choice in known}) < 2:
            return {"labels": len(known)}
        images = perlclip.ImageSet(
            images=[Path(path) for path, _ in known],
            labels=[choices.index(choice) for _, choice in known],
            class_names=choices,
        )
        method = perlclip.create_method("perl", load_backbone(self.backbone))
        adapter = perlclip.save_adapter(perlclip.fit(method, images, progress=False), self.folder / "adapter")
        return {"labels": len(known), "adapter": str(adapter)}


def make_app():
    """The package's own web application around the backend."""
    return init_app(PerlBackend, **({"model_dir": os.environ[FOLDER]} if OLD else {}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="perlclip-label-studio", help="of this project's labels and adapter")
    parser.add_argument("--backbone", default="openai/clip-vit-base-patch16")
    parser.add_argument("--every", type=int, default=10, help="train at every so many labels")
    parser.add_argument("--port", type=int, default=9090)
    words = parser.parse_args()
    os.environ |= {FOLDER: words.folder, BACKBONE: words.backbone, EVERY: str(words.every)}
    make_app().run(host="127.0.0.1", port=words.port)


if __name__ == "__main__":
    main()
