"""The target's endpoint of a small draft buffer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from buffer_children import NODE, SPEC

from engine.draft_buffer.target_endpoint import TargetEndpoint, create_draft_buffer


@pytest.fixture
def target() -> Iterator[TargetEndpoint]:
    endpoint = create_draft_buffer(SPEC, device="cpu", node_id=NODE, epoch=3)
    yield endpoint
    endpoint.close()
