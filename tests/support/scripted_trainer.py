"""A trainer that does not train: it offers given folders, one after every so many documents.

python scripted_trainer.py NUM_DOCUMENTS FOLDER... NUMBER_OF_SOCKET
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from engine.adaptation.messages import Candidate, Document, FrameReader, Progress, Serving, decode_to_trainer, frame


def main(num_documents: int, folders: list[str], number: int) -> None:
    connection = socket.socket(fileno=number)
    reader = FrameReader(connection)
    count = 0
    while not reader.is_closed:
        for body in reader.read():
            message = decode_to_trainer(body)
            if isinstance(message, Document):
                count += 1
                if count % num_documents == 0 and folders:
                    folder = folders.pop(0)
                    offer = Candidate(folder=folder, served=1.0, trained=2.0, num_documents=count)
                    connection.sendall(frame(offer))
            elif isinstance(message, Serving):
                connection.sendall(frame(Progress(num_steps=int(message.is_rollback) + 1)))
            connection.sendall(frame(Progress(num_documents=count)))


def command(num_documents: int, *folders: Path) -> tuple[str, ...]:
    """The command of such a trainer."""
    return (sys.executable, __file__, str(num_documents), *map(str, folders))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:-1], int(sys.argv[-1]))
