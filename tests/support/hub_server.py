"""A stand-in for the Hugging Face Hub: as much of its protocol as uploads and downloads use.

The client is the real ``huggingface_hub``. The server keeps repositories in memory, one list of
commits each, and answers on a port of this machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


class Repository:
    """Branches of commits; a commit is all files by name."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit("main", {})

    def commit(self, branch: str, files: dict[str, bytes], deleted: Set[str] = frozenset()) -> str:
        content = {**self.files(branch), **files} if branch in self.branches else files
        content = {name: data for name, data in content.items() if name not in deleted}
        text = f"{len(self.commits)} {sorted(content)}"
        number = hashlib.sha1(text.encode()).hexdigest()
        self.commits[number] = content
        self.branches[branch] = number
        return number

    def sha(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.sha(revision) or ""]


class HubServer(ThreadingHTTPServer):
    """Repositories by name; ``sizes`` makes the server claim other sizes for files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.sizes: dict[str, int] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"POST {path}")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", path):
            name, action, revision = match.groups()
            repository = self.server.repositories.get(name)
            if repository is None:
                return self._missing("RepoNotFound")
            if action == "branch":
                if revision in repository.branches:
                    return self._json({"error": "exists"}, 409)
                repository.branches[revision] = repository.branches["main"]
                return self._json({})
            if revision not in repository.branches:
                return self._missing("RevisionNotFound")
            if action == "preupload":
                return self._preupload(json.loads(body))
            return self._commit(name, repository, revision, body)
        return self._missing("NotFound")

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def _create(self, wanted: dict[str, Any]) -> None:
        name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
        answer = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.server.repositories:
            return self._json({**answer, "error": "You already created this model repo"}, 409)
        self.server.repositories[name] = Repository()
        return self._json(answer)

    def _preupload(self, wanted: dict[str, Any]) -> None:
        # tensors are in the commit, too, and not in a store with a protocol of its own
        paths = [file["path"] for file in wanted["files"]]
        known = {"uploadMode": "regular", "shouldIgnore": False}
        self._json({"files": [{"path": path, **known} for path in paths]})

    def _commit(self, name: str, repository: Repository, revision: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        deleted = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
        number = repository.commit(revision, files, deleted)
        url = f"{self.server.url}/{name}/commit/{number}"
        self._json({"success": True, "commitOid": number, "commitUrl": url})

    def _read(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/(.+))?", path)
        match = info or re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match is None:
            return self._missing("NotFound")
        name, revision = match[1], match[2] or "main"
        repository = self.server.repositories.get(name)
        if repository is None:
            return self._missing("RepoNotFound")
        commit = repository.sha(revision)
        if commit is None:
            return self._missing("RevisionNotFound")
        files = repository.files(commit)
        digests = {file: hashlib.sha1(data).hexdigest() for file, data in files.items()}
        if f"/{name}/tree/" in path:
            sizes = [{"type": "file", "path": f, "size": len(data)} for f, data in files.items()]
            return self._json([one | {"oid": digests[one["path"]]} for one in sizes])
        if info:
            siblings = [{"rfilename": file} for file in files]
            return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
        file = match[3]
        content = files.get(file)
        if content is None:
            return self._missing("EntryNotFound", {"X-Repo-Commit": commit})
        headers = {
            "ETag": f'"{digests[file]}"',
            "X-Repo-Commit": commit,
            "Content-Type": "application/octet-stream",
        }
        if file in self.server.sizes:
            headers["X-Linked-Size"] = str(self.server.sizes[file])
        return self._send(200, content, headers)

    def _missing(self, code: str, headers: dict[str, str] | None = None) -> None:
        self._json({"error": code}, 404, {"X-Error-Code": code, **(headers or {})})

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(status, json.dumps(content).encode(), {**kind, **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def hub_server(cache: Any) -> Iterator[HubServer]:
    """A server, with ``huggingface_hub`` pointed at it and at a cache of its own."""
    from huggingface_hub import constants, hf_api

    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        # what HF_ENDPOINT and HF_HOME set, had they been set before the library was imported
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(hf_api.api, "endpoint", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server
    server.shutdown()
    server.server_close()
    thread.join()
