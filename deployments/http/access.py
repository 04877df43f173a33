"""Access control, before the body of a request is read.

Owns the checks of API keys, of browsers' origins, and of servers without keys, which accept loopback only. Identifies
the client for the code that follows. Its errors do not say why a key is wrong. Admin routes check their own key.

    no key       /health, /ping, /openapi.json, the files of /ui
    admin key    /admin/..., /debug/..., /v1/load_lora_adapter, /v1/unload_lora_adapter
    API key      everything else
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import HttpError, encode_error
from deployments.http.admission import ANONYMOUS, Client, ignore_refusal
from deployments.http.keys import KeyRing

ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OPEN_PATHS = ("/health", "/ping", "/openapi.json", "/ui", *ADAPTER_PATHS)
OPEN_PREFIXES = ("/ui/", "/admin/", "/debug/")
CLOSED_PATHS = ("/ui/data",)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


@dataclass(slots=True, kw_only=True)
class Access:
    """Who may send requests."""

    keys: KeyRing = field(default_factory=KeyRing)
    """All valid API keys. May be replaced while the server runs."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server, as browsers write them. `*` allows all."""
    on_refused: Callable[[str], None] = ignore_refusal
    """Called with the cause of each refusal, as in `paceline_rejected_total`."""


class Guard:
    """ASGI middleware that refuses requests or stores the client in `scope["state"]["client"]`."""

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
        """The refusal of this request; None if it is allowed."""
        headers = Headers(scope=scope)
        if scope["method"] not in SAFE_METHODS and not self._is_own_page(headers):
            return _refusal(403, "Web pages of this origin may not call this server; see cors_origins", "bad_origin")
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # the application may be mounted below a prefix
        if path in OPEN_PATHS or (path.startswith(OPEN_PREFIXES) and path not in CLOSED_PATHS):
            return None
        if len(self._access.keys) == 0:
            if is_local(scope, headers):
                scope.setdefault("state", {})["client"] = ANONYMOUS
                return None
            return _refusal(
                403, "This server has no API keys and accepts requests from loopback only", "api_keys_required"
            )
        client = self._client(headers)
        if client is None:
            return _refusal(401, "Give a valid API key as `Authorization: Bearer`", "invalid_api_key")
        scope.setdefault("state", {})["client"] = client
        return None

    def _client(self, headers: Headers) -> Client | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return self._access.keys.find(key.strip()) if scheme.lower() == "bearer" else None

    def _is_own_page(self, headers: Headers) -> bool:
        """Whether no web page sent this, or an allowed one. Browsers always send the header; pages cannot forge it."""
        origin = headers.get("origin")
        if origin is None or origin in self._access.origins or "*" in self._access.origins:
            return True
        address = parse_address(origin)
        return address is not None and address.netloc == headers.get("host")


def is_local(scope: Scope, headers: Headers) -> bool:
    """Whether a request comes from loopback and names a loopback host.

    The host name protects against DNS rebinding: a web page can let its own name resolve to loopback, but cannot forge
    the header.
    """
    peer = (scope.get("client") or ("",))[0]
    address = parse_address(f"//{headers.get('host', '')}")
    return is_loopback(peer) and address is not None and is_loopback(address.hostname or "")


def parse_address(text: str) -> SplitResult | None:
    """The parts of an address that a client sends; None if it is none, such as an IPv6 host without its bracket."""
    try:
        return urlsplit(text)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host name or an address is loopback."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(status: int, message: str, code: str) -> HttpError:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return HttpError(status, encode_error(message, "invalid_request_error", None, code), headers)
