"""The trainer's loop: messages in, training steps, messages out.

Owns the order only. Messages are read between steps; while there is nothing to train on, the loop waits for one.
"""

from __future__ import annotations

import logging
import select
import socket
from pathlib import Path

from distill.online.trainer import OnlineTrainer
from engine.adaptation.messages import Document, FrameReader, FromTrainer, Setup, ToTrainer, decode_to_trainer, frame

REPORT_STEPS = 5
"""Training steps between two reports."""
_log = logging.getLogger(__name__)


def serve(connection: socket.socket) -> None:
    """Train until the peer closes the connection. The first message must be a `Setup`.

    Raises:
        EngineError: a message that is none.
        ConfigError: the draft or the target cannot be read.
    """
    reader = FrameReader(connection)
    trainer: OnlineTrainer | None = None
    steps = 0
    while not reader.is_closed:
        has_work = trainer is not None and trainer.has_work
        is_told = not has_work or bool(select.select([connection], [], [], 0)[0])
        messages: list[FromTrainer] = []
        if is_told:
            for body in reader.read():
                trainer = _apply(trainer, decode_to_trainer(body))
        elif trainer is not None:
            candidate = trainer.step()
            steps += 1
            messages += [candidate] if candidate is not None else []
        if trainer is not None and (is_told or messages or steps % REPORT_STEPS == 0):
            messages.append(trainer.progress())
        try:
            connection.sendall(b"".join(map(frame, messages)))
        except ConnectionError:
            return


def _apply(trainer: OnlineTrainer | None, message: ToTrainer) -> OnlineTrainer | None:
    if isinstance(message, Setup):
        return OnlineTrainer(message)
    if trainer is None:
        raise ValueError(f"the first message is {type(message).__name__}, not Setup")
    if isinstance(message, Document):
        trainer.add(message)
    elif message.is_rollback:
        trainer.load(Path(message.folder))
    else:
        trainer.serve(Path(message.folder))
    return trainer
