"""A small hub: as much of huggingface.co's HTTP interface as the real client needs to push and pull a model."""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """`repos` has the commits of each repository, oldest first: (commit, {file: content}); `asked` what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}  # by hash, until a commit names them
        self.asked: list[str] = []
        self.sizes: dict[str, int | None] = {}  # what is said instead of the truth
        self.sha = ""  # likewise
        self.gated: set[str] = set()
        self.cards: list[str] = []  # that were to be checked
        self.complaints: list[dict[str, str]] = []  # about them
        self.headers: dict[str, str] = {}  # of files, instead of the right ones

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        history = self.repos.setdefault(repo, [])
        oid = hashlib.sha1(f"{repo}{len(history)}".encode()).hexdigest()
        history.append((oid, {**(history[-1][1] if history else {}), **files}))
        return oid


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: bytes | dict, status: int = 200, **headers: str) -> None:
        if isinstance(content, dict):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json", **headers}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, code: str, status: int = 404) -> None:
        self.answer({"error": code}, status, X_Error_Code=code)

    def parts(self) -> list[str]:
        path = urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")
        return [unquote(part) for part in path.strip("/").split("/")]

    def revision(self, repo: str, name: str) -> tuple[str, dict[str, bytes]] | None:
        history = self.server.repos.get(repo)
        if history is None:
            self.refuse("RepoNotFound")
        elif repo in self.server.gated and self.headers.get("Authorization") is None:
            self.refuse("GatedRepo", 403)
        else:
            found = history[-1:] if name == "main" else [one for one in history if one[0] == name]
            if found:
                return found[0]
            self.refuse("RevisionNotFound")
        return None

    def do_GET(self) -> None:
        match self.parts():
            case ["api", "models", user, repo, *rest] if not rest or rest[0] == "revision":
                if found := self.revision(f"{user}/{repo}", rest[1] if rest else "main"):
                    sizes = {name: len(content) for name, content in found[1].items()} | self.server.sizes
                    files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
                    self.answer({"id": f"{user}/{repo}", "sha": self.server.sha or found[0], "siblings": files})
            case [user, repo, "resolve", revision, *path]:
                if found := self.revision(f"{user}/{repo}", revision):
                    content = found[1].get("/".join(path))
                    if content is None:
                        self.refuse("EntryNotFound")
                        return
                    etag = hashlib.sha256(content).hexdigest()
                    self.answer(content, **({"ETag": f'"{etag}"', "X_Repo_Commit": found[0]} | self.server.headers))
            case _:
                self.refuse("EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = self.parts()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
            return
        match parts:
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                repo = f"{asked['organization']}/{asked['name']}"
                known = repo in self.server.repos
                self.server.repos.setdefault(repo, [])
                self.server.private.setdefault(
                    repo, asked.get("visibility") == "private" or asked.get("private", False)
                )
                url = {"url": f"{self.server.url}/{repo}", "id": repo, "name": repo}
                self.answer(url, 409 if known else 200)
            case ["api", "validate-yaml"]:
                self.server.cards.append(json.loads(body)["content"])
                status = 400 if self.server.complaints else 200
                self.answer({"errors": self.server.complaints, "warnings": []}, status)
            case ["api", "models", _, _, "preupload", _]:
                modes = [
                    {"path": file["path"], "shouldIgnore": False, "uploadMode": mode(file["path"])}
                    for file in json.loads(body)["files"]
                ]
                self.answer({"files": modes})
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = [
                    {**one, "actions": {"upload": {"href": f"{self.server.url}/large/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                self.answer({"transfer": "basic", "objects": objects})
            case ["api", "models", user, repo, "commit", "main"]:
                self.answer(self.made(f"{user}/{repo}", [json.loads(line) for line in body.splitlines()]))
            case _:
                self.refuse("EntryNotFound")

    def made(self, repo: str, lines: list[dict]) -> dict[str, str]:
        files = {}
        for value in (line["value"] for line in lines if line["key"] != "header"):
            large = "content" not in value
            files[value["path"]] = self.server.large[value["oid"]] if large else base64.b64decode(value["content"])
        oid = self.server.commit(repo, files)
        return {"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid}

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(body).hexdigest() == self.parts()[1]
        self.server.large[self.parts()[1]] = body
        self.answer(b"")


def mode(path: str) -> str:
    """As the hub's: what is binary goes another way."""
    return "lfs" if path.endswith(".safetensors") else "regular"
