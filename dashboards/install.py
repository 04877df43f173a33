"""Writes rendered dashboards into a running Grafana through its HTTP API.

Owns the calls and the messages of their errors. Knows nothing of what a dashboard shows. Installing twice is the same
as once: the folder is kept, and the dashboards are overwritten by their uid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import httpx

FOLDER_UID, FOLDER_TITLE = "paceline", "Paceline"


class InstallError(Exception):
    """Grafana could not be reached or refused a call; the message says what to do."""


def install(client: httpx.Client, dashboards: Iterable[Mapping[str, Any]], *, version: str) -> list[str]:
    """Create the folder where it is missing and write every dashboard into it.

    Args:
        client: has Grafana's address as `base_url`, and credentials where needed.
        dashboards: Grafana dashboard JSON, each with a `uid` and a `title`.
        version: of Paceline, for the version history of the dashboards.

    Returns:
        Paths of the dashboards below Grafana's address, in order.

    Raises:
        InstallError: Grafana is not reachable, does not accept the credentials, or refuses a dashboard.
    """
    _ensure_folder(client)
    paths = []
    for dashboard in dashboards:
        what = f"dashboard {dashboard['title']!r}"
        message = {
            "dashboard": {**dashboard, "id": None},
            "folderUid": FOLDER_UID,
            "overwrite": True,
            "message": f"paceline {version}",
        }
        response = _body(_call(client, "POST", "/api/dashboards/db", what, json=message), what)
        paths.append(str(response.get("url", f"/d/{dashboard['uid']}")))
    return paths


def _ensure_folder(client: httpx.Client) -> None:
    what = f"folder {FOLDER_TITLE!r}"
    if _call(client, "GET", f"/api/folders/{FOLDER_UID}", what, allowed=(404,)).status_code != 404:
        return
    folder = {"uid": FOLDER_UID, "title": FOLDER_TITLE}
    # 409 and 412: another client created the folder between the two calls.
    _call(client, "POST", "/api/folders", what, json=folder, allowed=(409, 412))


def _call(
    client: httpx.Client, method: str, path: str, what: str, *, json: Any = None, allowed: tuple[int, ...] = ()
) -> httpx.Response:
    try:
        response = client.request(method, path, json=json)
    except httpx.TransportError as error:
        raise InstallError(f"--grafana: no response from {_address(client)}: {error or type(error).__name__}") from None
    if response.is_success or response.status_code in allowed:
        return response
    raise InstallError(_explain(client, response, what))


def _explain(client: httpx.Client, response: httpx.Response, what: str) -> str:
    status, address = response.status_code, _address(client)
    if status == 401:
        return f"--token: {address} does not accept the credentials; give a service account token or user:password"
    if status == 403:
        return f"--token: not allowed to write {what} on {address}; the account needs the role Editor or Admin"
    if response.is_redirect:
        return f"--grafana: {address} redirects to {response.headers.get('location')}; give that address instead"
    if status == 404:
        return f"--grafana: {address} has no {response.request.url.path}; is it the address of a Grafana?"
    return f"{what}: {address} responded with {status}: {_reason(response)}"


def _body(response: httpx.Response, what: str) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise InstallError(f"{what}: {response.request.url.copy_with(userinfo=b'')} did not respond as Grafana does")
    return body


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:200] or response.reason_phrase


def _address(client: httpx.Client) -> str:
    return str(client.base_url.copy_with(userinfo=b"")).rstrip("/")
