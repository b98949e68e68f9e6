"""Photographs to judge accuracy on: FOLDER with clip/, sets.json and `NAME/{train,test}/<class>/*.jpg`.

    python -m benchmarks.photographs FOLDER SUITE      makes SUITE/photographs.toml for `perlclip bench --suite`

`sets.json` has, for every name, its classes in the order of their labels and its template.
"""

import argparse
import json
from pathlib import Path

from perlclip.data.decoding import readable
from perlclip.data.sets import DataSet, ImageSet


def photographs(folder: Path, name: str) -> DataSet:
    """A set of FOLDER: train and test, no validation images."""
    info = json.loads((folder / "sets.json").read_text())[name]

    def part(which: str) -> ImageSet:
        places = [sorted((folder / name / which / c).iterdir()) for c in info["classes"]]
        images = ImageSet(
            images=[path for paths in places for path in paths],
            labels=[label for label, paths in enumerate(places) for _ in paths],
            class_names=tuple(info["classes"]),
            template=info["template"],
            name=name,
        )
        return readable(images)[0]

    train = part("train")
    return DataSet(name=name, train=train, val=train.select([]), test=part("test"))


def make_suite(folder: Path, out: Path) -> Path:
    """Links to the images under folders in the order of the labels, which a suite takes its halves by."""
    lines = ['name = "photographs"', f"backbone = {json.dumps(str((folder / 'clip').resolve()))}"]
    for name, info in json.loads((folder / "sets.json").read_text()).items():
        numbered = {f"{label:03d}": c for label, c in enumerate(info["classes"])}
        for part in ("train", "test"):
            (out / name / part).mkdir(parents=True, exist_ok=True)
            for number, c in numbered.items():
                link = out / name / part / number
                link.unlink(missing_ok=True)
                link.symlink_to((folder / name / part / c).resolve())
        (out / f"{name}.json").write_text(json.dumps(numbered))
        lines += ["", f"[sets.{name}]", f'data = "{name}"', f"template = {json.dumps(info['template'])}"]
        lines += [f'class_names = "{name}.json"']
    suite = out / "photographs.toml"
    suite.write_text("\n".join(lines) + "\n")
    return suite


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(make_suite(options.folder, options.out))
