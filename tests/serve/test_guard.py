"""The guard, over real sockets: who may ask, how much, for how long."""

import contextlib
import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse

from perlclip.errors import PerlclipError
from perlclip.serve import guard as module
from perlclip.serve.guard import Limits, new_app, new_token, read_json, running

TOKEN = "a-token-that-is-long-enough"


def make_app():
    app = new_app("test")
    app.state.inside, app.state.go = threading.Semaphore(0), threading.Event()

    @app.post("/echo")
    async def echo(request: Request):
        return {"bytes": len(await request.body())}

    @app.post("/wait")
    def wait():
        app.state.inside.release()
        app.state.go.wait(10)
        return {}

    @app.get("/sleep")
    async def sleep():
        import asyncio

        await asyncio.sleep(10)

    @app.get("/fails")
    async def fails():
        raise ValueError("secret")

    @app.get("/user")
    async def user():
        raise PerlclipError("that cannot be")

    @app.get("/events")
    async def events():
        async def numbers():
            import asyncio

            for n in range(3):
                await asyncio.sleep(0.3)
                yield f"data: {n}\n\n"

        return StreamingResponse(numbers(), media_type="text/event-stream")

    @app.get("/healthz")
    async def healthz():
        return {}

    return app


def ask(address, method, path, body=None, **headers):
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content.startswith(b"{") else content, response.headers


@pytest.fixture(scope="module")
def service():
    app = make_app()
    with running(app, Limits(port=0, max_body=1000, max_requests=2, max_streams=1, seconds=0.5)) as address:
        yield address, app


def test_it_is_called_by_its_own_name_only(service):
    address, _ = service
    for name in ("127.0.0.1", "localhost:1234", "[::1]:80", "LOCALHOST"):
        assert ask(address, "POST", "/echo", b"abc", Host=name)[:2] == (200, {"bytes": 3})
    for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        status, said, _ = ask(address, "POST", "/echo", b"abc", Host=name)
        assert status == 421 and "name" in said["error"]
    for method, name in (("GET", ""), ("GET", "10.0.0.7"), ("HEAD", "localhost")):  # whoever watches over it
        assert ask(address, method, "/healthz", Host=name)[:2] == (200, {} if method == "GET" else b"")


def test_pages_of_others_cannot_ask(service):
    address, _ = service
    own = urlsplit(address).netloc
    assert ask(address, "POST", "/echo", b"", Origin=f"http://{own}", Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(address, "POST", "/echo", b"", Origin="http://evil.example")[0] == 403
    assert ask(address, "POST", "/echo", b"", Origin="null")[0] == 403
    assert ask(address, "POST", "/echo", b"", Sec_Fetch_Site="same-site")[0] == 403
    status, _, headers = ask(address, "OPTIONS", "/echo", Origin="http://evil.example")
    assert status == 405 and not [name for name in headers if name.lower().startswith("access-control")]


def test_a_body_is_bounded_before_it_is_read_and_while_it_is(service):
    address, _ = service
    assert ask(address, "POST", "/echo", b"x" * 1000)[:2] == (200, {"bytes": 1000})
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port)) as raw:  # announced: refused with nothing sent
        raw.sendall(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    status, said, _ = ask(address, "POST", "/echo", iter([b"x" * 600, b"x" * 600]))
    assert status == 413 and "MiB" in said["error"]


def test_what_takes_too_long_ends_and_streams_may_take_longer(service):
    address, _ = service
    status, said, _ = ask(address, "GET", "/sleep")
    assert status == 504 and "0.5 seconds" in said["error"]
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port)) as raw:
        raw.sendall(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        assert raw.recv(100).startswith(b"HTTP/1.1 408")
    assert ask(address, "GET", "/events")[1].count(b"data:") == 3


def test_too_many_at_once_are_told_to_come_back(service):
    address, app = service
    threads = [threading.Thread(target=ask, args=(address, "POST", "/wait")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert app.state.inside.acquire(timeout=5)
    try:
        status, said, headers = ask(address, "POST", "/echo", b"")
        assert status == 503 and headers["Retry-After"] == "1" and "second" in said["error"]
        assert ask(address, "GET", "/healthz")[0] == 200
    finally:
        app.state.go.set()
        for thread in threads:
            thread.join()
    assert ask(address, "POST", "/echo", b"")[0] == 200


def test_errors_are_one_sentence_and_say_nothing_of_the_inside(service, caplog):
    address, _ = service
    assert ask(address, "GET", "/user")[:2] == (400, {"error": "that cannot be"})
    status, said, headers = ask(address, "GET", "/fails")
    assert status == 500 and "secret" not in said["error"]
    until = time.monotonic() + 5
    while "secret" not in caplog.text and time.monotonic() < until:  # it is logged after the answer
        time.sleep(0.01)
    assert "secret" in caplog.text
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["X-Content-Type-Options"] == "nosniff"
    assert "server" not in headers and headers["Cache-Control"] == "no-store"
    status, said, headers = ask(address, "GET", "/nothing")
    assert status == 404 and list(said) == ["error"]


def test_who_never_sends_a_request_is_cut_off(service, monkeypatch):
    address, _ = service
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.2)
    place = urlsplit(address)
    for sent in (b"", b"GET / HT"):
        with socket.create_connection((place.hostname, place.port), timeout=5) as raw:
            raw.sendall(sent)
            began = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert raw.recv(100) == b""
            assert time.monotonic() - began < 4


def test_where_others_reach_it_a_token_is_needed():
    with pytest.raises(PerlclipError, match="token"):
        Limits(host="0.0.0.0")
    for bad in ("short", "with a space in it at all", "a" * 20 + "\n", "a;b" * 10):
        with pytest.raises(PerlclipError, match="16"):
            Limits(token=bad)
    assert Limits(host="::1").loopback and not Limits(host="example.org", token=new_token()).loopback
    with running(make_app(), Limits(host="0.0.0.0", port=0, token=TOKEN)) as address:
        address = address.replace("0.0.0.0", "127.0.0.1")
        assert ask(address, "GET", "/healthz", Host="some.name")[0] == 200
        assert ask(address, "POST", "/echo", b"")[0] == 401
        assert ask(address, "POST", "/echo", b"", Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert ask(address, "POST", "/echo", b"", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask(address, "GET", "/?token=wrong")[0] == 401
        status, _, headers = ask(address, "GET", f"/?token={TOKEN}")
        assert status == 303 and headers["Location"] == "/" and "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
        assert ask(address, "POST", "/echo", b"", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200


def test_a_port_in_use_is_said(service):
    address, _ = service
    with (
        pytest.raises(PerlclipError, match="is another service there"),
        running(make_app(), Limits(port=urlsplit(address).port)),
    ):
        pass


def test_json_is_bounded_by_its_values():
    assert read_json(b'{"a": [1, 2]}') == {"a": [1, 2]}
    for bad, match in ((b"[" + b"[]," * 5000 + b"[]]", "more than"), (b"\xff\xfe", "JSON"), (b"{", "JSON")):
        with pytest.raises(Exception, match=match):
            read_json(bad)
    with pytest.raises(PerlclipError, match="nested"):
        read_json(b"[" * 5000 + b"]" * 5000)
