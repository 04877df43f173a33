"""Token ids to text, one step at a time, and where a stop string cuts it.

Owns the end of a stream that is held back: part of a UTF-8 character, or text that may become a stop string. Each class
is the state of one request. Its time is linear in the number of tokens. Does not know models, HTTP or the engine.

    token ids -> Detokenizer -> characters -> StopChecker -> text that may be shown
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

REPLACEMENT = "\ufffd"
FREELY_HELD = 32
"""Tokens that may be held back before the window decoder spaces out its attempts."""


class Detokenizer(Protocol):
    """Incremental decoding of one request."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; never part of a character."""
        ...

    def finish(self) -> str:
        """Text that is still held back. A character that is not complete is dropped."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: each token is a fixed run of bytes, so a table and a UTF-8 decoder are enough.

    Args:
        token_bytes: bytes of each token id; empty for tokens that are not shown. Ids beyond it decode to nothing.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._token_bytes
        return self._decoder.decode(b"".join([table[i] for i in token_ids if i < len(table)]))

    def finish(self) -> str:
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """For any tokenizer: decode a short window twice, with and without the new tokens, and emit the difference.

    The window starts at the tokens that were emitted last, because a token's text may depend on the token before it
    (for example a leading space). Text that ends in U+FFFD may end in part of a character and is held back. If it is
    still held back at the end, the trailing U+FFFD are dropped.

        token_ids   x x x x x x | c c | n n n
                                start   read     emitted text ends at `read`

    With byte-fallback vocabularies a run of byte tokens decodes as a whole. Where invalid bytes follow a valid
    character in one run, that character has already been shown. Decoding all tokens at once would replace it, too.

    Args:
        decode: text of a run of token ids, without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._start = 0
        self._read = 0
        self._num_held_at_next_try = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._token_ids.extend(token_ids)
        num_held = len(self._token_ids) - self._read
        if num_held < self._num_held_at_next_try:
            return ""
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            # If a model emits only U+FFFD, each attempt decodes more tokens. Fewer attempts keep the time linear.
            self._num_held_at_next_try = num_held + num_held // FREELY_HELD
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        text = self._new_text().rstrip(REPLACEMENT)
        self._advance()
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._token_ids[self._start : self._read])
        return self._decode(self._token_ids[self._start :])[len(shown) :]

    def _advance(self) -> None:
        self._start, self._read = self._read, len(self._token_ids)
        self._num_held_at_next_try = 0


class _StopString:
    """The longest prefix of one stop string that the text so far ends with (Knuth, Morris and Pratt 1977).

    `num_matched` is the length of the longest proper prefix of the stop string that is a suffix of the text.
    """

    __slots__ = ("_fallback", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def feed(self, char: str) -> bool:
        """Whether this character completes the stop string."""
        matched = self.num_matched
        while matched and char != self.text[matched]:
            matched = self._fallback[matched - 1]
        matched += char == self.text[matched]
        is_complete = matched == len(self.text)
        self.num_matched = self._fallback[-1] if is_complete else matched
        return is_complete


class StopChecker:
    """Finds the first stop string to be completed, and holds back text that may become one.

    The result does not depend on how the text was cut. The stop string that is completed first wins. Of several that
    are completed by one character, the longest wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopString(stop) for stop in stops]
        self._held = ""
        self.is_stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that may be shown: all text before a completed stop string, or before what may become one.

        Args:
            may_stop: False ignores stop strings that are completed in this text.
        """
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        self._held += text
        offset = len(self._held) - len(text)
        for position, char in enumerate(text, start=offset + 1):
            completed = [len(stop.text) for stop in self._stops if stop.feed(char)]
            if completed and may_stop:
                self.is_stopped = True
                shown, self._held = self._held[: position - max(completed)], ""
                return shown
        num_shown = len(self._held) - max(stop.num_matched for stop in self._stops)
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown

    def finish(self) -> str:
        """Text that was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held


class DecodedText(Struct, frozen=True):
    """The text of some tokens of one request."""

    text: str
    num_tokens: int
    """Tokens used. The token that completes a stop string is counted, tokens after it are not."""
    is_stopped: bool
    """Whether a stop string was completed; nothing may follow then."""


class TextStream:
    """The text of one request: decoding, then stop strings. With stop strings, tokens are decoded one by one.

    Args:
        detokenizer: a fresh one.
        stops: stop strings, none empty.
        min_tokens: a stop string that is completed before this many tokens is ignored.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._checker = StopChecker(stops)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.num_decoded = 0
        """Characters that the tokens so far decode to. Some of them may be held back or cut off."""

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> DecodedText:
        """Add tokens in order. With `is_last` no more tokens come, so nothing is held back."""
        if not self._has_stops:
            text = self._decode(token_ids, is_last=is_last)
            return DecodedText(text, len(token_ids), is_stopped=False)
        shown = ""
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            may_stop = self._num_tokens >= self._min_tokens
            shown += self._checker.push(self._decode((token_id,), is_last=False), may_stop=may_stop)
            if self._checker.is_stopped:
                return DecodedText(shown, index + 1, is_stopped=True)
        if is_last:
            shown += self._checker.push(self._decode((), is_last=True)) + self._checker.finish()
        return DecodedText(shown, len(token_ids), is_stopped=self._checker.is_stopped)

    def _decode(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        text = self._detokenizer.push(token_ids)
        if is_last:
            text += self._detokenizer.finish()
        self.num_decoded += len(text)
        return text
