"""A Hub of our own over real HTTP, which the real `huggingface_hub` talks to: a part of the Hub's API, and faults.

It takes what the client sends to make a model, to upload large files (by Xet, which the client takes where `hf_xet` is
installed, or by git LFS, basic, where that is switched off) and to commit, keeps it in memory, and gives it back to
whoever downloads.

:meth:`Hub.fail` has requests fail as a network or an overloaded server does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

from tests.support import cas

TOKEN = "hf_TestsTokenOfNobody00000000000000"
# Part of the URL that large files are sent to: a secret, as the real Hub's are.
SIGNATURE = "c2lnbmVkLWJ5LXRoZS1odWI"
USER = "ada"


@dataclass
class Repo:
    """A model: whether it is private, what it holds, and the commits that made it so, each with its message."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(self.commits).encode()).hexdigest()


@dataclass
class Fault:
    """What happens to some requests instead of an answer.

    Attributes:
        method, path: of the requests; the path is a regular expression that is searched for.
        times: how many of them.
        status: answered with, and nothing is done; None where the connection breaks.
        headers: of that answer.
        said: the Hub's words in it.
        done: the request is done before the connection breaks.
        hold: waited for first.
    """

    method: str
    path: str
    times: int = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    said: str = "no"
    done: bool = False
    hold: threading.Event | None = None


@dataclass
class Hub:
    """The state of the server; tests read and change it."""

    url: str = ""
    token: str = TOKEN
    role: str = "write"
    orgs: dict[str, str] = field(default_factory=dict)
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    # What came by way of Xet, by the hash of its chunks.
    xorbs: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    # Method and path of each request that came, without what follows a question mark.
    asked: list[tuple[str, str]] = field(default_factory=list)
    # Bytes of large files that were taken.
    sent: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def fail(self, method: str, path: str, **options: Any) -> Fault:
        fault = Fault(method, path, **options)
        self.faults.append(fault)
        return fault

    def count(self, method: str, path: str) -> int:
        return sum(asked == method and re.search(path, where) is not None for asked, where in self.asked)

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.asked.append((method, path))
            for one in self.faults:
                if one.times and one.method == method and re.search(one.path, path):
                    one.times -= 1
                    return one
        return None


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, said: str, code: str = "", commit: str = "", **more: str) -> None:
        super().__init__(said)
        self.status, self.said, self.more = status, said, more
        headers = {"X-Error-Message": said, "X-Error-Code": code, "X-Repo-Commit": commit}
        self.headers = {name: one for name, one in headers.items() if one}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""

    def _serve(self) -> None:
        method, parts = self.command, urlsplit(self.path)
        path = unquote(parts.path)
        fault = self.hub.fault(method, path)
        if fault is not None and fault.hold is not None:
            assert fault.hold.wait(120)
        if fault is not None and fault.status is None and not fault.done and fault.hold is None:
            # Half of what is sent is read, and nothing is answered.
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            return self._hang_up()
        body = self._body()
        if fault is not None and fault.status is not None:
            return self._answer(fault.status, {"error": fault.said}, {**fault.headers, "X-Error-Message": fault.said})
        try:
            with self.hub.lock:
                content, headers = self._do(method, path, parse_qs(parts.query), body)
        except Refused as error:
            return self._answer(error.status, {"error": error.said, **error.more}, error.headers)
        if fault is not None and fault.done:
            return self._hang_up()
        return self._answer(200, content, headers)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _answer(self, status: int, content: Any, headers: Mapping[str, str]) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _do(self, method: str, path: str, query: Mapping[str, list[str]], body: bytes) -> tuple[Any, dict[str, str]]:
        if path.startswith("/lfs/"):
            # A signed URL is a permission by itself.
            if query.get("signature") != [SIGNATURE]:
                raise Refused(403, "the signature is not right")
            oid = path.rpartition("/")[2]
            if hashlib.sha256(body).hexdigest() != oid:
                raise Refused(400, "other bytes than were said")
            self.hub.objects[oid] = body
            self.hub.sent += len(body)
            return {}, {}
        if path.startswith("/cas/"):
            # A token of its own, which was given for this upload.
            if self.headers.get("Authorization") != f"Bearer {SIGNATURE}":
                raise Refused(401, "another token")
            return _stored(self.hub, method, path, body), {}
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise Refused(401, "Invalid credentials in Authorization header")
        for one, pattern, do in _ROUTES:
            if one == method and (found := re.fullmatch(pattern, path)):
                answer: tuple[Any, dict[str, str]] = do(self.hub, *found.groups(), body)
                return answer
        raise Refused(404, f"{method} {path} is not known here")


def _stored(hub: Hub, method: str, path: str, body: bytes) -> Any:
    """The part of Xet's server that an upload needs; no chunk is known to it beforehand, and it grants nothing."""
    if method == "POST" and (found := re.fullmatch(r"/cas/v1/xorbs/default/([0-9a-f]{64})", path)):
        hub.xorbs[found[1]] = body
        hub.sent += len(body)
        return {"was_inserted": True}
    if (method, path) == ("POST", "/cas/v1/shards"):
        for oid, content in cas.files_of(body, hub.xorbs):
            if hashlib.sha256(content).hexdigest() != oid:
                raise Refused(400, "other bytes than were said")
            hub.objects[oid] = content
        return {"result": 1}
    raise Refused(404, f"{method} {path} is not known here")


def _whoami(hub: Hub, body: bytes) -> Any:
    orgs = [{"name": name, "roleInOrg": role} for name, role in hub.orgs.items()]
    return {"name": USER, "type": "user", "orgs": orgs, "auth": {"accessToken": {"role": hub.role}}}, {}


