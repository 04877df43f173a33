"""`paceline bench gpu --dry-run` goes through every part on the CPU and writes its report and plot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.gpu.run import SECTIONS, gpu
from engine.errors import ConfigError


def options(folder: Path, **changes: object) -> argparse.Namespace:
    values = {"dry_run": True, "minutes": 5.0, "out": folder / "gpu.json", "plot": folder / "gpu.png"}
    return argparse.Namespace(**(values | changes))


def test_a_dry_run_passes_every_check_and_reports_every_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert gpu(options(tmp_path)) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["dry_run"] is True
    assert list(report["parts"]) == list(SECTIONS)
    assert {part["status"] for part in report["parts"].values()} == {"ok"}
    cells = report["parts"]["engines"]["cells"]
    assert {(cell["streams"], cell["policy"]) for cell in cells} == {
        (streams, policy) for streams in (1, 3) for policy in ("off", "fixed", "goodput")
    }
    assert all(cell["acceptance"] > 0 for cell in cells if cell["policy"] == "fixed")
    assert report["parts"]["handoff"]["steps"] == 60
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu_only_a_dry_run_starts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="--dry-run"):
        gpu(options(tmp_path, dry_run=False))
    assert not (tmp_path / "gpu.json").exists()


def test_no_measurement_begins_after_the_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert gpu(options(tmp_path, minutes=-1.0)) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {part["status"] for part in report["parts"].values()} == {"skipped"}
