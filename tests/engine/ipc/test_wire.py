"""Messages between replica and rank 0: each one survives its frame, and everything else is refused."""

from __future__ import annotations

import pytest

from engine.errors import EngineError
from engine.ipc.wire import (
    HEADER,
    MAX_FRAME_BYTES,
    AbortCommand,
    Command,
    DraftStatus,
    EngineFailed,
    Event,
    StepDeltas,
    SubmitCommand,
    decode_command,
    decode_event,
    encode_frame,
    frame_len,
)
from engine.messages import Delta, GrammarSpec, SamplingParams, Submit

SUBMIT = Submit(
    request_id="r",
    prompt=(1, 2),
    sampling=SamplingParams(temperature=0.5, seed=2**63 - 1, grammar=GrammarSpec(kind="regex", text="é+")),
)
COMMANDS: list[Command] = [SubmitCommand(submit=SUBMIT), AbortCommand(request_id="r")]
EVENTS: list[Event] = [
    StepDeltas(deltas=(Delta(request_id="r", token_ids=(1, 2)), Delta(request_id="q", token_ids=()))),
    DraftStatus(up=False, reason="it died"),
    EngineFailed(reason="no memory"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_survives_its_frame(command: Command) -> None:
    data = encode_frame(command)
    assert frame_len(data[: HEADER.size]) == len(data) - HEADER.size
    assert decode_command(data[HEADER.size :]) == command


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_survives_its_frame(event: Event) -> None:
    data = encode_frame(event)
    assert frame_len(data[: HEADER.size]) == len(data) - HEADER.size
    assert decode_event(data[HEADER.size :]) == event


def test_commands_are_no_events_and_the_other_way_round() -> None:
    for command in COMMANDS:
        with pytest.raises(EngineError, match="not an event"):
            decode_event(encode_frame(command)[HEADER.size :])
    for event in EVENTS:
        with pytest.raises(EngineError, match="not a command"):
            decode_command(encode_frame(event)[HEADER.size :])


@pytest.mark.parametrize("payload", [b"", b"\xc1", encode_frame(COMMANDS[1])[HEADER.size : -1]])
def test_damaged_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(EngineError, match="not a command"):
        decode_command(payload)
    with pytest.raises(EngineError, match="not an event"):
        decode_event(payload)


def test_a_frame_length_just_above_the_limit_is_refused() -> None:
    assert frame_len(HEADER.pack(0)) == 0
    assert frame_len(HEADER.pack(MAX_FRAME_BYTES)) == MAX_FRAME_BYTES
    with pytest.raises(EngineError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes"):
        frame_len(HEADER.pack(MAX_FRAME_BYTES + 1))
