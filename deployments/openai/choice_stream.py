"""One answer of a request while it is made: deltas in, text_deltas of text, calls and log-probabilities out.

Owns the order in which a token passes decoding, stop strings and the tool parser, and that text, counts and
log-probabilities end at the same token. Does not know the shape of answers or where deltas come from.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass

from deployments.openai.requests import ChatBody, CompletionBody
from deployments.openai.responses import FinishReason, StepTrace, TextDelta
from deployments.text.detokenizer import Detokenizer, TextStream
from deployments.text.logprobs import TokenRecord
from deployments.text.tokenizer import TextCodec
from deployments.text.tool_calls import FoundCall, ToolCallParser, make_parser
from engine.errors import EngineError
from engine.messages import Delta, Submit, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown before its answer."""

    token_ids: tuple[int, ...]
    detokenizer: Detokenizer
    """Fresh."""
    has_logprobs: bool = False

    def show(self, logprobs: Sequence[TokenLogprobs]) -> tuple[str, tuple[TokenRecord, ...]]:
        """Its text, and a record per token where they are asked for.

        Args:
            logprobs: of tokens 1 and up.
        """
        texts, records, offset = [], [], 0
        for index, token_id in enumerate(self.token_ids):
            if self.has_logprobs:
                records.append(TokenRecord(token_id, offset, logprobs[index - 1] if index else None))
            texts.append(self.detokenizer.push((token_id,)))
            offset += len(texts[-1])
        texts.append(self.detokenizer.finish())
        return "".join(texts), tuple(records)


@dataclass(slots=True)
class _PendingDelta:
    """What the tokens of one text_delta show."""

    text: str = ""
    records: tuple[TokenRecord, ...] = ()
    calls: tuple[FoundCall, ...] = ()
    trace: StepTrace | None = None


class ChoiceStream:
    """The state of one answer.

    Args:
        text: fresh.
        index: of the answer within the request.
        by_token: a text_delta per token instead of per delta.
        has_logprobs: record each token's log-probabilities.
        has_trace: say where the tokens of each delta come from; not together with `by_token`.
        hidden_stops: token ids that end the answer and are not shown, beside those that the decoder hides anyway.
        parser: finds calls of tools.
        is_parallel: more than one call is allowed; otherwise the answer ends with the first.
        echo: the prompt, to be shown first.
        has_output: False drops what is generated: only the prompt was to be scored.
    """

    def __init__(
        self,
        text: TextStream,
        *,
        index: int = 0,
        by_token: bool = False,
        has_logprobs: bool = False,
        has_trace: bool = False,
        hidden_stops: Collection[int] = (),
        parser: ToolCallParser | None = None,
        is_parallel: bool = True,
        echo: Echo | None = None,
        has_output: bool = True,
    ) -> None:
        self._text = text
        self._index = index
        self._by_token = by_token
        self._has_logprobs = has_logprobs
        self._has_trace = has_trace
        self._hidden_stops = hidden_stops
        self._parser = parser
        self._is_parallel = is_parallel
        self._echo = echo
        self._has_answer = has_output
        self._num_echoed = 0
        self._num_completion = 0
        self._num_steps = 0
        self._reason: FinishReason | None = None
        self._takes_single_tokens = by_token or has_logprobs or has_trace or parser is not None
        self._is_text_only = has_output and echo is None and not self._takes_single_tokens

    def push(self, delta: Delta) -> list[TextDelta]:
        """Text deltas of one engine delta, in order. The last one of the choice has a `finish_reason`."""
        if self._is_text_only and delta.finish_reason is None:
            return [self._text_delta(delta)]
        pending = self._show_echo(delta)
        if not self._has_answer:
            self._reason = "length"
            return [self._to_text_delta(pending, delta)]
        ids = delta.token_ids
        groups = [ids[i : i + 1] for i in range(len(ids))] if self._takes_single_tokens and ids else [ids]
        text_deltas: list[TextDelta] = []
        texts: list[str] = []
        self._num_steps += 1
        for number, group in enumerate(groups):
            is_end = number == len(groups) - 1 and delta.finish_reason is not None
            logprobs = delta.logprobs[number] if self._has_logprobs and group and delta.logprobs else None
            num_shown = len(pending.text)
            self._add(pending, group, logprobs, delta.finish_reason if is_end else None)
            if self._has_trace:
                texts += [pending.text[num_shown:]] * bool(group)
                pending.trace = _trace(delta, self._num_steps, texts)
            if self._by_token or self._reason is not None:
                text_deltas.append(self._to_text_delta(pending, delta))
                pending = _PendingDelta()
            if self._reason is not None:
                return text_deltas
        return text_deltas if self._by_token else [self._to_text_delta(pending, delta)]

    def _text_delta(self, delta: Delta) -> TextDelta:
        """What most deltas come to, at half the cost: nothing to record or to parse, no end but a stop string."""
        shown = self._text.push(delta.token_ids, is_last=False)
        self._num_completion += shown.num_tokens
        if shown.is_stopped:
            self._reason = "stop"
        return TextDelta(
            shown.text,
            self._reason,
            self._num_completion,
            delta.num_cached,
            delta.num_drafted,
            delta.num_accepted,
            self._index,
        )

    def _show_echo(self, delta: Delta) -> _PendingDelta:
        if self._echo is None:
            return _PendingDelta()
        text, records = self._echo.show(delta.prompt_logprobs)
        self._echo = None
        self._num_echoed = len(text)
        return _PendingDelta(text, records)

    def _add(
        self, pending: _PendingDelta, ids: tuple[int, ...], logprobs: TokenLogprobs | None, finish_reason: str | None
    ) -> None:
        """Pass some tokens through; `_reason` says whether the answer ends with them."""
        if logprobs is not None:
            pending.records += (TokenRecord(ids[0], self._num_echoed + self._text.num_decoded, logprobs),)
        is_hidden_stop = finish_reason == "stop" and bool(ids) and ids[-1] in self._hidden_stops
        decoded = self._text.push(ids[:-1] if is_hidden_stop else ids, is_last=finish_reason is not None)
        self._num_completion += decoded.num_tokens + (is_hidden_stop and not decoded.is_stopped)
        is_over = decoded.is_stopped or finish_reason is not None
        text = decoded.text
        if self._parser is not None:
            parsed = self._parser.push(text)
            text, calls = parsed.text, parsed.calls
            if calls and not self._is_parallel:
                is_over, finish_reason, calls = True, "stop", calls[:1]
            elif is_over:
                parsed = self._parser.finish()
                text, calls = text + parsed.text, calls + parsed.calls
            pending.calls += calls
        pending.text += text
        if is_over:
            stopped = decoded.is_stopped or finish_reason == "stop"
            called = stopped and self._parser is not None and self._parser.num_calls > 0
            self._reason = "tool_calls" if called else "stop" if stopped else "length"

    def _to_text_delta(self, pending: _PendingDelta, delta: Delta) -> TextDelta:
        return TextDelta(
            text=pending.text,
            finish_reason=self._reason,
            num_completion=self._num_completion,
            num_cached=delta.num_cached,
            num_drafted=delta.num_drafted,
            num_accepted=delta.num_accepted,
            index=self._index,
            records=pending.records,
            calls=pending.calls,
            trace=pending.trace,
        )


