"""A small Hub on the loopback interface, for the real `huggingface_hub` client: repositories in memory, each one commit a branch.

It speaks the part of the Hub's HTTP API that the client uses to read and to push: model info, trees, refs, `resolve`, creation,
`preupload`, Git LFS with the basic transfer, and commits. Refusals carry the Hub's own headers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_testing"
OWNER = "someone"
"""Whose token it is."""
LARGE = (".safetensors", ".bin", ".model")

Files = dict[str, bytes]
Answer = tuple[int, object, dict[str, str]]


@dataclass(kw_only=True)
class Repository:
    branches: dict[str, Files] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, or the commit itself."""
        for name in self.branches:
            if revision in (name, self._sha(name)):
                return self._sha(name)
        return None

    def files(self, revision: str) -> Files:
        return next(files for name, files in self.branches.items() if revision in (name, self._sha(name)))

    def _sha(self, branch: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.branches[branch].items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


class Hub:
    """What the server holds and what it was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """Of Git LFS, by their digest."""
        self.requests: list[str] = []
        self.spoil: Callable[[str, int, object, dict[str, str]], Answer] = lambda path, *answer: answer
        """What becomes of an answer to a path on its way: of its status, body and headers."""
        self.failures = 0
        """So many requests that write are answered with 500."""
        self.url = ""

    def add(self, name: str, files: Files | Path, **more: bool) -> Repository:
        """A repository with these files on its branch main."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        self.repositories[name] = Repository(branches={"main": files}, **more)
        return self.repositories[name]

    def asked(self, *words: str) -> list[str]:
        """The requests that contain all these words."""
        return [line for line in self.requests if all(word in line for word in words)]

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """For a process whose client talks to this server alone, with a cache of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return {**kept, **own, **more}


@contextmanager
def hub_server() -> Iterator[Hub]:
    """The server, on a port of its own."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Nothing on the terminal."""

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _answer(self, status: int, body: object = None, **headers: str) -> None:
        status, body, headers = self.hub.spoil(self.path, status, body, headers)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _readable(self, name: str) -> Repository | None:
        """A repository that the client may read; otherwise it has been refused."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._has_token):
            # The Hub does not tell a stranger what there is.
            self._refuse(404 if self._has_token else 401, "RepoNotFound")
            return None
        return repository

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        words = [unquote(word) for word in path.strip("/").split("/")]
        if words[:2] == ["api", "whoami-v2"]:
            if self._has_token:
                self._answer(200, {"type": "user", "name": OWNER, "orgs": [], "auth": {}})
            else:
                self._answer(401, {"error": "Invalid credentials"})
            return
        name = "/".join(words[2:4] if words[0] == "api" else words[:2])
        if (repository := self._readable(name)) is None:
            return
        rest = words[4:] if words[0] == "api" else words[2:]
        if rest[:1] == ["refs"]:
            branches = [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": repository.commit(b)} for b in repository.branches
            ]
            self._answer(200, {"branches": branches, "tags": [], "converts": []})
            return
        revision = rest[1] if len(rest) > 1 else "main"
        if (commit := repository.commit(revision)) is None:
            self._refuse(404, "RevisionNotFound")
            return
        files = repository.files(revision)
        if rest[:1] == ["resolve"] and repository.gated and not self._has_token:
            self._refuse(401, "GatedRepo")
        elif rest[:1] == ["resolve"]:
            self._file(files, "/".join(rest[2:]), commit)
        elif rest[:1] == ["tree"]:
            self._answer(200, [_entry("path", path, content) | {"type": "file"} for path, content in files.items()])
        else:
            siblings = [_entry("rfilename", path, content) for path, content in files.items()]
            info = {
                "id": name,
                "sha": commit,
                "private": repository.private,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
            }
            self._answer(200, {**info, "modelId": name, "likes": 0})

    def _file(self, files: Files, path: str, commit: str) -> None:
        if path not in files:
            self._refuse(404, "EntryNotFound")
            return
        entry = _entry("path", path, files[path])
        etag = f'"{entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]}"'
        self._answer(200, files[path], ETag=etag, X_Repo_Commit=commit, Content_Type="application/octet-stream")

    def do_PUT(self) -> None:
        content = self._body()
        self.hub.requests.append(f"PUT {self.path}")
        digest = hashlib.sha256(content).hexdigest()
        assert self.path == f"/objects/{digest}"
        self.hub.objects[digest] = content
        self._answer(200, {})

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self._body()
        self.hub.requests.append(f"POST {path}")
        words = [unquote(word) for word in path.strip("/").split("/")]
        if words[:2] == ["api", "validate-yaml"]:
            self._answer(200, {"errors": [], "warnings": []})
        elif not self._has_token:
            self._refuse(401, "RepoNotFound")
        elif self.hub.failures > 0:
            self.hub.failures -= 1
            self._answer(500, {"error": "the server's own"})
        elif words[:3] == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif words[2:5] == ["info", "lfs", "objects"]:
            self._answer(200, self._batch(json.loads(body)), Content_Type="application/vnd.git-lfs+json")
        elif words[4] == "branch":
            self._branch("/".join(words[2:4]), words[5])
        elif words[4] == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular"} for f in files
            ]
            self._answer(200, {"files": [mode | {"shouldIgnore": False} for mode in modes]})
        elif words[4] == "commit":
            self._commit("/".join(words[2:4]), words[5], body)

    def _create(self, asked: dict) -> None:
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        there = name in self.hub.repositories
        if not there:
            self.hub.add(name, {}, private=asked.get("visibility") == "private")
        self._answer(409 if there else 200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _branch(self, name: str, branch: str) -> None:
        branches = self.hub.repositories[name].branches
        there = branch in branches
        branches.setdefault(branch, dict(branches["main"]))
        self._answer(409 if there else 201, {})

    def _batch(self, asked: dict) -> dict:
        objects = [
            {"oid": o["oid"], "size": o["size"]}
            | (
                {}
                if o["oid"] in self.hub.objects
                else {"actions": {"upload": {"href": f"{self.hub.url}/objects/{o['oid']}"}}}
            )
            for o in asked["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _commit(self, name: str, revision: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        files = dict(repository.branches[revision])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.branches[revision] = files
        commit = repository.commit(revision)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._answer(200, {"success": True, "commitOid": commit, "commitUrl": url})


def _entry(key: str, path: str, content: bytes) -> dict:
    found = {key: path, "size": len(content), "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
    found["blobId"] = found["oid"]
    if path.endswith(LARGE):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "sha256": hashlib.sha256(content).hexdigest()}
        found["lfs"] |= {"size": len(content), "pointerSize": 100}
    return found
