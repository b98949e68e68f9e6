"""The service over HTTP: its answers are the classifiers', its refusals sentences, and it survives what it is sent."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import perlclip
from perlclip.serve.shelf import held_bytes
from tests.serve.adapters import random_adapter
from tests.serve.conftest import SERVED, png
from tests.serve.test_guard import ask

CLOSE = dict(abs=2e-5, rel=1e-3)


def post(address, **fields):
    status, said, _ = ask(address, "POST", "/v1/predict", json.dumps(fields), Content_Type="application/json")
    return status, said


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def form(address, files, **fields):
    mark = uuid.uuid4().hex
    parts = [
        f'--{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    parts += [
        f'--{mark}\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n'.encode() + data + b"\r\n"
        for data in files
    ]
    body = b"".join(parts) + f"--{mark}--\r\n".encode()
    return ask(address, "POST", "/v1/predict", body, Content_Type=f"multipart/form-data; boundary={mark}")[:2]


def assert_answer(found, expected):
    assert found["label"] == expected.label and found["steps"] == expected.steps
    assert [one["label"] for one in found["top"]] == [label for label, _ in expected.top]
    assert [one["probability"] for one in found["top"]] == pytest.approx([p for _, p in expected.top], **CLOSE)


def test_answers_are_those_of_the_classifiers_in_every_form(service, classifiers):
    _, address = service
    files = [png(1), png(2, kind="JPEG")]
    uri = f"data:image/jpeg;base64,{b64(files[1])}"
    status, said = post(address, images=[b64(files[0]), uri], adapters=list(SERVED), top_k=2)
    assert status == 200
    assert form(address, files, adapters=",".join(SERVED), top_k=2) == (status, said)
    for data, result in zip(files, said["results"], strict=True):
        assert list(result["answers"]) == list(SERVED)
        for name, found in result["answers"].items():
            assert_answer(found, classifiers[name].predict(data, top_k=2))


def test_options_are_those_of_predict(service, classifiers):
    _, address = service
    for name in ("plain", "steps"):
        for how in ({"steps": 1}, {"steps": "adaptive"}, {"reject": True, "reject_rate": 0.3}, {"coverage": 0.9},
                    {"multi_label": True, "top_k": 2}):  # fmt: skip
            _, said = post(address, images=[b64(png(3))], adapters=name, **how)
            found, expected = said["results"][0]["answers"][name], classifiers[name].predict(png(3), **how)
            assert_answer(found, expected)
            assert found.get("rejected") == expected.rejected
            assert found.get("labels") == (None if expected.labels is None else list(expected.labels))
    _, said = post(address, images=[b64(png(3))], adapters="plain", max_ms=0.001)
    assert said["results"][0]["answers"]["plain"]["steps"] == 0


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"adapters": "../plain"}, 404, "name"),
        ({"adapters": ".hidden"}, 404, "name"),
        ({"adapters": "plain/../plain"}, 404, "name"),
        ({"adapters": "nobody"}, 404, "no adapter"),
        ({"adapters": []}, 400, "at least one adapter"),
        ({"images": []}, 400, "at least one image"),
        ({"images": [b64(png())] * 9}, 413, "at most 8"),
        ({"images": ["https://example.org/cat.jpg"]}, 400, "fetches nothing"),
        ({"images": ["file:///etc/passwd"]}, 400, "fetches nothing"),
        ({"images": ["not base64!"]}, 400, "base64"),
        ({"images": [b64(b"GIF89a")]}, 422, "image"),
        ({"images": [b64(b"")]}, 422, "empty"),
        ({"images": [b64(png(None, (3000, 400)))]}, 422, "million pixels"),
        ({"images": [b64(png(0, (500, 2)))]}, 422, "longer than"),
        ({"steps": 5}, 400, "from 0 to 4"),
        ({"steps": 1, "adapters": "zero-shot"}, 400, "only PERL"),
        ({"top_k": 0}, 400, "top_k"),
        ({"top_k": 10**30}, 400, "number"),
        ({"max_ms": -1}, 400, "max_ms"),
        ({"max_ms": "NaN"}, 400, "max_ms"),
        ({"coverage": 0.9999}, 400, "held out"),
        ({"sets": "laps", "coverage": 0.5}, 400, "did you mean"),
        ({"stepps": 1}, 400, "stepps"),
        ({"multi_label": True, "reject": True}, 400, "does not go with reject"),
        ({"multi_label": True, "adapters": "plain", "steps": 1}, 400, "does not go with"),
        ({"images": "abc"}, 400, "list"),
        ({"max_mean_steps": 1e308, "steps": 9}, 400, "from 0 to 4"),
        ({"images": [b64(png())] * 8, "adapters": [f"a{i}" for i in range(20)]}, 400, "at most 64"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_a_sentence(service, fields, status, words):
    _, address = service
    found, said = post(address, **({"images": [b64(png())], "adapters": "plain"} | fields))
    assert (found, list(said)) == (status, ["error"]) and words in said["error"]


def test_an_unreadable_image_may_be_skipped(service, classifiers):
    _, address = service
    images = [b64(png(1)), b64(b"nothing"), b64(png(2))]
    status, said = post(address, images=images, adapters="plain", on_error="skip")
    assert status == 200 and "error" in said["results"][1]
    assert_answer(said["results"][2]["answers"]["plain"], classifiers["plain"].predict(png(2)))


def test_many_threads_get_their_own_answers(service, classifiers):
    """Different images, adapters and steps at once; batches are made of them."""
    running, address = service
    expected = {
        (seed, name): classifiers[name].predict(png(seed), steps=1 if name == "rising" else None)
        for seed in range(4) for name in SERVED
    }  # fmt: skip
    wrong, before = [], running.batcher.batches

    def work(turn):
        for i, (seed, name) in enumerate(expected):
            how = {"steps": 1} if name == "rising" else {}
            status, said = form(address, [png(seed)], adapters=name, **how)
            try:
                assert status == 200
                assert_answer(said["results"][0]["answers"][name], expected[seed, name])
            except AssertionError as error:
                wrong.append((turn, i, status, error))

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert running.batcher.batches - before < 8 * len(expected)


def test_a_full_queue_says_come_back(service):
    running, address = service
    with running.batcher.reserve(60):
        status, said, headers = ask(
            address, "POST", "/v1/predict", json.dumps({"images": [b64(png())] * 5, "adapters": "plain"}),
            Content_Type="application/json",
        )  # fmt: skip
        assert status == 503 and headers["Retry-After"] and "waiting" in said["error"]
        assert ask(address, "GET", "/readyz")[0] == 200
    assert running.batcher.reserved == 0


def test_a_killed_decoder_loses_only_its_request(service):
    running, address = service
    for pid in running.decoders.pids():
        os.kill(pid, signal.SIGKILL)
    statuses = [form(address, [png(i)], adapters="plain")[0] for i in range(4)]
    assert sorted(statuses) == [200, 200, 503, 503]
    assert running.decoders.deaths >= 2


def test_damaged_bodies_leave_it_standing(service):
    _, address = service
    good = png(5, kind="JPEG")
    rng = np.random.default_rng(0)
    for _ in range(20):
        spoilt = bytearray(good)
        for place in rng.integers(0, len(good), 20):
            spoilt[place] = rng.integers(256)
        status, said = form(address, [bytes(spoilt[: rng.integers(10, len(good))])], adapters="plain")
        assert status in (200, 422), said
    json_, form_ = "application/json", "multipart/form-data"
    odd = [(b"\xff" * 100, json_), (b"[" * 9000, json_), (b"x", "image/png"), (b"", form_), (b"1", "")]
    for body, kind in [*odd, (b"--x\r\n", f"{form_}; boundary=x")]:
        status, said, _ = ask(address, "POST", "/v1/predict", body, Content_Type=kind)
        assert 400 <= status < 500 and list(said) == ["error"], (body, said)
    assert form(address, [good], adapters="plain")[0] == 200


# ---- the Open Inference Protocol, by Triton's own client ----


@pytest.fixture(scope="module")
def client(service):
    with triton.InferenceServerClient(service[1].removeprefix("http://")) as client:
        yield client


def asked(files, binary=True):
    image = triton.InferInput("image", [len(files)], "BYTES")
    texts = files if binary else [b64(data).encode() for data in files]
    image.set_data_from_numpy(np.array(texts, dtype=object), binary_data=binary)
    return [image]


def test_tritons_client_finds_what_it_asks_for(client):
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("plain")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata("plain")
    assert about["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    with pytest.raises(InferenceServerException, match="no adapter"):
        client.get_model_metadata("nobody")
    assert not client.is_model_ready("nobody")


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_the_answers(client, classifiers, binary):
    files = [png(1), png(2)]
    names = ("label", "probability", "top_labels", "top_probabilities", "steps", "rejected")
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    how = {"top_k": 2, "steps": 2, "reject": True, "reject_rate": 0.3}
    found = client.infer("plain", asked(files, binary), outputs=outputs, parameters=how, request_id="7")
    expected = classifiers["plain"].predict(files, **how)
    assert found.get_response()["id"] == "7"
    texts = [text.decode() if isinstance(text, bytes) else text for text in found.as_numpy("label").tolist()]
    assert texts == [one.label for one in expected]
    assert found.as_numpy("probability").tolist() == pytest.approx([one.probability for one in expected], **CLOSE)
    assert found.as_numpy("top_probabilities").shape == found.as_numpy("top_labels").shape == (2, 2)
    assert found.as_numpy("steps").tolist() == [2, 2]
    assert found.as_numpy("rejected").tolist() == [one.rejected for one in expected]


def test_tritons_client_is_refused_with_sentences(client):
    with pytest.raises(InferenceServerException, match="image files, not pixels"):
        pixels = triton.InferInput("image", [1, 3, 8, 8], "FP32")
        pixels.set_data_from_numpy(np.zeros((1, 3, 8, 8), np.float32))
        client.infer("plain", [pixels])
    with pytest.raises(InferenceServerException, match="an output is one of"):
        client.infer("plain", asked([png()]), outputs=[triton.InferRequestedOutput("odd")])
    with pytest.raises(InferenceServerException, match="multi_label and on_error are for"):
        client.infer("plain", asked([png()]), parameters={"multi_label": True})
    with pytest.raises(InferenceServerException, match="reject: true"):
        client.infer("plain", asked([png()]), outputs=[triton.InferRequestedOutput("rejected")])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"inputs": [1]}', b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1]}]}',
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [1]}]}',
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [2], "data": ["aaaa"]}]}',
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}]}',
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aaaa"]}], "outputs": [1]}',
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aaaa"]}], "parameters": []}',
    ],
)  # fmt: skip
def test_odd_inference_requests_are_refused(service, body):
    status, said, _ = ask(service[1], "POST", "/v2/models/plain/infer", body)
    assert 400 <= status < 500 and list(said) == ["error"]
    for header in ("-1", "x", "9" * 30):
        odd = {"Inference-Header-Content-Length": header}
        assert ask(service[1], "POST", "/v2/models/plain/infer", body + b"\0\0", **odd)[0] == 400


# ---- the folder, and watching ----


def test_adapters_are_listed_loaded_again_and_dropped(service, shelf_folder, backbone, tmp_path):
    running, address = service
    perlclip.save_adapter(random_adapter(backbone, "plain", 1), shelf_folder / "changing")
    first = post(address, images=[b64(png(7))], adapters="changing")[1]
    perlclip.save_adapter(random_adapter(backbone, "rising", 2), shelf_folder / "changing")
    running.shelf._kept["changing"].checked -= 10  # as if seconds had gone by
    second = post(address, images=[b64(png(7))], adapters="changing")[1]
    assert first["results"][0]["answers"]["changing"]["steps"] == 4
    assert second["results"][0]["answers"]["changing"]["steps"] == 3
    (shelf_folder / "changing" / "adapter_config.json").write_text("{}")
    running.shelf._kept["changing"].checked -= 10
    status, said = post(address, images=[b64(png(7))], adapters="changing")
    assert status == 500 and "cannot be used" in said["error"]
    assert post(address, images=[b64(png())], adapters="plain")[0] == 200
    listed = ask(address, "GET", "/v1/adapters")[1]
    assert {one["name"] for one in listed["adapters"]} >= set(SERVED) and 0 < listed["bytes"] <= listed["max_bytes"]
    plain = running.shelf.get("plain")  # of which nothing is held but its numbers and class embeddings
    assert held_bytes(plain) <= plain.sheet.bytes + 3 * sum(p.nbytes for p in plain.classifier.method.parameters())
    about = ask(address, "GET", "/v1/adapters/plain")[1]
    assert about["method"] == "perl" and about["class_names"] == list(random_adapter(backbone, "plain", 0).class_names)
    outside = perlclip.save_adapter(random_adapter(backbone, "plain", 3), tmp_path / "outside")
    (shelf_folder / "link").symlink_to(outside)
    assert post(address, images=[b64(png())], adapters="link")[0] == 404
    (shelf_folder / "link").unlink()
    kept, running.shelf.max_bytes = running.shelf.max_bytes, 1
    try:
        assert post(address, images=[b64(png())], adapters="rising", reject=True)[0] == 200
        assert list(running.shelf.loaded()) == ["rising"]  # one is always kept
        assert post(address, images=[b64(png())], adapters=["plain", "steps"])[0] == 200
        assert list(running.shelf.loaded()) == ["steps"]
    finally:
        running.shelf.max_bytes = kept


def test_watching_and_documents(service):
    running, address = service
    assert ask(address, "GET", "/healthz")[:2] == (200, {"live": True})
    assert ask(address, "GET", "/v2/health/ready")[0] == 200
    running.batcher.ready = False  # as while it warms up
    assert ask(address, "GET", "/readyz")[0] == 503
    running.batcher.ready = True
    assert post(address, images=[b64(png())], adapters="plain")[0] == 200
    assert post(address, images=[b64(png())], adapters="nobody")[0] == 404
    text = ask(address, "GET", "/metrics")[1].decode()
    assert 'perlclip_requests_total{route="/v1/predict",status="200"}' in text
    assert "perlclip_decoder_deaths_total" in text and "nobody" not in text
    page = ask(address, "GET", "/")[1].decode()
    assert "/v1/predict" in page and "<script" not in page and "http:" not in page
    assert b"color-scheme" in ask(address, "GET", re.search('href="(/[a-z.]+css)"', page)[1])[1]
    schema = ask(address, "GET", "/openapi.json")[1]
    assert set(schema["paths"]) >= {"/v1/predict", "/v1/adapters", "/v2/models/{name}/infer", "/metrics"}


def test_the_command_serves_and_drains_on_sigterm(shelf_folder, clip_folder):
    """The last request is on its way when the signal comes, and is answered."""
    command = [sys.executable, "-c", "from perlclip.cli import main; main()", "serve", str(shelf_folder)]
    command += [
        "--backbone",
        str(clip_folder),
        "--device",
        "cpu",
        "--port",
        "0",
        "--workers",
        "1",
        "--max-wait-ms",
        "900",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            address = line.split()[-1]
            assert line.startswith(f"{len(SERVED)} adapters") or "adapters on" in line, process.stderr.read()
            assert form(address, [png()], adapters="zero-shot")[0] == 200
            last: list[int] = []
            asking = threading.Thread(target=lambda: last.append(form(address, [png()], adapters="zero-shot")[0]))
            asking.start()
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            asking.join()
            assert last == [200]
            assert process.wait(20) == 0, process.stderr.read()
        finally:
            process.kill()
