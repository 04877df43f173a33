"""Cost tables on disk: for the same engine on the same machine only, and never an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from autoscale.profiling.table_cache import TableCache, newest_table


def test_a_table_that_cannot_be_stored_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    table = CostTable((0.001,) * len(ROW_KNOTS), (0.0,) * len(BATCH_KNOTS))
    cache = TableCache(tmp_path / "file" / "costs", {})
    cache.store(table)
    assert cache.load() is None


@pytest.mark.parametrize(("rows", "batches"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_cached_table_with_other_knots_is_not_used(tmp_path: Path, rows: int, batches: int) -> None:
    cache = TableCache(tmp_path / "a" / "costs", {})
    cache.store(CostTable((0.001,) * (len(ROW_KNOTS) + rows), (0.0,) * (len(BATCH_KNOTS) + batches)))
    assert cache.load() is None


def test_a_table_is_cached_for_the_same_engine_only(tmp_path: Path) -> None:
    table = CostTable(tuple(0.001 * x for x in ROW_KNOTS), (0.0,) * len(BATCH_KNOTS), context_s=1e-7)
    cache = TableCache(tmp_path / "costs", {"model": "a"})
    assert cache.load() is None
    cache.store(table)
    assert TableCache(tmp_path / "costs", {"model": "a"}).load() == table
    assert TableCache(tmp_path / "costs", {"model": "b"}).load() is None
    (path,) = (tmp_path / "costs").iterdir()
    (tmp_path / "costs" / "older.json").write_bytes(path.read_bytes().replace(b'"model":"a"', b'"model":"c"'))
    os.utime(tmp_path / "costs" / "older.json", (1, 1))
    assert newest_table(tmp_path / "costs", lambda identity: identity["model"] in ("a", "c")) == table
    assert newest_table(tmp_path / "costs", lambda identity: identity["model"] == "d") is None
    assert newest_table(tmp_path / "no such folder", lambda _: True) is None
    (tmp_path / "costs" / "older.json").unlink()
    for damaged in (b"", b"{}", b'{"verify_s": [1], "pass_s": [1]}', b"\xff\x00"):
        (kept,) = (tmp_path / "costs").iterdir()
        kept.write_bytes(damaged)
        assert cache.load() is None
