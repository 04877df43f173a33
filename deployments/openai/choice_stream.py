"""One choice of a request while it is generated: engine deltas in, text deltas out.

Owns the order in which a token passes decoding, stop strings, the thought parser and the tool parser. Text, counts and
log-probabilities end at the same token. Does not know the wire format or where the deltas come from.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass

from deployments.openai.requests import ChatBody, CompletionBody
from deployments.openai.responses import FinishReason, StepTrace, TextDelta, TreeTrace
from deployments.text.detokenizer import Detokenizer, TextStream
from deployments.text.logprobs import NameOf, TokenRecord
from deployments.text.reasoning import ThoughtParser
from deployments.text.tokenizer import TextCodec
from deployments.text.tool_calls import ToolCallDelta, ToolCallParser
from deployments.text.tool_parsers import make_parser
from engine.errors import EngineError
from engine.messages import Delta, Submit, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown before its completion."""

    token_ids: tuple[int, ...]
    detokenizer: Detokenizer
    """A fresh decoder."""
    has_logprobs: bool = False

    def show(self, logprobs: Sequence[TokenLogprobs]) -> tuple[str, tuple[TokenRecord, ...]]:
        """The prompt's text, and a record per token if log-probabilities are requested.

        Args:
            logprobs: log-probabilities of the prompt's tokens from the second one on.
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
    """What the tokens of the next text delta show."""

    text: str = ""
    reasoning: str = ""
    records: tuple[TokenRecord, ...] = ()
    calls: tuple[ToolCallDelta, ...] = ()
    trace: StepTrace | None = None


class ChoiceStream:
    """The state of one choice.

    Args:
        text: a fresh text stream.
        index: index of the choice within the request.
        by_token: emit a text delta per token instead of per engine delta.
        has_logprobs: record each token's log-probabilities.
        has_trace: report where the tokens of each delta come from; not together with `by_token`.
        hidden_stops: token ids that end the choice and are not shown, in addition to those that the decoder hides.
        thoughts: splits thoughts from text.
        parser: finds tool calls in the text.
        is_parallel: allow more than one tool call. Otherwise the choice ends with the first one.
        echo: the prompt, to be shown first.
        has_output: False drops what is generated, because the request only scores its prompt.
        name_of: spells the nodes of trees in traces; None leaves trees out.
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
        thoughts: ThoughtParser | None = None,
        parser: ToolCallParser | None = None,
        is_parallel: bool = True,
        echo: Echo | None = None,
        has_output: bool = True,
        name_of: NameOf | None = None,
    ) -> None:
        self._text = text
        self._index = index
        self._by_token = by_token
        self._has_logprobs = has_logprobs
        self._has_trace = has_trace
        self._hidden_stops = hidden_stops
        self._thoughts = thoughts
        self._parser = parser
        self._is_parallel = is_parallel
        self._echo = echo
        self._has_output = has_output
        self._name_of = name_of
        self._num_echoed = 0
        self._num_completion = 0
        self._num_reasoning = 0
        self._num_steps = 0
        self._reason: FinishReason | None = None
        self._takes_single_tokens = by_token or has_logprobs or has_trace or parser is not None or thoughts is not None
        self._is_text_only = has_output and echo is None and not self._takes_single_tokens

    def push(self, delta: Delta) -> list[TextDelta]:
        """Text deltas of one engine delta, in order. The last one of the choice has a `finish_reason`."""
        if self._is_text_only and delta.finish_reason is None:
            return [self._plain_delta(delta)]
        pending = self._show_echo(delta)
        if not self._has_output:
            self._reason = "length"
            return [self._text_delta(pending, delta)]
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
                pending.trace = _trace(delta, self._num_steps, texts, self._name_of)
            if self._by_token or self._reason is not None:
                text_deltas.append(self._text_delta(pending, delta))
                pending = _PendingDelta()
            if self._reason is not None:
                return text_deltas
        return text_deltas if self._by_token else [self._text_delta(pending, delta)]

    def _plain_delta(self, delta: Delta) -> TextDelta:
        """The common case at half the cost: nothing to record or to parse, and only a stop string can end it."""
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
        return _PendingDelta(text, records=records)

    def _add(
        self, pending: _PendingDelta, ids: tuple[int, ...], logprobs: TokenLogprobs | None, finish_reason: str | None
    ) -> None:
        """Decode and parse some tokens. Sets `_reason` if the choice ends with them."""
        if logprobs is not None:
            pending.records += (TokenRecord(ids[0], self._num_echoed + self._text.num_decoded, logprobs),)
        is_hidden_stop = finish_reason == "stop" and bool(ids) and ids[-1] in self._hidden_stops
        decoded = self._text.push(ids[:-1] if is_hidden_stop else ids, is_last=finish_reason is not None)
        self._num_completion += decoded.num_tokens + (is_hidden_stop and not decoded.is_stopped)
        is_over = decoded.is_stopped or finish_reason is not None
        text = self._take_thoughts(pending, decoded.text, decoded.num_tokens, is_over=is_over)
        if self._parser is not None:
            parsed = self._parser.push(text)
            text, calls = parsed.text, parsed.calls
            if not self._is_parallel and self._parser.num_calls > 0:
                # One token can complete the first call and begin the second one.
                is_over, finish_reason, calls = True, "stop", tuple(call for call in calls if call.number == 0)
            elif is_over:
                parsed = self._parser.finish()
                text, calls = text + parsed.text, calls + parsed.calls
            pending.calls += calls
        pending.text += text
        if is_over:
            is_stopped = decoded.is_stopped or finish_reason == "stop"
            has_called = is_stopped and self._parser is not None and self._parser.num_calls > 0
            self._reason = "tool_calls" if has_called else "stop" if is_stopped else "length"

    def _take_thoughts(self, pending: _PendingDelta, text: str, num_tokens: int, *, is_over: bool) -> str:
        """Move thoughts into `pending`; returns the text after them."""
        if self._thoughts is None:
            return text
        self._num_reasoning += num_tokens * (not self._thoughts.is_over)
        thought = self._thoughts.push(text)
        pending.reasoning += thought.reasoning
        text = thought.text
        if is_over:
            rest = self._thoughts.finish()
            pending.reasoning += rest.reasoning
            text += rest.text
        return text

    def _text_delta(self, pending: _PendingDelta, delta: Delta) -> TextDelta:
        return TextDelta(
            text=pending.text,
            finish_reason=self._reason,
            num_completion=self._num_completion,
            num_cached=delta.num_cached,
            num_drafted=delta.num_drafted,
            num_accepted=delta.num_accepted,
            index=self._index,
            reasoning=pending.reasoning,
            num_reasoning=self._num_reasoning,
            records=pending.records,
            calls=pending.calls,
            trace=pending.trace,
        )


