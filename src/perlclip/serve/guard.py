"""What keeps a service safe, whatever it serves: who may ask, how much, for how long, and how it says no.

`Guard` is plain ASGI around an app and looks at a request before a byte of its body is read. In this order: the name
it was called by (a page elsewhere may have pointed its own name at 127.0.0.1), the token, where a page's request comes
from, the size that is announced, how many are being answered. Bodies are counted while they are read, all together as
well, and a request ends after a time, body included. Every refusal is `{"error": one sentence}`.

`new_app` is a FastAPI app whose errors look the same and which loads nothing from elsewhere; `run_server` runs one.
"""

import asyncio
import hmac
import logging
import re
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from queue import Queue
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

from perlclip.errors import PerlclipError, Terminated
from perlclip.files import MIB

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise PerlclipError("a service needs FastAPI and uvicorn: pip install 'perlclip[serve]'") from error

COOKIE = "perlclip_token"
TOKEN = re.compile(r"[A-Za-z0-9_.~+/=-]{16,512}")  # what fits in a header and in a cookie
SWITCH_SECONDS = 1e-4  # after which a thread gives way to others that wait
HEAD_SECONDS = 10.0  # for a request's headers, and before the next request
# Says yes or no, nothing else: for whoever watches over the process, also while it is busy.
PROBES = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
SAFE = {"GET", "HEAD", "OPTIONS"}  # methods that change nothing
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
log = logging.getLogger("perlclip.serve")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a service listens, and what it takes."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # needed where it listens wider than this machine
    names: tuple[str, ...] = ()  # what it may be called by beside localhost, as behind a proxy
    max_body: int = 32 * MIB
    max_held: int = 256 * MIB  # bodies of all requests that are being answered
    max_requests: int = 256  # answered at the same time
    max_streams: int = 16  # event streams among them, which have no time limit
    seconds: float = 30.0  # for a request, from its headers to its last byte
    drain_seconds: float = 30.0  # for what is being answered when SIGTERM comes

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise PerlclipError(f"a port is a number from 0 to 65535, got {self.port}")
        if self.token is not None and not TOKEN.fullmatch(self.token):
            raise PerlclipError("a token has 16 to 512 letters, digits and signs of _.~+/=-")
        if not self.loopback and not self.token:
            raise PerlclipError(f"to listen on {self.host}, which others can reach, a token is needed")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, for itself alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """One that nobody guesses."""
    return secrets.token_urlsafe(32)