def _trace(delta: Delta, step: int, texts: Sequence[str]) -> StepTrace:
    """Of the tokens that were used: those after a stop string are not."""
    num_used = len(texts)
    accepted = min(delta.num_accepted_now, num_used)
    last = delta.last if num_used == len(delta.token_ids) and num_used > accepted else None
    return StepTrace(step, accepted, last, delta.token_ids[:num_used], tuple(texts))


def make_choice(body: ChatBody | CompletionBody, submit: Submit, index: int, codec: TextCodec) -> ChoiceStream:
    """The state of one answer to a body."""
    parser, echo = None, None
    if isinstance(body, ChatBody) and body.may_call_tools and codec.tool_form is not None:
        parser = make_parser(codec.tool_form, {tool.function.name for tool in body.tools or ()})
    if isinstance(body, CompletionBody) and body.echo:
        echo = Echo(submit.prompt, codec.detokenizer(), has_logprobs=body.num_logprobs is not None)
    return ChoiceStream(
        TextStream(codec.detokenizer(), body.stop, min_tokens=submit.sampling.min_tokens),
        index=index,
        by_token=body.streams_tokens,
        has_logprobs=body.num_logprobs is not None,
        has_trace=body.is_traced,
        hidden_stops=frozenset(body.stop_token_ids),
        parser=parser,
        is_parallel=not isinstance(body, ChatBody) or body.parallel_tool_calls is not False,
        echo=echo,
        has_output=body.requested_max_tokens != 0,
    )


async def read_text_deltas(
    deltas: AsyncGenerator[Delta, None], choice: ChoiceStream
) -> AsyncGenerator[TextDelta, None]:
    """The text_deltas of one answer, the last with `finish_reason`; ends, is closed or is cancelled with `deltas`.

    A stop string closes `deltas` before the last text_delta is handed on, so a slow client never keeps the engine busy.

    Raises:
        EngineError: the engine ended without a finish reason. Errors of `deltas` pass through.
    """
    try:
        async for delta in deltas:
            text_deltas = choice.push(delta)
            is_over = bool(text_deltas) and text_deltas[-1].finish_reason is not None
            if is_over:
                await deltas.aclose()
            for text_delta in text_deltas:
                yield text_delta
            if is_over:
                return
        raise EngineError("The engine ended this request without a finish reason")
    finally:
        await deltas.aclose()
