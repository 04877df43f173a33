"""The part of Grafana that the installation of dashboards uses: folders, dashboards, a token, error bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class FakeGrafana:
    """State of the server, which listens at `url`."""

    token: str = "secret"
    may_write: bool = True
    url: str = ""
    folders: dict[str, str] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def answer(self, method: str, path: str, token: str | None, body: Any) -> tuple[int, Any]:
        """Status and JSON body, as Grafana's HTTP API documents them."""
        if token != f"Bearer {self.token}":
            return 401, {"message": "Invalid API key"}
        if method == "GET" and path.startswith("/api/folders/"):
            uid = path.rsplit("/", 1)[1]
            if uid in self.folders:
                return 200, {"uid": uid, "title": self.folders[uid]}
            return 404, {"message": "folder not found", "status": "not-found"}
        if not self.may_write:
            return 403, {"message": "You'll need additional permissions to perform this action."}
        if (method, path) == ("POST", "/api/folders"):
            self.folders[body["uid"]] = body["title"]
            return 200, body
        if (method, path) == ("POST", "/api/dashboards/db"):
            return self._save(body)
        return 404, {"message": "Not found"}

    def _save(self, body: dict[str, Any]) -> tuple[int, Any]:
        dashboard, uid = body["dashboard"], body["dashboard"]["uid"]
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        if not dashboard.get("title"):
            return 400, {"message": "Dashboard title cannot be empty"}
        if uid in self.dashboards and not body["overwrite"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        self.dashboards[uid] = dashboard
        self.versions[uid] = self.versions.get(uid, 0) + 1
        return 200, {"uid": uid, "url": f"/d/{uid}/x", "status": "success", "version": self.versions[uid]}


@contextmanager
def running(state: FakeGrafana) -> Iterator[FakeGrafana]:
    """Serve it on a loopback port inside a `with` block."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = state.answer(self.command, self.path, self.headers.get("Authorization"), body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _serve

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
