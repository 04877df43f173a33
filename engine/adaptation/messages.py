"""What crosses between the draft's process and its trainer: length-prefixed msgpack over a socket pair.

Owns the message types and the framing. Knows neither who trains nor how.

    draft -> trainer     Setup (first), Document, Serving
    trainer -> draft     Progress, Candidate
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from engine.errors import EngineError

_HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
_READ_BYTES = 1 << 20


class Setup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """What the trainer starts from."""

    draft_folder: str
    """The weights that serve."""
    target_folder: str
    versions_folder: str
    """Where candidates are written."""
    buffer_bytes: int
    """Memory of the documents that are kept."""
    k: int
    """Drafted tokens of a chain when acceptance is measured."""


class Document(msgspec.Struct, tag="document", frozen=True, kw_only=True):
    """Consecutive tokens of one request with the target's features."""

    tokens: bytes
    """[n] int32 token ids."""
    features: bytes
    """[n - 1, width] after each token but the last."""
    itemsize: int
    """Bytes of a feature's number: 2 is bfloat16, 4 is float32."""
    first_generated: int
    """Index of the first token that the target generated."""

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.tokens) // 4

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.tokens) + len(self.features)


class Serving(msgspec.Struct, tag="serving", frozen=True, kw_only=True):
    """The weights that serve from now on."""

    folder: str
    is_rollback: bool
    """The candidate was worse on live requests: training goes on from `folder`."""


class Progress(msgspec.Struct, tag="progress", frozen=True, kw_only=True):
    """Counts since the trainer's start, and the state of its buffer."""

    num_steps: int = 0
    num_tokens: int = 0
    """Positions trained on; repeated ones count again."""
    num_documents: int = 0
    """Documents received."""
    buffer_bytes: int = 0
    num_held_out: int = 0
    """Documents that are held out now."""
    served: float = 0.0
    """Tokens per verify step of the serving weights on held-out documents, at the latest evaluation."""
    trained: float = 0.0
    """The same of the weights in training."""


class Candidate(msgspec.Struct, tag="candidate", frozen=True, kw_only=True):
    """Weights that were better on held-out documents than those that serve."""

    folder: str
    served: float
    """Tokens per verify step on held-out documents, of the serving weights."""
    trained: float
    """The same of the candidate."""
    num_documents: int
    """Documents of the comparison."""


ToTrainer = Setup | Document | Serving
FromTrainer = Progress | Candidate

_encoder = msgspec.msgpack.Encoder()
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)


def frame(message: ToTrainer | FromTrainer) -> bytes:
    """A message with its length."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def decode_to_trainer(body: bytes) -> ToTrainer:
    """Raises EngineError for bytes that are no such message."""
    try:
        return _to_trainer.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineError(f"message to the trainer: {error}") from None


def decode_from_trainer(body: bytes) -> FromTrainer:
    """Raises EngineError for bytes that are no such message."""
    try:
        return _from_trainer.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineError(f"message from the trainer: {error}") from None


class FrameReader:
    """Cuts what a socket yields into message bodies.

    Args:
        connection: a stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held = bytearray()
        self.is_closed = False
        """Whether the peer has closed."""

    def read(self) -> Iterator[bytes]:
        """Read once, and yield the bodies that are complete. Blocks as the socket does.

        Raises:
            EngineError: a frame is longer than any message.
        """
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self.is_closed = not data
        self._held += data
        while len(self._held) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._held)
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"frame of {length} bytes; allowed are {MAX_FRAME_BYTES}")
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            body = bytes(self._held[_HEADER.size : end])
            del self._held[:end]
            yield body
