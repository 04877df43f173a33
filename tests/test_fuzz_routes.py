"""The routes of operators and of the page under any method, query, body and key: never a 5xx, never a hang.

The engine is a small one; plan, history, metrics and timelines are the real ones.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from fuzz_server import JSON_TYPE, OperatedServer
from fuzzing import sample
from hypothesis import given
from hypothesis import strategies as st

SERVER = OperatedServer()
AUTH = (b"authorization", f"Bearer {SERVER.key}".encode())
PATHS = (
    "/admin/pace",
    "/debug/requests/",
    "/metrics",
    "/metrics/targets",
    "/ui",
    "/ui/",
    "/ui/data",
    "/health",
    "/version",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**63, -(2**63), 10**400, 0.5, "off", "fixed", "threshold", "goodput", "", [], {}]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
)
CHANGES = st.dictionaries(
    st.sampled_from(["policy", "max_k", "max_batch", "enabled", "version", "nonsense"]), VALUES, max_size=4
)


@sample(200)
@given(changes=CHANGES)
def test_any_change_of_the_pace_is_applied_whole_or_refused(changes: dict[str, Any]) -> None:
    before = SERVER.send("GET", "/admin/pace", headers=[AUTH]).json()
    response = SERVER.send("PATCH", "/admin/pace", content=json.dumps(changes).encode(), headers=[AUTH, *JSON_TYPE])
    SERVER.check(response)
    after = SERVER.send("GET", "/admin/pace", headers=[AUTH]).json()
    if response.status_code == 200:
        given_values = {name: value for name, value in changes.items() if value is not None}
        assert {name: after[name] for name in given_values} == given_values
    else:
        assert after == before
    page = SERVER.send("GET", "/metrics")
    assert page.status_code == 200
    assert SERVER.send("GET", "/ui/data").status_code == 200


@sample(60)
@given(raw=st.binary(max_size=60), headers=st.lists(st.sampled_from([AUTH, *JSON_TYPE, (b"authorization", b"\xff")])))
def test_any_body_of_a_change(raw: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    SERVER.check(SERVER.send("PATCH", "/admin/pace", content=raw, headers=headers))


@sample(250)
@given(
    method=st.sampled_from(METHODS),
    path=st.sampled_from(PATHS),
    rest=st.one_of(st.just(""), st.text(max_size=8), st.sampled_from(["../main.js", "main.js", "..", "%2e%2e/x"])),
    query=st.dictionaries(
        st.sampled_from(["since", "name", "x"]), st.one_of(st.text(max_size=6), st.floats().map(str)), max_size=2
    ),
    has_key=st.booleans(),
)
def test_any_request_of_an_operator(method: str, path: str, rest: str, query: dict[str, str], has_key: bool) -> None:
    response = SERVER.send(method, path + quote(rest), params=query, headers=[AUTH] if has_key else [])
    assert response.status_code < 500, response.text
    if method != "HEAD" and response.status_code >= 400:
        SERVER.check(response)
