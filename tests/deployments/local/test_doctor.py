"""What `paceline doctor` finds, and when it says that serving cannot work."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deployments.local import yaml_config
from deployments.local.doctor import examine, startup_lines
from deployments.local.ports import LOOPBACK, free_port
from deployments.local.weights import native_problem
from engine.config import EngineConfig
from paceline.cli import main


def engine(**values: object) -> EngineConfig:
    return EngineConfig.parse({"model": "m", "device": "cpu"} | values)


def test_every_topic_is_examined_and_this_machine_can_serve() -> None:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    values["http_options"]["port"] = free_port()
    findings = {finding.name: finding for finding in examine(values)}
    assert list(findings) == [
        *("Python", "torch", "GPUs", "CPU", "kernel", "memory", "/dev/shm", "open files", "other Ray", "Ray's ports"),
        *("HTTP port", "metrics port", "direct port", "API keys", "trace file", "cache", "device", "shared memory"),
    ]
    assert [finding.name for finding in findings.values() if finding.status == "fail"] == []
    assert "GB/s" in findings["memory"].value


def test_a_busy_port_is_status_1_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        text = yaml_config.DEFAULT_FILE.read_text().replace("port: 8000", f"port: {listener.getsockname()[1]}")
        file = tmp_path / "busy.yaml"
        file.write_text(text)
        assert main(["doctor", "--config", str(file)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "is in use by" in out
    assert "another port with --port" in out
    assert out.endswith("Serving cannot work here: HTTP port")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kernel": "torch"}, "the settings choose torch"),
        ({"dtype": "float32"}, "bfloat16 only"),
        ({"tensor_parallel_size": 2}, "whole models only"),
        ({"block_size": 8}, "the settings choose torch"),
    ],
)
def test_why_the_faster_kernel_does_not_compute_is_said(values: dict[str, object], reason: str) -> None:
    problem = native_problem(engine(**values))
    assert problem is not None
    assert reason in problem
    assert startup_lines(engine(**values))[1] == f"Kernel: torch, slower than native: {problem}"


def test_without_a_compiler_the_slower_kernel_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    device, kernel = startup_lines(engine(num_threads=3))
    assert device == "Device: cpu, 3 threads per shard"
    assert kernel.startswith("Kernel: torch, slower than native: ")
