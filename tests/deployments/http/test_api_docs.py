"""docs/openai.md is true: every field in its tables is sent and does what the table says, and no field is missing."""

from __future__ import annotations

import json
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import URLS, error_of, make_engine, talk, tool_codec
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from deployments.openai.requests import ChatBody, CompletionBody
from deployments.responses_api.requests import ResponsesBody

TEXT = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
ENDPOINTS: dict[str, Any] = {**URLS, "responses": ("/v1/responses", {"model": "tiny", "input": "go"})}
ROW = re.compile(r"^\| `(?P<field>\w+)` \| (?P<fate>supported|refused) \| `(?P<example>.*)` \| (?P<note>.+) \|$")


@dataclass(frozen=True)
class Row:
    kind: str
    field: str
    is_supported: bool
    example: dict[str, Any]
    note: str


def rows() -> list[Row]:
    """Each row of the tables, for each endpoint that its heading names."""
    found, kinds, is_table = [], tuple(URLS), False
    for line in TEXT.splitlines():
        if line.startswith("## "):
            kinds = tuple(kind for kind, (url, _) in ENDPOINTS.items() if line.endswith(url)) or tuple(URLS)
        if line.startswith("And for conversations only"):
            kinds = ("chat",)
        if not line.startswith("|"):
            is_table = False
        elif line.startswith("| Field | Fate |"):
            is_table = True
        elif is_table and not line.startswith("|---"):
            match = ROW.match(line)
            assert match, f"not a row of the form that this test reads: {line}"
            example = json.loads(match["example"].replace("\\|", "|"))
            is_supported = match["fate"] == "supported"
            found += [Row(kind, match["field"], is_supported, example, match["note"]) for kind in kinds]
    return found


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}-{row.field}")
def test_each_field_does_what_the_table_says(row: Row) -> None:
    url, body = ENDPOINTS[row.kind]
    engine = make_engine()

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(url, json={**body, **row.example})

    response = talk(engine, send, tool_codec("hermes"))
    assert row.field in row.example
    if row.is_supported:
        assert response.status_code == 200, response.text
        assert engine.submitted
        return
    assert response.status_code == 400
    assert error_of(response)["message"] == row.note
    assert error_of(response)["param"] == row.field
    assert not engine.submitted


def fields(kind: str) -> list[str]:
    return [row.field for row in ROWS if row.kind == kind]


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("chat", chat_create_params.CompletionCreateParamsStreaming),
        ("completion", completion_create_params.CompletionCreateParamsStreaming),
        ("responses", response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_field_of_openai_s_reference_is_in_the_tables(kind: str, reference: Any) -> None:
    assert set(typing.get_type_hints(reference)) - set(fields(kind)) == set()


@pytest.mark.parametrize(
    ("kind", "body_type"), [("chat", ChatBody), ("completion", CompletionBody), ("responses", ResponsesBody)]
)
def test_the_tables_have_each_field_that_the_server_knows_once(kind: str, body_type: Any) -> None:
    assert sorted(fields(kind)) == sorted(body_type.model_fields)
