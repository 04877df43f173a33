"""docs/configuration.md is what the settings say, and every setting says what it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.settings_page import SECTIONS, settings_markdown
from engine.config import Settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_markdown(), (
        "run `paceline settings --markdown > docs/configuration.md`"
    )


@pytest.mark.parametrize("model", [section[3] for section in SECTIONS], ids=lambda model: model.__name__)
def test_every_setting_has_a_full_sentence(model: type[Settings]) -> None:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            continue
        assert field.description, f"{model.__name__}.{name} has no docstring"
        assert field.description.rstrip().endswith("."), f"{model.__name__}.{name}: {field.description!r}"


def test_rows_state_default_and_bounds() -> None:
    rows = settings_markdown().splitlines()
    assert any(row.startswith("| `engine.speculative.k` | `5` | integer >= 0 and <= 16 |") for row in rows)
    assert any(row.startswith("| `engine.model` | required | string |") for row in rows)
    assert any(row.startswith("| `num_replicas` | `1` | integer >= 1 and <= 1000 |") for row in rows)
