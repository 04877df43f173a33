"""Cost tables of machines: complete, ascending, and those of a data sheet by hand."""

from __future__ import annotations

import pytest

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS
from autoscale.simulation.hardware import HARDWARE, roofline_table


@pytest.mark.parametrize("name", HARDWARE)
def test_tables_are_complete_and_ascending(name: str) -> None:
    table = HARDWARE[name]()
    assert len(table.verify_s) == len(ROW_KNOTS)
    assert len(table.pass_s) == len(BATCH_KNOTS)
    assert list(table.verify_s) == sorted(table.verify_s)
    assert list(table.pass_s) == sorted(table.pass_s)
    assert min(*table.verify_s, *table.pass_s) > 0
    assert table.pass_s[0] < table.verify_s[0], "a draft pass is cheaper than a target step"


def test_a_forward_takes_the_longer_of_reading_and_computing() -> None:
    """Reading the weights takes 10 ms, a row 1 ms of arithmetic, a launch 0.5 ms; of the draft a tenth of both."""
    table = roofline_table(
        target_bytes=1e9,
        target_flops_per_token=1e9,
        draft_bytes=1e8,
        draft_flops_per_token=1e8,
        bytes_per_s=1e11,
        flops_per_s=1e12,
        kv_bytes_per_token=1e5,
        launch_s=5e-4,
    )
    by_rows = dict(zip(ROW_KNOTS, table.verify_s, strict=True))
    assert by_rows[1] == by_rows[8] == pytest.approx(0.0105)
    assert by_rows[64] == pytest.approx(0.0645)
    by_batch = dict(zip(BATCH_KNOTS, table.pass_s, strict=True))
    assert by_batch[1] == pytest.approx(0.0015)
    assert by_batch[64] == pytest.approx(0.0069)
    assert table.context_s == pytest.approx(1e-6)
    assert table.catch_up_s == pytest.approx(1e-4)
