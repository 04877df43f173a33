"""Grammars as token masks: validation, compilation, and the grammar state of one request.

Owns the cache of compiled grammars and one `Matcher` per request. Knows token ids only; the text of each token comes
from an injected `TokenizerInfo`. Stop tokens are allowed only where the text is complete. They are the only tokens
allowed where the text cannot continue.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar

from engine.errors import InvalidRequest
from engine.messages import CheckedGrammar, GrammarSpec
from engine.sampling.json_schema import schema_problems
from engine.sampling.repeats import repeat_problem

MAX_GRAMMAR_CHARS = 1 << 17
Done = Callable[[InvalidRequest | None], None]
_BOUNDED_CHARACTERS = r"[^\"\\\r\n]"
_JSON_CHARACTERS = r"[^\0-\x1f\"\\]"
"""xgrammar 0.2.9 allows raw control characters in strings of bounded length. JSON does not; see `_parse`."""
_ANY_OBJECT = '{"type": "object"}'


def validate_grammar(spec: GrammarSpec, *, field: str | None = None) -> None:
    """Check a grammar without a tokenizer. Takes milliseconds.

    Args:
        spec: the grammar.
        field: name of the request field that holds it, for the error message.

    Raises:
        InvalidRequest: the grammar does not parse, or uses a feature that cannot be enforced.
    """
    problem = checked(spec).problem
    if problem is not None:
        raise InvalidRequest(f"{field or spec.kind}: {problem}", field=field)


def checked(spec: GrammarSpec, before: str = "") -> CheckedGrammar:
    """Check a grammar as `validate_grammar`, but return the problem, and the rules of a grammar without one.

    Args:
        spec: the grammar.
        before: EBNF of a grammar whose text comes before it; empty for none.
    """
    try:
        grammar = _parse(spec)
        if before:
            grammar = xgrammar.Grammar.concat(xgrammar.Grammar.from_ebnf(before), grammar)
        return CheckedGrammar(ebnf=str(grammar))
    except (RuntimeError, ValueError, RecursionError) as error:
        return CheckedGrammar(problem=_reason(error))
    except (TypeError, AttributeError, KeyError) as error:  # A keyword has a value of an unexpected type.
        return CheckedGrammar(problem=f"not well-formed: {error}")


def _parse(spec: GrammarSpec) -> xgrammar.Grammar:
    """Parse a grammar. Raises ValueError or RuntimeError if it is not valid."""
    if len(spec.text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"{len(spec.text)} characters given, at most {MAX_GRAMMAR_CHARS} are allowed")
    if spec.kind in ("regex", "ebnf"):
        problem = repeat_problem(spec.text, has_quotes=spec.kind == "ebnf")
        if problem is not None:
            raise ValueError(problem)
    if spec.kind == "regex":
        return xgrammar.Grammar.from_regex(spec.text)
    if spec.kind == "ebnf":
        return xgrammar.Grammar.from_ebnf(spec.text)
    if spec.kind == "choice":
        return xgrammar.Grammar.from_ebnf(_choice(json.loads(spec.text)))
    if spec.kind == "json_object":
        return xgrammar.Grammar.from_json_schema(_ANY_OBJECT, any_whitespace=False)
    schema = json.loads(spec.text)
    problems = list(schema_problems(schema))
    if problems:
        raise ValueError("; ".join(problems[:5]))
    # Canonical spacing: fewer tokens to generate, and more of them are forced by the grammar.
    grammar = xgrammar.Grammar.from_json_schema(spec.text, any_whitespace=False)
    ebnf = str(grammar)
    if _BOUNDED_CHARACTERS not in ebnf:
        return grammar
    return xgrammar.Grammar.from_ebnf(ebnf.replace(_BOUNDED_CHARACTERS, _JSON_CHARACTERS))


def _choice(choices: Any) -> str:
    """EBNF text of a grammar that allows exactly the listed texts."""
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a list of at least one text is expected, none of them empty")
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _reason(error: BaseException) -> str:
    """The first line of the compiler's message, without its source location."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text.split(": ", 1)[1] if text.startswith("[") and ": " in text else text


