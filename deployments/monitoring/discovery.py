"""Where Prometheus finds the replicas of this machine: one target file per replica, for file_sd.

Owns the files' names and content. A file appears whole or not at all, goes when its replica stops, and is cleared away
by the next replica that starts here if its process was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from engine.checkpoint.store import cache_folder

FOLDER_ENV = "PACELINE_METRICS_DIR"
# Prometheus drops labels that begin with two underscores after it has found a target.
PID_LABEL, HOST_LABEL = "__paceline_pid", "__paceline_host"


def targets_folder(configured: str | None) -> Path:
    """The setting, else the environment's, else a folder in the cache."""
    chosen = configured or os.environ.get(FOLDER_ENV)
    return Path(chosen).expanduser() if chosen else cache_folder() / "metrics-targets"


class TargetFile:
    """The target of one replica.

    Args:
        folder: made if it is not there.
        replica: its name, unique.
    """

    def __init__(self, folder: Path, replica: str) -> None:
        self._folder = folder
        safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in replica)
        self.path = folder / f"paceline-{safe}.json"

    def write(self, address: str, labels: Mapping[str, str]) -> None:
        """Announce `host:port`. Clears away what killed replicas of this host left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        clear_dead(self._folder)
        own = {PID_LABEL: str(os.getpid()), HOST_LABEL: socket.gethostname()}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps([{"targets": [address], "labels": {**labels, **own}}], indent=1) + "\n")
        partial.replace(self.path)

    def remove(self) -> None:
        """Idempotent."""
        self.path.unlink(missing_ok=True)


def clear_dead(folder: Path) -> None:
    """Remove the targets of this host's replicas whose processes are gone."""
    for file in folder.glob("paceline-*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # not one of ours
            labels = json.loads(file.read_text())[0]["labels"]
            if labels[HOST_LABEL] == socket.gethostname() and not psutil.pid_exists(int(labels[PID_LABEL])):
                file.unlink(missing_ok=True)
