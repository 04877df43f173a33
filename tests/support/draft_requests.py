"""Draft requests for the tests of the draft buffer, and opening a buffer in the same process."""

from __future__ import annotations

import dataclasses

from buffer_children import NODE

from engine.draft.messages import DraftRequestRow
from engine.draft_buffer.target_endpoint import DraftEndpoint, TargetEndpoint, open_draft_buffer
from engine.messages import GrammarSpec
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

ROWS = [DraftRequestRow(key, 0, (1, 2, 3), 5, RowSampling(1.0, 1.0, 7, 1, True)) for key in range(2)]
OPTIONS = TokenOptions(
    num_prompt=3,
    presence_penalty=0.5,
    logit_bias=((7, 1.5), (9, -100.0)),
    stop_token_ids=(2,),
    grammar=GrammarSpec(kind="regex", text="[ab]+"),
)
ROWS_WITH_OPTIONS = [
    dataclasses.replace(row, sampling=RowSampling(1.0, 1.0, 7, 1, True, 4, 0.1), options=OPTIONS) for row in ROWS
]


def open_here(target: TargetEndpoint) -> DraftEndpoint:
    """The draft's endpoint, opened in this process."""
    return open_draft_buffer(target.handle(), node_id=NODE, gpu_uuid=None)
