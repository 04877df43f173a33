"""One server for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cut_draft import cut_draft
from serving import Server, serving

from engine.model_store import resolve_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 in fp32 with a draft model in a process of its own."""
    folder = tmp_path_factory.mktemp("server")
    draft = cut_draft(resolve_model("smollm2"), folder / "draft")
    with serving(folder / "log", "--dtype", "float32", "--draft", str(draft), "--k", "3") as running:
        yield running
