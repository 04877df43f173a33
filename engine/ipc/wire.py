"""Messages between a replica and rank 0 of its target: length-prefixed msgpack over a unix socket, typed on both sides.

Owns the framing and the message types. Nothing is pickled. A frame that does not decode to one of the declared types
raises `EngineError` and ends the connection.

    replica -> rank 0     SubmitCommand, AbortCommand
    rank 0 -> replica     StepDeltas (one per step), DraftStatus, EngineFailed
"""

from __future__ import annotations

import struct

import msgspec

from engine.errors import EngineError
from engine.messages import Delta, Submit

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class SubmitCommand(msgspec.Struct, tag="submit", frozen=True):
    """Start a request."""

    submit: Submit


class AbortCommand(msgspec.Struct, tag="abort", frozen=True):
    """End a request early."""

    request_id: str


class StepDeltas(msgspec.Struct, tag="deltas", frozen=True):
    """New tokens of all requests in one step."""

    deltas: tuple[Delta, ...]


class DraftStatus(msgspec.Struct, tag="draft", frozen=True):
    """The draft started or stopped."""

    up: bool
    reason: str
    """Why it stopped; empty when it started."""


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The step loop has failed. No message follows."""

    reason: str


Command = SubmitCommand | AbortCommand
Event = StepDeltas | DraftStatus | EngineFailed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode_frame(message: Command | Event) -> bytes:
    """A message as bytes, preceded by its length."""
    payload = _encoder.encode(message)
    return HEADER.pack(len(payload)) + payload


def frame_len(header: bytes) -> int:
    """Number of payload bytes after this header.

    Raises:
        EngineError: the length is above MAX_FRAME_BYTES.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return int(length)


def decode_command(payload: bytes) -> Command:
    """The command in a payload.

    Raises:
        EngineError: the payload is not a command.
    """
    try:
        return _commands.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineError(f"not a command: {error}") from error


def decode_event(payload: bytes) -> Event:
    """The event in a payload.

    Raises:
        EngineError: the payload is not an event.
    """
    try:
        return _events.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineError(f"not an event: {error}") from error
