"""Jump-forward drafting: the tokens that a grammar forces, and nothing where it leaves a choice."""

from __future__ import annotations

import pytest
from byte_grammar import END, byte_grammars

from engine.core.request import Request
from engine.core.step import Batch, Span
from engine.draft.grammar import GrammarDrafter
from engine.messages import GrammarSpec, SamplingParams, Submit
from engine.sampling.grammar import Matcher
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions


def span_of(regex: str | None, text: bytes, k: int, k_by_match: tuple[int, ...] | None = None) -> Span:
    submit = Submit(request_id="r", prompt=(65,), sampling=SamplingParams())
    request = Request(submit=submit, key=1, stream_key=0, tokens=[65, *text])
    if regex is not None:
        options = TokenOptions(num_prompt=1, stop_token_ids=(END,), grammar=GrammarSpec(kind="regex", text=regex))
        assert options.grammar is not None
        grammars = byte_grammars()
        compiled = None
        while compiled is None:
            compiled = grammars.poll(options.grammar)
        request.logits_processor = LogitsProcessor(options, Matcher(compiled, options.stop_token_ids))
    return Span(request, len(request.tokens) - 1, 1, k, samples=True, reason="off", k_by_match=k_by_match)


def drafted(span: Span) -> bytes:
    (row,) = GrammarDrafter().draft(Batch(1, (span,), 0)).rows
    assert row.probs is None
    assert row.reason == span.reason
    return bytes(row.token_ids)


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [(b"", 3, b"abc"), (b"ab", 9, b"cde"), (b"ab", 1, b"c"), (b"abcde", 9, b""), (b"", 0, b"")],
)
def test_forced_tokens_are_drafted_up_to_k(text: bytes, k: int, expected: bytes) -> None:
    assert drafted(span_of("abcde[xy]+", text, k)) == expected


def test_the_largest_lookup_k_counts() -> None:
    assert drafted(span_of("abcde[xy]+", b"", 0, k_by_match=(0, 1, 4, 2))) == b"abcd"


def test_a_choice_or_no_grammar_gives_no_draft() -> None:
    assert drafted(span_of("[ab]cd", b"", 5)) == b""
    assert drafted(span_of("[ab]cd", b"a", 2)) == b"cd"
    assert drafted(span_of(None, b"ab", 5)) == b""