def _create(hub: Hub, body: bytes) -> Any:
    asked = json.loads(body)
    name = f"{asked.get('organization') or USER}/{asked['name']}"
    if name in hub.repos:
        raise Refused(409, "You already created this model repo", url=f"{hub.url}/{name}")
    private = asked["visibility"] == "private" if "visibility" in asked else bool(asked.get("private"))
    hub.repos[name] = Repo(private, {".gitattributes": b""}, ["first"])
    return {"url": f"{hub.url}/{name}"}, {}


def _repo(hub: Hub, name: str) -> Repo:
    if name not in hub.repos:
        raise Refused(404, "Repository not found", "RepoNotFound")
    return hub.repos[name]


def _info(hub: Hub, name: str, _: str | None, body: bytes) -> Any:
    repo = _repo(hub, name)
    found = {
        "id": name,
        "sha": repo.sha,
        "private": repo.private,
        "siblings": [{"rfilename": one} for one in repo.files],
    }
    text = repo.files.get("README.md", b"").decode()
    card = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    return {**found, **({"cardData": card} if card else {})}, {}


def _yaml(hub: Hub, body: bytes) -> Any:
    text = json.loads(body)["content"]
    if not isinstance(yaml.safe_load(text.split("---")[1]), dict):
        raise Refused(400, "the front matter is no mapping")
    return {"errors": [], "warnings": []}, {}


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def _oid(name: str, content: bytes) -> str:
    if _is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _preupload(hub: Hub, name: str, body: bytes) -> Any:
    repo, files = _repo(hub, name), []
    for one in json.loads(body)["files"]:
        path = one["path"]
        oid = _oid(path, repo.files[path]) if path in repo.files else None
        mode = "lfs" if _is_large(path) else "regular"
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": files}, {}


def _batch(hub: Hub, name: str, body: bytes) -> Any:
    _repo(hub, name)
    found = []
    for one in json.loads(body)["objects"]:
        href = f"{hub.url}/lfs/{one['oid']}?signature={SIGNATURE}"
        actions = {} if one["oid"] in hub.objects else {"actions": {"upload": {"href": href}}}
        found.append({**one, **actions})
    return {"transfer": "basic", "objects": found}, {}


def _xet_token(hub: Hub, name: str, body: bytes) -> Any:
    _repo(hub, name)
    return {"casUrl": f"{hub.url}/cas", "exp": 2**33, "accessToken": SIGNATURE}, {}


def _commit(hub: Hub, name: str, body: bytes) -> Any:
    repo = _repo(hub, name)
    files, message = dict(repo.files), ""
    for line in body.splitlines():
        item = json.loads(line)
        value = item["value"]
        match item["key"]:
            case "header":
                message = value["summary"]
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                if value["oid"] not in hub.objects:
                    raise Refused(400, f"{value['path']} was not uploaded")
                files[value["path"]] = hub.objects[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
            case other:
                raise Refused(400, f"what is {other}?")
    repo.files = files
    repo.commits.append(message)
    return {"commitUrl": f"{hub.url}/{name}/commit/{repo.sha}", "commitOid": repo.sha}, {}


def _tree(hub: Hub, name: str, _: str, body: bytes) -> Any:
    repo = _repo(hub, name)
    plain = {
        path: {"type": "file", "path": path, "size": len(one), "oid": _oid(path, one)}
        for path, one in repo.files.items()
    }
    for path, one in plain.items():
        if _is_large(path):
            one["lfs"] = {"oid": one["oid"], "size": one["size"], "pointerSize": 130}
    return list(plain.values()), {}


def _resolve(hub: Hub, name: str, _: str, path: str, body: bytes) -> Any:
    repo = _repo(hub, name)
    if path not in repo.files:
        raise Refused(404, "Entry not found", "EntryNotFound", repo.sha)
    content = repo.files[path]
    return content, {"ETag": f'"{_oid(path, content)}"', "X-Repo-Commit": repo.sha}


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/api/whoami-v2", _whoami),
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _yaml),
    ("POST", rf"/api/models/{_NAME}/preupload/main", _preupload),
    ("POST", rf"/api/models/{_NAME}/commit/main", _commit),
    ("GET", rf"/api/models/{_NAME}/xet-write-token/main", _xet_token),
    ("GET", rf"/api/models/{_NAME}/tree/([\w.-]+)", _tree),
    ("GET", rf"/api/models/{_NAME}(?:/revision/([\w.-]+))?", _info),
    ("POST", rf"/{_NAME}.git/info/lfs/objects/batch", _batch),
    ("GET", rf"/{_NAME}/resolve/([\w.-]+)/(.+)", _resolve),
    ("HEAD", rf"/{_NAME}/resolve/([\w.-]+)/(.+)", _resolve),
]


@contextmanager
def serve() -> Iterator[Hub]:
    """A server on a free port."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(120)


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """What a process is started with whose Hub this is."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def use(hub: Hub, home: Path, patch: pytest.MonkeyPatch) -> list[float]:
    """Make it the Hub of this process, whose client has read its environment; what the client would have slept."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    slept: list[float] = []
    for name, value in environment(hub, home).items():
        if name != "HF_HUB_OFFLINE":
            patch.setenv(name, value)
    patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    for name, one in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_CACHE": str(home / "hub"),
    }.items():
        patch.setattr(constants, name, one)
    patch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
    patch.setattr(_http, "time", SimpleNamespace(sleep=slept.append))
    return slept
