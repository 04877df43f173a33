"""Prometheus service discovery by files: one target file per replica of this node, for file_sd.

Owns the names and content of the files. A file is written atomically and removed when its replica stops. The file of a
killed replica is removed by the next replica that starts on this node, and the file of a lost node by any replica that
shares the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from autoscale.control.metric_targets import MetricTarget
from engine.checkpoint.store import cache_folder

FOLDER_ENV = "PACELINE_METRICS_DIR"
# Prometheus drops labels that begin with two underscores after discovery.
PID_LABEL, HOST_LABEL, NODE_LABEL = "__paceline_pid", "__paceline_host", "__paceline_node"


def targets_folder(configured: str | None) -> Path:
    """The folder of target files: as configured, else from the environment, else in the cache."""
    chosen = configured or os.environ.get(FOLDER_ENV)
    return Path(chosen).expanduser() if chosen else cache_folder() / "metrics-targets"


class TargetFile:
    """The target file of one replica.

    Args:
        folder: of target files. Created by `write` if it does not exist.
        replica: unique name of the replica.
    """

    def __init__(self, folder: Path, replica: str) -> None:
        self._folder = folder
        safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in replica)
        self.path = folder / f"paceline-{safe}.json"

    def write(self, target: MetricTarget) -> None:
        """Write the file. Also removes the files of killed replicas of this host."""
        self._folder.mkdir(parents=True, exist_ok=True)
        clear_dead(self._folder)
        own = {PID_LABEL: str(os.getpid()), HOST_LABEL: socket.gethostname(), NODE_LABEL: target.node_id}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps([entry_of(target, own)], indent=1) + "\n")
        partial.replace(self.path)

    def remove(self) -> None:
        """Remove the file. Calling it twice has no effect."""
        self.path.unlink(missing_ok=True)


def entry_of(target: MetricTarget, further_labels: Mapping[str, str] | None = None) -> dict[str, object]:
    """A target in Prometheus' JSON, as files and HTTP discovery have it."""
    return {"targets": [target.address], "labels": {**target.labels, **(further_labels or {})}}


def clear_dead(folder: Path, dead_nodes: Collection[str] = ()) -> None:
    """Remove the target files of this host whose processes are gone, and those of nodes that are gone.

    Args:
        folder: of target files; it may be shared by nodes, and by Ray clusters.
        dead_nodes: ids of nodes that Ray has lost. Files of nodes that Ray does not know belong to another cluster.
    """
    for file in folder.glob("paceline-*.json"):
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError, AttributeError
        ):  # not a target file of Paceline
            labels = json.loads(file.read_text())[0]["labels"]
            is_killed = labels[HOST_LABEL] == socket.gethostname() and not psutil.pid_exists(int(labels[PID_LABEL]))
            if is_killed or labels.get(NODE_LABEL) in dead_nodes:
                file.unlink(missing_ok=True)
