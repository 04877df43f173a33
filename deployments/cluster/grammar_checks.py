"""Checks of grammars in the engine's process, which has the grammar library; the replica does not import it.

Owns the way from the replica's threads into its event loop, and the results of the latest checks: clients repeat their
schemas, and a check costs a Ray call. Does not know which process answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import lru_cache

from engine.messages import CheckedGrammar, GrammarSpec

MAX_KEPT = 128
"""Number of results that are kept."""


class GrammarChecks:
    """A `CheckGrammar` for threads other than that of the event loop.

    Args:
        ask: asks the engine; raises EngineUnavailable when there is none.
        loop: runs `ask`.
    """

    def __init__(
        self,
        ask: Callable[[GrammarSpec, str], Coroutine[None, None, CheckedGrammar]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._ask = ask
        self._loop = loop
        self._kept = lru_cache(MAX_KEPT)(self._wait)  # keeps no errors

    def __call__(self, spec: GrammarSpec, before: str = "") -> CheckedGrammar:
        """See `CheckGrammar`.

        Raises:
            EngineUnavailable: there is no engine.
        """
        return self._kept(spec, before)

    def _wait(self, spec: GrammarSpec, before: str) -> CheckedGrammar:
        return asyncio.run_coroutine_threadsafe(self._ask(spec, before), self._loop).result()
