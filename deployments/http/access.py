"""The door: who may talk to this server at all, checked before anything of a request is read.

Owns the check of API keys, of browsers' origins and of servers without keys, which answer on loopback only. Says who
the client is to whoever comes after, and nothing of why a key was wrong. Admin routes have a key of their own.

    open       /health, /ping, /openapi.json, the files of /ui
    own key    /admin/..., /debug/...
    API key    everything else
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import HttpError, encode_error
from deployments.http.admission import ANONYMOUS, Client, unheard
from deployments.http.keys import KeyRing

OPEN_PATHS = ("/health", "/ping", "/openapi.json", "/ui")
OPEN_PREFIXES = ("/ui/", "/admin/", "/debug/")
CLOSED_PATHS = ("/ui/data",)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


@dataclass(slots=True, kw_only=True)
class Access:
    """Who may come in. `keys` may be exchanged while the server runs."""

    keys: KeyRing = field(default_factory=KeyRing)
    origins: tuple[str, ...] = ()
    """Of web pages elsewhere that may call this server, as browsers write them; `*` is all."""
    on_refused: Callable[[str], None] = unheard
    """Told the cause of each refusal, as metrics name it."""


class Guard:
    """ASGI middleware. It enters the client in `scope["state"]["client"]`."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._check(scope)
            if refusal is not None:
                self._access.on_refused("unauthorized")
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> HttpError | None:
        """Why this request may not come in, if so."""
        headers = Headers(scope=scope)
        if scope["method"] not in SAFE_METHODS and not self._is_own_page(headers):
            return _refusal(403, "Web pages of this origin may not call this server; see cors_origins", "bad_origin")
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # an application may live below a prefix
        if path in OPEN_PATHS or (path.startswith(OPEN_PREFIXES) and path not in CLOSED_PATHS):
            return None
        if len(self._access.keys) == 0:
            if is_local(scope, headers):
                scope.setdefault("state", {})["client"] = ANONYMOUS
                return None
            return _refusal(403, "This server has no API keys and answers on loopback only", "api_keys_required")
        client = self._client(headers)
        if client is None:
            return _refusal(401, "Give a valid API key as `Authorization: Bearer`", "invalid_api_key")
        scope.setdefault("state", {})["client"] = client
        return None

    def _client(self, headers: Headers) -> Client | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return self._access.keys.find(key.strip()) if scheme.lower() == "bearer" else None

    def _is_own_page(self, headers: Headers) -> bool:
        """Whether no web page sent this, or one that may. Browsers always tell, and pages cannot forge it."""
        origin = headers.get("origin")
        if origin is None or origin in self._access.origins or "*" in self._access.origins:
            return True
        return urlsplit(origin).netloc == headers.get("host")


def is_local(scope: Scope, headers: Headers) -> bool:
    """Whether a request comes from this machine and means it.

    The name that it asked for counts too: a page elsewhere can let its own name point here, but not forge the header.
    """
    peer = (scope.get("client") or ("",))[0]
    name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    return is_loopback(peer) and is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(status: int, message: str, code: str) -> HttpError:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return HttpError(status, encode_error(message, "invalid_request_error", None, code), headers)
