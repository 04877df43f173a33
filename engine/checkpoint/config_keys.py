"""Typed access to the values of a config.json. Each error names the key."""

from __future__ import annotations

from typing import Any, TypeVar

from engine.errors import ConfigError

T = TypeVar("T")


class Keys:
    """The values of a JSON object. A value of null counts as missing."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key}: {value!r} is not a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. The default may be 0."""
        if default is not None and self._values.get(key) is None:
            return default
        return _finite(key, self._get(key, default))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self._get(key, None)
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{key}: {str(value)[:60]} is not a list of numbers")
        return tuple(_finite(key, item) for item in value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{key}: {value!r} is neither true nor false")
        return value

    def _get(self, key: str, default: T | None) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{key}: missing from config.json")
        return default


def _finite(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{key}: {value!r} is not a finite number above 0")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{key}: {str(value)[:60]} is not a finite number above 0") from None
