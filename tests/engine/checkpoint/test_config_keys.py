"""Typed access to a config.json: the smallest values that are taken, the next ones, and null."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoint.config_keys import Keys
from engine.errors import ConfigError


def keys(value: Any) -> Keys:
    return Keys({"a": value})


def test_values_of_each_type() -> None:
    assert keys(1).positive("a") == 1
    assert keys(5e-324).number("a") == 5e-324
    whole = keys(3).number("a")
    assert (whole, type(whole)) == (3.0, float)
    assert keys([1, 2.5]).numbers("a") == (1.0, 2.5)
    assert keys(False).flag("a", default=True) is False


@pytest.mark.parametrize("values", [{}, {"a": None}])
def test_null_counts_as_missing(values: dict[str, Any]) -> None:
    found = Keys(values)
    assert found.positive("a", 7) == 7
    assert found.number("a", 0.0) == 0.0
    assert found.flag("a", default=True) is True
    for read in (found.positive, found.number, found.numbers):
        with pytest.raises(ConfigError, match=r"^a: (missing from config\.json|None is not a list)"):
            read("a")


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", [1]])
def test_a_count_is_a_whole_number_above_0(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        keys(value).positive("a", 5)
    assert str(caught.value) == f"a: {value!r} is not a whole number above 0"


@pytest.mark.parametrize("value", [0, 0.0, -1.0, True, float("inf"), float("nan"), "1", [1.0]])
def test_a_number_is_finite_and_above_0(value: Any) -> None:
    for read, given in ((keys(value).number, value), (keys([1.0, value]).numbers, value)):
        with pytest.raises(ConfigError) as caught:
            read("a")
        assert str(caught.value) == f"a: {given!r} is not a finite number above 0"


def test_a_number_that_no_float_holds_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        keys(10**400).number("a")
    assert str(caught.value) == f"a: 1{'0' * 59} is not a finite number above 0"


@pytest.mark.parametrize("value", [[], (1.0,), 1.0, {"b": 1}])
def test_numbers_are_a_list_of_at_least_one(value: Any) -> None:
    with pytest.raises(ConfigError, match="is not a list of numbers"):
        keys(value).numbers("a")


@pytest.mark.parametrize("value", [0, 1, "true"])
def test_a_flag_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match="is neither true nor false"):
        keys(value).flag("a", default=True)
