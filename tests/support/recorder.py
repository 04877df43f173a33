"""Pytest plugins of the mutation driver: what each test costs and calls, and a bound on what it may cost.

Owns what is measured in the process that runs the tests. A function is named by its file and the line of its code
object, so that a test is chosen for a change only where it calls the changed function. A fixture that several tests
share belongs to every test of the file that set it up.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Generator
from types import CodeType, FrameType
from typing import Any

import pytest


class Recorder:
    """CPU seconds of each test, and the functions below a folder that it calls.

    Args:
        folder: prefix of the paths of files that count.
    """

    def __init__(self, folder: str) -> None:
        self.seconds: dict[str, float] = {}
        self.shared_seconds: dict[str, float] = {}
        """CPU seconds of the fixtures that the tests of a file share, by file; of all files under an empty name."""
        self._folder = folder
        self._by_test: dict[str, set[CodeType]] = {}
        self._by_file: dict[str, set[CodeType]] = {}
        self._called: set[CodeType] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        begin = time.process_time()
        self._called = self._by_test.setdefault(item.nodeid, set())
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.seconds[item.nodeid] = time.process_time() - begin

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before, file = self._called, request.node.nodeid.partition("::")[0]
        begin = time.process_time()
        self._called = self._by_file.setdefault(file, set())
        try:
            return (yield)
        finally:
            self._called = before
            self.shared_seconds[file] = self.shared_seconds.get(file, 0.0) + time.process_time() - begin

    def calls(self) -> dict[str, list[str]]:
        """For each test the functions that it calls, as `file:line`."""
        return {
            test: sorted(
                f"{code.co_filename[len(self._folder) :].lstrip('/')}:{code.co_firstlineno}"
                for code in codes | self._by_file.get(test.partition("::")[0], set())
                if code.co_filename.startswith(self._folder)
            )
            for test, codes in self._by_test.items()
        }

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        self._called.add(frame.f_code)


class Bound:
    """Ends the process, by the default action of a timer's signal, where a test takes many times its usual time.

    Args:
        seconds: usual CPU seconds of each test.
        shared_seconds: of the fixtures that tests share, which the first of them pays for; see `Recorder`.
    """

    def __init__(self, seconds: dict[str, float], shared_seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._shared_seconds = shared_seconds
        self._set(10.0)  # for the imports and the collection

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        shared_s = sum(self._shared_seconds.get(name, 0.0) for name in ("", nodeid.partition("::")[0]))
        self._set(self._seconds.get(nodeid, 0.0) + shared_s)

    def _set(self, usual_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, 2 + 5 * usual_s)
        signal.setitimer(signal.ITIMER_REAL, 40 + 40 * usual_s)  # a busy machine must not look like a deadlock


TIMER_SIGNALS = (signal.SIGPROF, signal.SIGALRM)
"""Signals that end a process whose test has exceeded its bound."""
