"""Draft requests and responses check themselves: each limit is accepted, the next value is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from msgspec import structs

from engine.draft.messages import REASONS, DraftRequestRow, DraftResponseRow, decode_options, encode_options
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

SAMPLING = RowSampling(temperature=1.0, top_p=1.0, stream_key=0, attempt=0, coupled=False)
ROW = DraftRequestRow(5, 0, (1, 2), 3, SAMPLING)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 0, "k": 0, "new_tokens": ()},
        {"exit_threshold": 0.0},
        {"exit_threshold": 1.0},
        {"feature_rows": (-1, 0)},
        {"options": TokenOptions(num_prompt=1)},
    ],
)
def test_limits_of_a_request_row_are_accepted(changes: dict[str, Any]) -> None:
    row = dataclasses.replace(ROW, **changes)
    assert all(getattr(row, name) == value for name, value in changes.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": -1}, "start -1"),
        ({"k": -1}, "k -1"),
        ({"exit_threshold": -0.01}, "exit threshold -0.01"),
        ({"exit_threshold": 1.01}, "exit threshold 1.01"),
        ({"exit_threshold": math.nan}, "exit threshold nan"),
        ({"start": 1, "options": TokenOptions(num_prompt=1)}, "options are sent with start 0, not 1"),
        ({"feature_rows": (0,)}, "1 feature rows for 2 tokens"),
    ],
)
def test_a_request_row_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"draft request row 5: .*{message}"):
        dataclasses.replace(ROW, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"stream_key": 0},
        {"stream_key": 2**64 - 1},
    ],
)
def test_limits_of_sampling_are_accepted(changes: dict[str, Any]) -> None:
    sampling = structs.replace(SAMPLING, **changes)
    assert dataclasses.replace(ROW, sampling=sampling).sampling == sampling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.01}, "temperature -0.01"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"top_k": -1}, "top_k -1"),
        ({"min_p": -0.01}, "min_p -0.01"),
        ({"min_p": 1.01}, "min_p 1.01"),
        ({"stream_key": -1}, "stream key"),
        ({"stream_key": 2**64}, "stream key"),
    ],
)
def test_sampling_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"draft request row 5: .*{message}"):
        dataclasses.replace(ROW, sampling=structs.replace(SAMPLING, **changes))


def test_confidences_of_a_response_row() -> None:
    assert DraftResponseRow((1, 2), (0.0, 1.0)).confidences == (0.0, 1.0)
    assert DraftResponseRow((1, 2), ()).confidences == ()
    for confidences, message in (
        ((0.5,), "1 confidences for 2 tokens"),
        ((0.5, -0.001), "not all within 0 and 1"),
        ((0.5, 1.002), "not all within 0 and 1"),
        ((0.5, math.nan), "not all within 0 and 1"),
    ):
        with pytest.raises(ValueError, match=f"draft response row: .*{message}"):
            DraftResponseRow((1, 2), confidences)


def test_parents_and_width_within_their_bounds() -> None:
    assert DraftResponseRow((1, 2), parents=(-1, -1)).parents == (-1, -1)
    for values, message in (
        ({"parents": (-1,)}, "1 parents for 2 tokens"),
        ({"parents": (-1, 1)}, "node 1 has parent 1, allowed are -1..0"),
        ({"parents": (-2, -1)}, "node 0 has parent -2"),
        ({"parents": (-1, -1), "num_on_device": 2}, "2 parents for 2 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            DraftResponseRow((1, 2), **values)  # type: ignore[arg-type]
    for width in (0, 9):
        with pytest.raises(ValueError, match=f"width {width} is not within 1 and 8"):
            dataclasses.replace(ROW, width=width)
    assert dataclasses.replace(ROW, width=8).width == 8


def test_an_unknown_reason_is_refused() -> None:
    assert [DraftResponseRow(reason=reason).reason for reason in REASONS] == list(REASONS)
    with pytest.raises(ValueError, match="reason 'weather' given, allowed are plan, "):
        DraftResponseRow(reason="weather")  # type: ignore[arg-type]


def test_options_survive_their_encoding() -> None:
    options = TokenOptions(num_prompt=3, presence_penalty=0.5, stop_token_ids=(2,))
    assert decode_options(encode_options(options)) == options
    assert encode_options(None) == b""
    assert decode_options(b"") is None
    with pytest.raises(ValueError, match="options: "):
        decode_options(b"\xc1")
