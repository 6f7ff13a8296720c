# SPDX-License-Identifier: Apache-2.0
"""A Hub on loopback: the part of its HTTP protocol that uploads, downloads and cards use, with faults on request.

Two ports, as on the Hub: one for the API, one for the large files (uploads go there by signed links, downloads are
redirected there, and a token that is sent along is refused). Commits are atomic. Large files go by the `basic` and
`multipart` transfers of git-lfs; the clients are to run with xet turned off.

Sources: the requests of huggingface_hub 1.33 and 2.4 (`hf_api.py`, `_commit_api.py`, `lfs.py`, `file_download.py`),
https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

TOKEN, READ_TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123", "hf_readReadReadReadReadReadRead000"
USER = "alice"
LOOPBACK = "localhost,127.0.0.1"
LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.png")
GITATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS).encode()


class Failure(Exception):
    """An answer that is an error: status, `X-Error-Code`, message, further headers."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers


class Dropped(Exception):
    """The connection is closed without an answer."""


@dataclass
class Fault:
    """What happens to the `first`-th request (from 1) that matches, and to the `times - 1` after it.

    Attributes:
        pattern: regex, searched in `METHOD /path?query`.
        status: of the answer; 0: the connection is closed with half the body read; -1: the request is carried out and
            the connection closed before the answer; -2: half of the answer is sent.
        headers: of the answer.
    """

    pattern: str
    status: int
    first: int = 1
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "fault"
    seen: int = 0

    def strikes(self, request: str) -> bool:
        if not re.search(self.pattern, request):
            return False
        self.seen += 1
        return self.first <= self.seen < self.first + self.times


@dataclass
class Entry:
    """A file of a commit: bytes of its own, or of a large file."""

    content: bytes
    large: bool

    @property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

    def described(self, path: str) -> dict:
        out = {"type": "file", "path": path, "size": len(self.content), "oid": self.oid}
        if self.large:
            out["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return out


@dataclass
class Repo:
    private: bool
    owner: str
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Entry], title: str) -> str:
        self.titles.append(title)
        sha = hashlib.sha1(repr((branch, len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def sha(self, revision: str) -> str:
        revision = unquote(revision)
        if revision in self.branches:
            return self.branches[revision]
        if revision in self.commits:
            return revision
        raise Failure(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def files(self, revision: str = "main") -> dict[str, Entry]:
        return self.commits[self.sha(revision)]


class HubServer:
    """The Hub: `with HubServer() as hub: HfApi(endpoint=hub.endpoint, token=TOKEN)`.

    Attributes:
        repos: by id.
        large: large files that were uploaded, by sha256, in a commit or not.
        log: requests as `METHOD /path?query -> status`, in the order of their answers.
        sent: bytes of the bodies of answers, in all, by path.
        received: bytes of the large files that arrived.
        faults: see `Fault`.
        part: files larger than this go by the multipart transfer, in parts of this many bytes.
    """

    def __init__(self, part: int = 1_000_000):
        self.part = part
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.log: list[str] = []
        self.sent: dict[str, int] = {}
        self.received = 0
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, routes)) for routes in (API, STORAGE)]
        # Two hosts and not only two ports: huggingface_hub 1.x takes ports of one host for one origin.
        self.endpoint = f"http://localhost:{self.servers[0].server_port}"
        self.storage = f"http://127.0.0.1:{self.servers[1].server_port}"

    def __enter__(self) -> HubServer:
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def fail(self, pattern: str, status: int, **options) -> Fault:
        self.faults.append(Fault(pattern, status, **options))
        return self.faults[-1]

    def count(self, pattern: str) -> int:
        """How many requests there were that match."""
        return sum(bool(re.search(pattern, line)) for line in self.log)

    def environment(self, home, token: str | None = TOKEN) -> dict[str, str]:
        """Environment variables for a process that is to use this Hub, with a cache of its own."""
        out = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        out |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}
        return out | ({} if token is None else {"HF_TOKEN": token})


@dataclass
class Call:
    """A request, and the answer to it: `status`, `headers`, `body`."""

    hub: HubServer
    groups: tuple[str, ...]
    query: dict[str, str]
    headers: dict[str, str]
    content: bytes
    user: str | None
    can_write: bool
    status: int = 200
    answer: dict[str, str] = field(default_factory=dict)

    def json(self) -> dict:
        return json.loads(self.content)

    def repo(self, write: bool = False) -> Repo:
        repo = self.hub.repos.get(self.groups[0])
        if self.user is None and (repo is None or repo.private):  # of which names exist, nobody is told
            raise Failure(401, "Invalid username or password.", "RepoNotFound")
        if repo is None or (repo.private and self.user != repo.owner):
            raise Failure(404, "Repository not found", "RepoNotFound")
        if write and not (self.user == repo.owner and self.can_write):
            raise Failure(403, f"Forbidden: you don't have the rights to write to {self.groups[0]}")
        return repo