class Refusal(Exception):  # noqa: N818 (it is an answer)
    """An answer that is no: a status and one sentence."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def busy(sentence: str, seconds: int = 1) -> Refusal:
    """503: come back later."""
    return Refusal(503, sentence, retry_after=str(seconds))


def refuse(refusal: Refusal) -> JSONResponse:
    """A refusal as a response."""
    return JSONResponse({"error": str(refusal)}, refusal.status, refusal.headers)


FAILED = Refusal(500, "the service failed to answer; its log says why")


class Guard:
    """The checks of this module around an app."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits
        self.requests = self.streams = self.held = 0
        self.refused: Counter[int] = Counter()  # by status
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        else:  # there are no web sockets
            await send({"type": "websocket.close", "code": 1003})

    def admit(self, scope: Scope) -> None:
        """Refuse a request by its headers alone."""
        headers = _headers(scope)
        if scope["path"] in PROBES:  # also without a name, as some that watch ask
            return
        if self.limits.loopback and _name(headers.get("host", "")) not in ("localhost", *_OWN, *self.limits.names):
            raise Refusal(421, "this service does not answer under that name; allow it with --name")
        if self.limits.token and not self._has_token(headers):
            raise Refusal(401, "a token is needed: Authorization: Bearer …", www_authenticate="Bearer")
        if scope["method"] not in SAFE:
            self._check_origin(headers)
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > self.limits.max_body:
            raise self.too_large()
        if self.draining or self.requests >= self.limits.max_requests:
            raise busy("too many requests at once; come back in a second")

    def too_large(self) -> Refusal:
        """413: of a body that is announced, or that turns out to be."""
        return Refusal(413, f"a request has at most {self.limits.max_body // MIB or 1} MiB")

    def has_token(self, given: str) -> bool:
        """Whether it is the token; takes as long for any other."""
        return hmac.compare_digest((self.limits.token or "").encode(), given.encode(errors="replace"))

    def _has_token(self, headers: dict[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        return (kind.lower() == "bearer" and self.has_token(given.strip())) or self.has_token(_cookie(headers))

    def _check_origin(self, headers: dict[str, str]) -> None:
        """A browser says where the page comes from that asks for a change: from here, or it is somebody else's."""
        origin = headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise Refusal(403, "pages of other sites may not ask this service")


class _Exchange:
    """One request and its answer; HEAD is answered as GET, of which the server sends no body."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        self.guard, self.scope, self._receive, self._send = guard, scope, receive, send
        self.read = 0
        self.started = self.streaming = False
        self.whole = {b"content-length", b"transfer-encoding"}.isdisjoint(name for name, _ in scope["headers"])
        self.refusal: Refusal | None = None
        self.timeout = asyncio.timeout(guard.limits.seconds)

    async def run(self) -> None:
        guard = self.guard
        try:
            if (page := self._log_in()) is not None:
                await page(self.scope, self._receive, self.send)
                return
            guard.admit(self.scope)
        except Refusal as refusal:
            await self._refuse(refusal)
            return
        self.scope["perlclip.guard"] = guard
        counted = self.scope["path"] not in PROBES
        guard.requests += counted
        try:
            async with self.timeout:
                await guard.app(self.scope, self.receive, self.send)
        except TimeoutError:
            sentence = f"the answer took longer than {guard.limits.seconds:g} seconds"
            late = "the request took too long to arrive"
            self.refusal = Refusal(504, sentence) if self.whole else Refusal(408, late, connection="close")
        except Refusal as refusal:
            self.refusal = refusal
        except ClientDisconnect:  # nobody is there to be answered
            return
        except Exception:
            if self.refusal is None:  # the app's own failure, not that of a body cut short
                log.exception("failed: %s %s", self.scope["method"], self.scope["path"])
                self.refusal = FAILED
        finally:
            guard.requests -= counted
            guard.streams -= self.streaming
            guard.held -= self.read
        if self.refusal and not self.started:
            await self._refuse(self.refusal)

    async def _refuse(self, refusal: Refusal) -> None:
        self.refusal = None
        self.guard.refused[refusal.status] += 1
        await refuse(refusal)(self.scope, self._receive, self.send)

    async def receive(self) -> Message:
        """The body, piece by piece, as long as it is not too much."""
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        limits, size = self.guard.limits, len(message.get("body", b""))
        self.read += size
        self.guard.held += size
        if self.read > limits.max_body:
            self.refusal = self.guard.too_large()
        elif self.guard.held > limits.max_held:
            self.refusal = busy("too many large requests at once; come back in a second")
        if self.refusal:
            raise self.refusal
        self.whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """The app's answer with our headers; nothing of it where it has been refused meanwhile."""
        if self.refusal:  # frameworks make a response of their own of what `receive` raised
            return
        if message["type"] == "http.response.start":
            headers = [(name.lower(), value) for name, value in message.get("headers", [])]
            given = {name for name, _ in headers}
            headers += [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in given]
            message = {**message, "headers": headers}
            if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                if self.guard.streams >= self.guard.limits.max_streams:
                    raise busy("too many event streams are open", 10)
                self.guard.streams += 1
                self.streaming = True
                self.timeout.reschedule(None)
            self.started = True
        await self._send(message)

    def _log_in(self) -> ASGIApp | None:
        """`GET /?token=…`, as a browser is sent there once: the token becomes a cookie and leaves the address."""
        scope = self.scope
        if not self.guard.limits.token or scope["path"] != "/" or scope["method"] != "GET":
            return None
        try:
            given = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20).get("token", [])
        except ValueError:  # too many fields
            return None
        if not given or not self.guard.has_token(given[0]):
            return None
        cookie = f"{COOKIE}={given[0]}; Path=/; HttpOnly; SameSite=Strict"
        return JSONResponse({}, 303, {"location": "/", "set-cookie": cookie})


_OWN = ("127.0.0.1", "::1")


def _name(host: str) -> str:
    """The Host header without its port: `[::1]:8000` -> `::1`."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _cookie(headers: dict[str, str]) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


# ---- apps ----


def new_app(title: str, **more: Any) -> FastAPI:
    """A FastAPI app without its pages, which load scripts from elsewhere, and with errors of one sentence."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, **more)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(PerlclipError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(Exception, _refused)  # which the guard logs
    return app


async def _refused(request: Request, error: Exception) -> JSONResponse:
    return refuse(as_refusal(error))


def as_refusal(error: Exception) -> Refusal:
    """What an error of the asker's says, and its status."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        known = {404: "there is nothing here; /docs lists what there is", 405: "this address takes another method"}
        return Refusal(error.status_code, known.get(error.status_code, str(error.detail)), **(error.headers or {}))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return Refusal(422, f"{'.'.join(map(str, first['loc'][1:])) or 'the request'}: {first['msg']}")
    return Refusal(400, str(error)) if isinstance(error, PerlclipError) else FAILED


def read_json(body: bytes, most: int = 10_000) -> Any:
    """JSON of so many values at most, counted before it is parsed: lists of nothing are a hundred times their text."""
    from perlclip.files import parse_json

    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > most:
        raise Refusal(413, f"the request has more than {most:,} values")
    try:
        return parse_json(body)
    except ValueError as error:  # also of bytes that are no text
        raise PerlclipError(f"the request is not JSON that can be read: {error}") from error


# ---- running ----


class _Impatient(H11Protocol):
    """uvicorn's HTTP, which closes connections that keep it waiting for a request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # for one who never reads the answer
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(3000 * HEAD_SECONDS))
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer:
            self._timer.cancel()

    def _watch(self) -> None:
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)
        elif not waiting and self._timer:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class _Server(uvicorn.Server):
    """Says when it listens, and where; and when it is about to end."""

    def __init__(self, config: uvicorn.Config, guard: Guard, ready: Callable[[str], object]) -> None:
        super().__init__(config)
        self.guard, self.ready = guard, ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: Any = None) -> None:
        self.guard.draining = True
        await super().shutdown(sockets)