def _trace(delta: Delta, step: int, texts: Sequence[str], name_of: NameOf | None) -> StepTrace:
    """The trace of the tokens that were used. Tokens after a stop string are not."""
    num_used = len(texts)
    accepted = min(delta.num_accepted_now, num_used)
    last = delta.last if num_used == len(delta.token_ids) and num_used > accepted else None
    tree = None
    if delta.tree is not None and name_of is not None:
        names = tuple(name_of(token_id).text for token_id in delta.tree.token_ids)
        tree = TreeTrace(names, delta.tree.parents, delta.tree.path[:accepted])
    return StepTrace(step, accepted, last, delta.token_ids[:num_used], tuple(texts), tree)


def make_choice(body: ChatBody | CompletionBody, submit: Submit, index: int, codec: TextCodec) -> ChoiceStream:
    """The state of one choice of a request."""
    parser, thoughts, echo = None, None, None
    if isinstance(body, ChatBody):
        if body.may_call_tools and codec.tool_form is not None:
            functions = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
            parser = make_parser(codec.tool_form, functions, is_forced=body.must_call_tools)
        if codec.has_thoughts and body.begins_a_turn and not codec.closes_thoughts(submit.prompt):
            thoughts = ThoughtParser(is_open=codec.opens_thoughts(submit.prompt))
    elif body.echo:
        echo = Echo(submit.prompt, codec.detokenizer(), has_logprobs=body.num_logprobs is not None)
    detokenizer = codec.detokenizer(shows_markers=parser is not None or thoughts is not None)
    return ChoiceStream(
        TextStream(detokenizer, body.stop, min_tokens=submit.sampling.min_tokens),
        index=index,
        by_token=body.streams_tokens,
        has_logprobs=body.num_logprobs is not None,
        has_trace=body.is_traced,
        hidden_stops=frozenset(body.stop_token_ids),
        thoughts=thoughts,
        parser=parser,
        is_parallel=not isinstance(body, ChatBody) or body.parallel_tool_calls is not False,
        echo=echo,
        has_output=body.requested_max_tokens != 0,
        name_of=codec.name_of,
    )


async def read_text_deltas(
    deltas: AsyncGenerator[Delta, None], choice: ChoiceStream
) -> AsyncGenerator[TextDelta, None]:
    """The text deltas of one choice, the last with a `finish_reason`. Closing or cancelling it closes `deltas`.

    A stop string closes `deltas` before the last text delta is yielded, so a slow client never keeps the engine busy.

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