def whoami(call: Call) -> dict:
    if call.user is None:
        raise Failure(401, "Invalid username or password.")
    return {"type": "user", "name": call.user, "fullname": call.user, "orgs": [], "auth": {"type": "access_token"}}


def create_repo(call: Call) -> dict:
    wanted = call.json()
    if call.user is None:
        raise Failure(401, "Invalid username or password.")
    owner = wanted.get("organization") or call.user
    name = f"{owner}/{wanted['name']}"
    if owner != call.user or not call.can_write:
        raise Failure(403, f"You don't have the rights to create a model under the namespace {owner!r}")
    if name in call.hub.repos:
        call.status = 409
        return {"error": "You already created this model repo", "url": f"{call.hub.endpoint}/{name}"}
    repo = Repo(wanted.get("private") is True or wanted.get("visibility") == "private", owner)
    repo.commit("main", {".gitattributes": Entry(GITATTRIBUTES, False)}, "initial commit")
    call.hub.repos[name] = repo
    return {"url": f"{call.hub.endpoint}/{name}", "name": name}


def validate_card(call: Call) -> dict:
    """Metadata as the Hub checks it, in part: YAML, a mapping, ids and lists where they are expected."""
    found = re.match(r"---\n(.*?)\n---", call.json()["content"], re.DOTALL)
    errors = []
    try:
        data = yaml.safe_load(found[1]) if found else {}
        if not isinstance(data, dict):
            errors.append("metadata is not a mapping")
        for key, shape in (("base_model", r"[\w.-]+(/[\w.-]+)?"), ("license", r"[a-z0-9.-]+"), ("pipeline_tag", ".+")):
            if key in data and not (isinstance(data[key], str) and re.fullmatch(shape, data[key])):
                errors.append(f'"{key}" with value {data[key]!r} is not valid')
        if not all(isinstance(tag, str) for tag in data.get("tags", [])):
            errors.append('"tags" must be strings')
    except yaml.YAMLError as error:
        errors.append(f"YAML: {error}")
    call.status = 400 if errors else 200
    return {"errors": [{"message": error} for error in errors], "warnings": []}


def preupload(call: Call) -> dict:
    repo = call.repo(write=True)
    there, wanted = repo.files(call.groups[1]), call.json()
    ignored = wanted.get("gitIgnore")
    if ignored is None:
        ignored = there[".gitignore"].content.decode() if ".gitignore" in there else ""
    out = []
    for file in wanted["files"]:
        path, large = file["path"], file["size"] > 10_000_000
        large = large or any(fnmatch.fnmatch(path, pattern) for pattern in LFS_PATTERNS)
        skip = any(fnmatch.fnmatch(path, line) for line in ignored.split() if not line.startswith("#"))
        oid = {"oid": there[path].etag} if path in there and there[path].large == large else {}
        out.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": skip, **oid})
    return {"files": out}


