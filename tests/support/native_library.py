"""Skips tests on machines without the native library."""

from __future__ import annotations

import pytest

from engine.model.native import NativeUnavailable, load_library


def _why_not() -> str | None:
    try:
        load_library()
    except NativeUnavailable as error:
        return str(error)
    return None


needs_library = pytest.mark.skipif(_why_not() is not None, reason=f"no native library: {_why_not()}")
