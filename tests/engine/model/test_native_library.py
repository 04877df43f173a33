"""The native library's file: compiled once, however many processes need it at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.model.native.library import build

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo 1.0; exit; }
echo compiled >> "$(dirname "$0")/calls"
sleep 0.3
for last; do :; done
echo library > "$last"
"""


def test_one_of_several_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard and the draft load at the same time."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: build(), range(4)))
    assert [file.read_text() for file in files] == ["library\n"]
    assert (tmp_path / "calls").read_text() == "compiled\n"
