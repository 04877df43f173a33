"""docs/models.md lists every family and format that is tested, with its bound; its figures are within the bounds."""

from __future__ import annotations

import pytest
from model_table import BOUND, FAMILY_ROWS, PAGE, TABLES, body, rows

from engine.checkpoint.families import FAMILIES
from engine.gguf.tokenizer import PRE_TOKENIZERS
from engine.quantization.config import METHODS


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_every_row_with_its_bound(table: str) -> None:
    found = body(PAGE.read_text(encoding="utf-8"), table)
    expected = [[*row.cells, f"{BOUND:.0e}"] for row in rows(table)]
    assert [cells[:-1] for cells in found] == expected, "run tests/support/model_table.py"
    assert all(0 <= float(cells[-1]) < BOUND for cells in found)


def test_the_page_names_everything_that_is_read() -> None:
    assert set(FAMILY_ROWS) == set(FAMILIES)
    page = PAGE.read_text(encoding="utf-8")
    for name in (*METHODS, *PRE_TOKENIZERS):
        assert f"`{name}`" in page, name