def lfs_batch(call: Call) -> dict:
    call.repo(write=True)
    hub, objects = call.hub, []
    for wanted in call.json()["objects"]:
        sha, size = wanted["oid"], wanted["size"]
        objects.append({"oid": sha, "size": size})
        if sha in hub.large:
            continue
        upload = {"href": f"{hub.storage}/put/{sha}?signature=x"}
        if size > hub.part:
            hrefs = {f"{i + 1:05}": f"{hub.storage}/put/{sha}?part={i + 1}" for i in range(-(-size // hub.part))}
            upload = {"href": f"{hub.endpoint}/complete/{sha}", "header": {"chunk_size": str(hub.part), **hrefs}}
        objects[-1]["actions"] = {"upload": upload, "verify": {"href": f"{hub.endpoint}/{call.groups[0]}.git/verify"}}
    return {"transfer": "basic", "objects": objects}


def put_large(call: Call) -> bytes:
    sha = call.groups[0]
    call.answer["ETag"] = f'"{hashlib.md5(call.content).hexdigest()}"'
    with call.hub.lock:
        call.hub.received += len(call.content)
        if "part" in call.query:
            call.hub.parts.setdefault(sha, {})[int(call.query["part"])] = call.content
        else:
            keep_large(call.hub, sha, call.content)
    return b""


def complete_large(call: Call) -> dict:
    if call.groups[0] in call.hub.large:  # asked again, after the first answer was lost
        return {}
    parts, wanted = call.hub.parts.pop(call.groups[0], {}), call.json()["parts"]
    etags = {number: f'"{hashlib.md5(part).hexdigest()}"' for number, part in parts.items()}
    if {part["partNumber"]: part["etag"] for part in wanted} != etags:
        raise Failure(400, "parts and ETags do not belong together")
    keep_large(call.hub, call.groups[0], b"".join(parts[number] for number in sorted(parts)))
    return {}


def keep_large(hub: HubServer, sha: str, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != sha:
        raise Failure(400, "content does not have the sha256 that was announced")
    hub.large[sha] = content


def verify_large(call: Call) -> dict:
    call.repo(write=True)
    wanted = call.json()
    if len(call.hub.large.get(wanted["oid"], b"")) != wanted["size"]:
        raise Failure(404, "not uploaded")
    return {}


def commit(call: Call) -> dict:
    repo, branch = call.repo(write=True), unquote(call.groups[1])
    with call.hub.lock:
        files, title = dict(repo.files(branch)), ""
        if branch not in repo.branches:
            raise Failure(403, "a commit goes on a branch")
        for line in call.content.splitlines():
            key, value = json.loads(line).values()
            if key == "header":
                title = value["summary"]
                if value.get("parentCommit", repo.branches[branch]) != repo.branches[branch]:
                    raise Failure(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = Entry(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                if value["oid"] not in call.hub.large:
                    raise Failure(400, f"large file {value['path']} was not uploaded")
                files[value["path"]] = Entry(call.hub.large[value["oid"]], True)
            elif key == "deletedFile" and files.pop(value["path"], None) is None:
                raise Failure(404, "A file with this name doesn't exist", "EntryNotFound")
        sha = repo.commit(branch, files, title)
    return {"commitUrl": f"{call.hub.endpoint}/{call.groups[0]}/commit/{sha}", "commitOid": sha, "success": True}


def info(call: Call) -> dict:
    repo = call.repo()
    revision = call.groups[1] if len(call.groups) > 1 else "main"
    siblings = []
    for path, entry in repo.files(revision).items():
        siblings.append({"rfilename": path})
        if "blobs" in call.query:
            siblings[-1] |= {"size": len(entry.content), "blobId": entry.oid}
        if "blobs" in call.query and entry.large:
            siblings[-1]["lfs"] = {"sha256": entry.sha256, "size": len(entry.content), "pointerSize": 134}
    name = call.groups[0]
    return {"id": name, "sha": repo.sha(revision), "private": repo.private, "siblings": siblings, "tags": []}


def tree(call: Call) -> list:
    files, folder = call.repo().files(call.groups[1]), unquote(call.groups[2] or "").strip("/")
    inside = {path: entry for path, entry in files.items() if path.startswith(f"{folder}/" if folder else "")}
    if folder and not inside:
        raise Failure(404, f"{folder} does not exist", "EntryNotFound")
    return [entry.described(path) for path, entry in inside.items()]


def paths_info(call: Call) -> list:
    files = call.repo().files(call.groups[1])
    return [files[path].described(path) for path in parse_qs(call.content.decode())["paths"] if path in files]


def refs(call: Call) -> dict:
    heads = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": sha} for b, sha in call.repo().branches.items()]
    return {"branches": heads, "tags": [], "converts": [], "pullRequests": []}


def create_branch(call: Call) -> dict:
    repo, branch = call.repo(write=True), unquote(call.groups[1])
    if branch in repo.branches:
        raise Failure(409, "Reference already exists")
    repo.branches[branch] = repo.branches["main"]
    return {}


def resolve(call: Call) -> bytes:
    repo = call.repo()
    call.answer["X-Repo-Commit"] = repo.sha(call.groups[1])
    entry = repo.files(call.groups[1]).get(unquote(call.groups[2]))
    if entry is None:
        raise Failure(404, "Entry not found", "EntryNotFound", **call.answer)
    if not entry.large:
        call.answer["ETag"] = f'"{entry.oid}"'
        return ranged(call, entry.content)
    call.status = 302
    call.answer |= {"X-Linked-Size": str(len(entry.content)), "X-Linked-Etag": f'"{entry.sha256}"'}
    call.answer["Location"] = f"{call.hub.storage}/get/{entry.sha256}?signature=x"
    return b""


def get_large(call: Call) -> bytes:
    if "authorization" in call.headers:
        raise Failure(400, "a token was sent to the storage")
    content = call.hub.large[call.groups[0]]
    call.answer["ETag"] = f'"{call.groups[0]}"'
    return ranged(call, content)


def ranged(call: Call, content: bytes) -> bytes:
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
    call.answer["Accept-Ranges"] = "bytes"
    if not found:
        return content
    first, last = int(found[1]), int(found[2] or len(content))
    if first >= len(content):
        raise Failure(416, "Range Not Satisfiable", **{"Content-Range": f"bytes */{len(content)}"})
    part = content[first : last + 1]
    call.status = 206
    call.answer["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
    return part


ID, REVISION = r"([\w.-]+/[\w.-]+)", r"([^/]+)"
Routes = tuple[tuple[str, Callable[[Call], object]], ...]
API: Routes = (
    (r"GET /api/whoami-v2", whoami),
    (r"POST /api/repos/create", create_repo),
    (r"POST /api/validate-yaml", validate_card),
    (rf"POST /api/models/{ID}/preupload/{REVISION}", preupload),
    (rf"POST /api/models/{ID}/commit/{REVISION}", commit),
    (rf"POST /api/models/{ID}/paths-info/{REVISION}", paths_info),
    (rf"POST /api/models/{ID}/branch/{REVISION}", create_branch),
    (rf"GET /api/models/{ID}/tree/{REVISION}(/.*)?", tree),
    (rf"GET /api/models/{ID}/revision/{REVISION}", info),
    (rf"GET /api/models/{ID}/refs", refs),
    (rf"GET /api/models/{ID}", info),
    (rf"POST /{ID}\.git/info/lfs/objects/batch", lfs_batch),
    (rf"POST /{ID}\.git/verify", verify_large),
    (r"POST /complete/(\w+)", complete_large),
    (rf"(?:GET|HEAD) /{ID}/resolve/{REVISION}/(.+)", resolve),
)
STORAGE: Routes = ((r"PUT /put/(\w+)", put_large), (r"(?:GET|HEAD) /get/(\w+)", get_large))


def _handler(hub: HubServer, routes: Routes) -> type[BaseHTTPRequestHandler]:
    """A handler class: `http.server` makes an object of it for each connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *message) -> None:
            pass

        def handle_any(self) -> None:
            request = f"{self.command} {self.path}"
            try:
                status = self.answer(request)
            except (Dropped, ConnectionError):
                status = "dropped"
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            hub.log.append(f"{request} -> {status}")

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def answer(self, request: str) -> int:
            with hub.lock:
                fault = next((fault for fault in hub.faults if fault.strikes(request)), None)
            if fault and fault.status == 0:
                self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
                raise Dropped
            content = self.body()
            try:
                if fault and fault.status > 0:
                    raise Failure(fault.status, fault.message, **fault.headers)
                call, body = self.carry_out(request, content)
            except Failure as failure:
                headers = failure.headers | {"X-Error-Message": failure.message}
                headers |= {"X-Error-Code": failure.code} if failure.code else {}
                error = json.dumps({"error": failure.message}).encode()
                return self.send(failure.status, headers | {"Content-Type": "application/json"}, error)
            if fault and fault.status == -1:
                raise Dropped
            return self.send(call.status, call.answer, body, half=fault is not None)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            out = b""
            while size := int(self.rfile.readline(), 16):
                out += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return out

        def carry_out(self, request: str, content: bytes) -> tuple[Call, bytes]:
            url = urlsplit(self.path)
            headers = {key.lower(): value for key, value in self.headers.items()}
            token = headers.get("authorization", "").removeprefix("Bearer ")
            if token and routes is API and token not in (TOKEN, READ_TOKEN):
                raise Failure(401, "Invalid credentials in Authorization header")
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            for pattern, function in routes:
                if found := re.fullmatch(pattern, f"{self.command} {url.path}"):
                    user = USER if token else None
                    call = Call(hub, found.groups(), query, headers, content, user, token == TOKEN)
                    result = function(call)
                    if isinstance(result, bytes):
                        return call, result
                    call.answer["Content-Type"] = "application/json"
                    return call, json.dumps(result).encode()
            raise Failure(404, f"this Hub does not know {request}")

        def send(self, status: int, headers: dict[str, str], body: bytes, half: bool = False) -> int:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                body = body[: len(body) // 2] if half else body
                self.wfile.write(body)
                self.wfile.flush()
                path = urlsplit(self.path).path
                with hub.lock:
                    hub.sent[path] = hub.sent.get(path, 0) + len(body)
                if half:
                    raise Dropped
            return status

    return Handler


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process uses: endpoint, token and a cache of its own; waiting takes no time and is recorded."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with HubServer() as server:
        # Read from the environment when huggingface_hub is imported, which was long ago.
        files = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": files,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "hub_cache"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", LOOPBACK)
        server.waits = []
        monkeypatch.setattr("time.sleep", server.waits.append)
        close_session()  # a client is kept, with the environment's proxies as they were
        yield server
        close_session()