class Grammars:
    """Compiled grammars of one tokenizer, with an LRU cache. Thread-safe.

    Args:
        load_info: returns the text of each token; called once, at the first grammar.
        max_entries: number of compiled grammars to keep.
    """

    def __init__(self, load_info: Callable[[], xgrammar.TokenizerInfo], *, max_entries: int = 128) -> None:
        self._load_info = load_info
        self._max_entries = max_entries
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._compiled: OrderedDict[GrammarSpec, xgrammar.CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._pending: set[GrammarSpec] = set()
        self._refused: OrderedDict[GrammarSpec, InvalidRequest] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec, Done]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def find(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar | None:
        """The compiled grammar if it is in the cache, else None."""
        with self._lock:
            compiled = self._compiled.get(spec)
            if compiled is not None:
                self._compiled.move_to_end(spec)
            return compiled

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """The compiled grammar, from the cache or compiled now. Takes milliseconds to seconds.

        Do not call it in the step loop's thread.

        Raises:
            InvalidRequest: the grammar is not valid.
        """
        with self._compiling:
            compiled = self.find(spec)
            if compiled is None:
                validate_grammar(spec)
                try:
                    if self._compiler is None:
                        self._compiler = xgrammar.GrammarCompiler(self._load_info(), max_threads=1, cache_enabled=False)
                    compiled = self._compiler.compile_grammar(_parse(spec))
                except (RuntimeError, ValueError) as error:
                    raise InvalidRequest(f"{spec.kind}: {_reason(error)}") from None
                with self._lock:
                    self._compiled[spec] = compiled
                    while len(self._compiled) > self._max_entries:
                        self._compiled.popitem(last=False)
            return compiled

    def prepare(self, spec: GrammarSpec, done: Done) -> None:
        """Compile in a background thread. `done` is called there, with the error or None."""
        self._jobs.put((spec, done))
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="grammars", daemon=True)
                self._worker.start()

    def poll(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar | None:
        """The compiled grammar; None while the background thread compiles it.

        Raises:
            InvalidRequest: the grammar is not valid.
        """
        with self._lock:
            error = self._refused.get(spec)
        if error is not None:
            raise error
        compiled = self.find(spec)
        if compiled is None and spec not in self._pending:
            self._pending.add(spec)
            self.prepare(spec, lambda error: self._settle(spec, error))
        return compiled

    def _settle(self, spec: GrammarSpec, error: InvalidRequest | None) -> None:
        with self._lock:
            if error is not None:
                self._refused[spec] = error
                while len(self._refused) > self._max_entries:
                    self._refused.popitem(last=False)
        self._pending.discard(spec)

    def _work(self) -> None:
        while True:
            spec, done = self._jobs.get()
            try:
                self.compile(spec)
            except InvalidRequest as error:
                done(error)
            except Exception as error:  # noqa: BLE001 - any failure must end the request that waits
                done(InvalidRequest(f"{spec.kind}: {type(error).__name__}: {error}"))
            else:
                done(None)


class Matcher:
    """The grammar state of one request.

    Args:
        compiled: the grammar.
        stop_token_ids: tokens that end the text; empty means the EOS tokens of the tokenizer.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_token_ids: Sequence[int]) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids) or None)
        self._vocab_size: int = compiled.tokenizer_info.vocab_size
        ids = {token for token in self._matcher.stop_token_ids if 0 <= token < self._vocab_size}
        self.stop_token_ids = frozenset(ids)
        self._stops = np.array(sorted(ids), dtype=np.int64)
        self._last_word = np.uint32(
            2 ** (self._vocab_size - 32 * (self.num_words - 1)) - 1
        )  # no bits beyond the vocabulary
        self._ended = False

    @property
    def num_words(self) -> int:
        """Number of int32 words of a mask row."""
        return -(-self._vocab_size // 32)

    @property
    def has_ended(self) -> bool:
        """Whether the last token was a stop token."""
        return self._ended

    @property
    def is_complete(self) -> bool:
        """Whether the text matches the grammar, so that it may end here."""
        return self._ended or bool(self._matcher.is_completed())

    def push(self, token: int) -> bool:
        """Advance by one token. Returns False and changes nothing if the grammar does not allow the token."""
        if self._ended:
            return False
        if token in self.stop_token_ids:
            if not self.is_complete:
                return False
            self._ended = True
            return True
        return bool(self._matcher.accept_token(token))

    def pop(self) -> None:
        """Undo the last successful push."""
        if self._ended:
            self._ended = False
        else:
            self._matcher.rollback(1)

    def fill(self, mask: npt.NDArray[np.int32], row: int, *, forbid_stop: bool) -> None:
        """Write the mask of the tokens allowed next.

        Args:
            mask: [rows, num_words] int32, one bit per token.
            row: row of the mask to write.
            forbid_stop: allow no stop token, unless no other token is allowed.
        """
        words = mask[row].view(np.uint32)
        words[:] = 0
        if not self._ended:
            self._matcher.fill_next_token_bitmask(mask, row)
            words[-1] &= self._last_word
            stops = self._stops
            np.bitwise_and.at(words, stops // 32, ~(np.uint32(1) << (stops % 32).astype(np.uint32)))
        if (self.is_complete and not forbid_stop) or not words.any():
            stops = self._stops
            np.bitwise_or.at(words, stops // 32, np.uint32(1) << (stops % 32).astype(np.uint32))

    def foreseen(self, most: int) -> tuple[int, ...]:
        """At most `most` next tokens that the grammar forces. A guess where a text has several tokenizations."""
        if self.is_complete:
            return ()
        return tuple(self._matcher.find_jump_forward_tokens()[:most])