def give_way() -> None:
    """For a process that computes in one thread and talks in another: Python's threads take turns fifty times as often.

    Each of PyTorch's operations lets others run and then waits for its turn, 5 ms as Python has it. A batch is hundreds
    of operations: beside a thread that parses requests all the time it took 5.4 s instead of 0.03.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def run_server(app: ASGIApp, limits: Limits, *, ready: Callable[[str], object] = lambda address: None) -> None:
    """Serve until SIGTERM or Ctrl-C; what is being answered then is answered first. `ready` is told the address."""
    server = _make_server(app, limits, ready)
    give_way()
    with suppress(KeyboardInterrupt, Terminated, SystemExit):  # uvicorn raises the signal again when all is answered
        server.run()
    if not server.started:
        raise PerlclipError(f"cannot listen on {limits.host}:{limits.port}: is another service there?")


@contextmanager
def running(app: ASGIApp, limits: Limits) -> Iterator[str]:
    """A service in a thread of this process, for as long as the block lasts: its address."""
    told: Queue[str | None] = Queue()
    server = _make_server(app, limits, told.put)

    def serve() -> None:
        with suppress(SystemExit):
            server.run()
        told.put(None)

    thread = Thread(target=serve, name="perlclip service", daemon=True)
    thread.start()
    address = told.get()
    if address is None:
        raise PerlclipError(f"cannot listen on {limits.host}:{limits.port}: is another service there?")
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join()


def _make_server(app: ASGIApp, limits: Limits, ready: Callable[[str], object]) -> _Server:
    guard = Guard(app, limits)
    config = uvicorn.Config(
        guard, host=limits.host, port=limits.port, http=_Impatient, ws="none", log_level="warning", access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=int(HEAD_SECONDS), backlog=1024,
        limit_concurrency=4 * limits.max_requests, timeout_graceful_shutdown=int(limits.drain_seconds),
    )  # fmt: skip
    return _Server(config, guard, ready)


def names_of(given: Iterable[str]) -> tuple[str, ...]:
    """Names that a service may be called by, as they come in a Host header."""
    return tuple(_name(name) for name in given)
