"""A small Hugging Face hub on loopback: the routes that `huggingface_hub` calls for an upload.

with HubServer(token="hf_secret") as hub:
    ...                                   # HF_ENDPOINT=hub.url
    hub.files["me/model", "main"]         # {"README.md": b"..."}
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubServer:
    """Repositories in memory; every request but an upload needs the token."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(_Handler):
            server_of = hub

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Print nothing: a test may cut a connection."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Returns status and JSON of a request that is allowed."""
        if (method, path) == ("POST", "/api/repos/create"):
            asked = json.loads(body)
            repo = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
            if repo in self.repos:
                return 409, {"error": "You already created this model repo"}
            self.repos[repo] = asked
            self.files[repo, "main"] = {}
            return 200, {"url": f"{self.url}/{repo}", "id": repo}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"/upload/(\w+)", path):
            self.objects[match[1]] = body
            return 200, {}
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return 200, {"objects": [self._lfs(item) for item in json.loads(body)["objects"]]}
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/([^/]+)", path)
        if match is None or match[1] not in self.repos:
            return 404, {"error": f"no route {method} {path}"}
        repo, verb, revision = match.groups()
        if verb == "branch":
            self.files.setdefault((repo, revision), {})
            return 200, {}
        if (repo, revision) not in self.files:
            return 404, {"error": "Revision not found"}
        if verb == "preupload":
            return 200, {"files": [self._mode(file) for file in json.loads(body)["files"]]}
        if verb == "tree":
            entries = self.files[repo, revision].items()
            return 200, [
                {"type": "file", "path": name, "size": len(data), "oid": "0"}
                for name, data in entries
            ]
        self._commit(self.files[repo, revision], body)
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1"}

    def _lfs(self, item: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.url}/upload/{item['oid']}"
        return {**item, "actions": {"upload": {"href": href, "header": {}}}}

    @staticmethod
    def _mode(file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def _commit(self, files: dict[str, bytes], body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.objects[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                files[value["path"]] = data
            elif line["key"] == "deletedFile":
                del files[value["path"]]


class _Handler(BaseHTTPRequestHandler):
    server_of: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _serve(self) -> None:
        hub = self.server_of
        body = self._body()
        path = self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if path.startswith("/upload/") or self.headers["Authorization"] == f"Bearer {hub.token}":
            status, answer = hub.answer(self.command, path, body)
        else:
            status, answer = 401, {"error": "Invalid username or password."}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_POST = do_PUT = _serve
