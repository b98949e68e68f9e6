"""The examples for other tools, with the real packages; where they are not installed, as usual, it says so.

docs/tools.md has the commands that install them beside this project: their pins do not go with ours.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

import perlclip

EXAMPLES = Path(__file__).parent.parent / "examples"
INTERFACE = """<View><Image name="image" value="$photo"/><Choices name="colour" toName="image">
<Choice value="red"/><Choice value="green_grass"/><Choice value="blue"/></Choices></View>"""


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tasks(tree):
    """Two of each class, as Label Studio sends them with local storage."""
    paths = [tree / name / f"{n}.png" for name in ("red", "green_grass", "blue") for n in (0, 1)]
    return [{"id": n, "data": {"photo": f"/data/local-files/?d={path}"}} for n, path in enumerate(paths)]


def test_label_studio_asks_and_teaches(tasks, tmp_path, monkeypatch):
    pytest.importorskip("label_studio_ml", reason="label-studio-ml pins older packages than ours: docs/tools.md")
    monkeypatch.setenv("PERLCLIP_FOLDER", str(tmp_path))
    monkeypatch.setenv("PERLCLIP_BACKBONE", "tiny")
    monkeypatch.setenv("PERLCLIP_EVERY", "6")
    module = example("label_studio_backend")
    client = module.make_app().test_client()
    assert client.get("/health").json["status"] == "UP"
    assert client.post("/setup", json={"project": "1.1", "schema": INTERFACE}).status_code == 200

    def ask(*tasks: dict) -> list[dict]:
        answer = client.post("/predict", json={"tasks": tasks, "project": "1.1", "label_config": INTERFACE})
        assert answer.status_code == 200, answer.text
        return answer.json["results"]

    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    first = ask(*tasks, {"id": 9, "data": {"photo": f"/data/local-files/?d={broken}"}})
    assert all(0 < one["score"] <= 1 and one["model_version"] == "0" for one in first[:-1])
    assert first[-1] == {"result": [], "score": 0.0, "model_version": "0"}
    backend = module.PerlBackend(label_config=INTERFACE)
    for task, choice in zip(tasks, ("red", "red", "green_grass", "green_grass", "blue", "blue"), strict=True):
        result = [{"from_name": "colour", "to_name": "image", "value": {"choices": [choice]}}]
        data = {"task": task, "annotation": {"result": result}}
        said = backend.process_event("ANNOTATION_CREATED", data, "1", {})
    assert said == {"labels": 6, "adapter": str(tmp_path / "adapter")}
    assert perlclip.load_adapter(tmp_path / "adapter").class_names == ("red", "green_grass", "blue")
    taught = ask(*tasks)
    shown = [one["result"][0] for one in taught]
    assert all((one["from_name"], one["to_name"]) == ("colour", "image") for one in shown)
    assert [one["value"]["choices"] for one in shown[::2]] == [["red"], ["green_grass"], ["blue"]]
    assert taught[0]["model_version"] != "0"
    backend.process_event("ANNOTATION_DELETED", {"task": tasks[0], "annotation": {"result": []}}, "2", {})
    kept = {path.stem: json.loads(path.read_text())[1] for path in (tmp_path / "labels").iterdir()}
    assert kept == {"1": "red", "2": "green_grass", "3": "green_grass", "4": "blue", "5": "blue"}


def test_fiftyone_gets_answers_and_embeddings(tree, tiny, tmp_path):
    fiftyone = pytest.importorskip("fiftyone", reason="fiftyone brings a database: docs/tools.md")
    method = perlclip.create_method("perl", tiny, seed=1)
    perlclip.save_adapter(method, tmp_path / "adapter", class_names=["red", "green grass", "blue"], template="a {}.")
    model = example("fiftyone_model").PerlModel(tmp_path / "adapter", backbone=tiny)
    paths = [str(tree / name / "0.png") for name in ("red", "blue")]
    data = fiftyone.Dataset()
    data.add_samples([fiftyone.Sample(filepath=path) for path in paths])
    try:
        data.apply_model(model, label_field="perl", batch_size=2, skip_failures=False, progress=False)
        data.compute_embeddings(model, embeddings_field="clip", batch_size=2, skip_failures=False, progress=False)
        wanted = model.classifier.predict(paths)
        assert data.values("perl.label") == [one.label for one in wanted]
        assert data.values("perl.confidence") == pytest.approx([one.probability for one in wanted])
        assert [v_E.shape for v_E in data.values("clip")] == [(tiny.embed_dim,)] * 2
    finally:
        data.delete()
