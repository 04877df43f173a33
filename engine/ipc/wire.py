"""Messages between a replica and its shard 0: length-prefixed msgpack over a unix socket, typed on both sides.

Owns the framing and the message types. Nothing here is pickled; a frame that does not decode to one of the declared
types raises `EngineError` and ends the connection.

    replica -> shard 0     SubmitCommand, AbortCommand
    shard 0 -> replica     StepDeltas (one per step), DraftStatus, EngineFailed
"""

from __future__ import annotations

import struct

import msgspec

from engine.errors import EngineError
from engine.messages import Delta, Submit

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class SubmitCommand(msgspec.Struct, tag="submit", frozen=True):
    submit: Submit


class AbortCommand(msgspec.Struct, tag="abort", frozen=True):
    request_id: str


class StepDeltas(msgspec.Struct, tag="deltas", frozen=True):
    deltas: tuple[Delta, ...]


class DraftStatus(msgspec.Struct, tag="draft", frozen=True):
    """The draft came up or went down."""

    up: bool
    reason: str


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The loop has ended; nothing follows."""

    reason: str


Command = SubmitCommand | AbortCommand
Event = StepDeltas | DraftStatus | EngineFailed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode_frame(message: Command | Event) -> bytes:
    """A message with its length before it."""
    payload = _encoder.encode(message)
    return HEADER.pack(len(payload)) + payload


def frame_len(header: bytes) -> int:
    """Payload bytes that follow this header.

    Raises:
        EngineError: the length is not believable.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return int(length)


def decode_command(payload: bytes) -> Command:
    """Raises EngineError when it is none."""
    try:
        return _commands.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineError(f"not a command: {error}") from error


def decode_event(payload: bytes) -> Event:
    """Raises EngineError when it is none."""
    try:
        return _events.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineError(f"not an event: {error}") from error
