"""Target files: written atomically, removed, and cleared of killed replicas of the same host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autoscale.control.metric_targets import MetricTarget
from deployments.monitoring.discovery import (
    HOST_LABEL,
    NODE_LABEL,
    PID_LABEL,
    TargetFile,
    clear_dead,
    targets_folder,
)

COMMON = {"app": "a", "replica": "r", "model": "m"}


class TestTargetFiles:
    def test_written_whole_and_removed(self, tmp_path: Path) -> None:
        target = TargetFile(tmp_path / "made", "app#1/x")
        target.write(MetricTarget(address="127.0.0.1:1234", labels=COMMON, node_id="n1"))
        (entry,) = json.loads(target.path.read_text())
        assert entry["targets"] == ["127.0.0.1:1234"]
        assert entry["labels"] == COMMON | {
            PID_LABEL: str(os.getpid()),
            HOST_LABEL: socket.gethostname(),
            NODE_LABEL: "n1",
        }
        assert list((tmp_path / "made").iterdir()) == [target.path]  # nothing partial is left
        target.remove()
        target.remove()
        assert not target.path.exists()

    def test_only_the_dead_of_this_host_are_cleared(self, tmp_path: Path) -> None:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        entries = {
            "paceline-dead": {PID_LABEL: str(dead.pid), HOST_LABEL: socket.gethostname()},
            "paceline-alive": {PID_LABEL: str(os.getpid()), HOST_LABEL: socket.gethostname()},
            "paceline-elsewhere": {PID_LABEL: str(dead.pid), HOST_LABEL: "another-host"},
            "paceline-other": {},
            "foreign": {PID_LABEL: str(dead.pid), HOST_LABEL: socket.gethostname()},
        }
        for name, labels in entries.items():
            (tmp_path / f"{name}.json").write_text(json.dumps([{"targets": [], "labels": labels}]))
        (tmp_path / "paceline-broken.json").write_text("{")
        clear_dead(tmp_path)
        left = {file.stem for file in tmp_path.iterdir()}
        assert left == {*entries, "paceline-broken"} - {"paceline-dead"}

    def test_files_of_lost_nodes_are_cleared_and_those_of_other_clusters_are_not(self, tmp_path: Path) -> None:
        other = {PID_LABEL: "1", HOST_LABEL: "another-host"}
        for name, node in {"lost": "n1", "living": "n2", "foreign": "of-another-cluster"}.items():
            labels = other | {NODE_LABEL: node}
            (tmp_path / f"paceline-{name}.json").write_text(json.dumps([{"targets": [], "labels": labels}]))
        (tmp_path / "paceline-old.json").write_text(json.dumps([{"targets": [], "labels": other}]))
        clear_dead(tmp_path, frozenset({"n1"}))
        assert {file.stem for file in tmp_path.iterdir()} == {"paceline-living", "paceline-foreign", "paceline-old"}

    def test_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PACELINE_METRICS_DIR", str(tmp_path))
        assert targets_folder(None) == tmp_path
        assert targets_folder("/elsewhere") == Path("/elsewhere")
        monkeypatch.delenv("PACELINE_METRICS_DIR")
        assert targets_folder(None).name == "metrics-targets"
