"""What crosses the socket between a replica and its engine: requests in, deltas out.

Owns the values a client submits and the events it gets back. Knows token ids, never text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]

ErrorKind = Literal["invalid_request", "internal"]
"""Cause of an error: a value in the request that the engine refuses, or a fault of the engine."""

EmittedKind = Literal["accepted", "recovered", "bonus", "plain"]
"""Origin of a token: of the draft, or of the target after a rejection, after a whole accepted draft, or without one."""

Priority = Literal["high", "normal", "low"]
"""Shares of a busy engine; nobody is passed over for good."""

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice"]

WorkloadClass = Literal["greedy", "cool", "hot", "structured"]
"""Kinds of requests whose drafts fare alike: by temperature, or bound by a grammar."""

WORKLOADS: tuple[WorkloadClass, ...] = get_args(WorkloadClass)

HOT = 0.8
"""Temperature above which a request counts as hot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What the text of an answer must match."""

    kind: GrammarKind
    text: str = ""
    """The schema (JSON), pattern or EBNF; for `choice` a JSON array of strings; empty for `json_object`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Checked where they enter the process, in `deployments`.

    Order of application, as one law: logits + logit_bias, penalties, min_tokens and grammar masks, temperature, then
    top_k, min_p, top_p on the probabilities. With everything neutral the law is the model's own.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits: (token id, bias)."""
    max_tokens: int = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """No stop token may be chosen before this many tokens."""
    seed: int | None = None
    """Same seed, same tokens, for any batch mix and any K schedule."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at the first of these; the token itself is emitted. Holds the model's EOS ids."""
    num_logprobs: int | None = None
    """Report the log-probability of every emitted token, and of this many most likely ones; None reports nothing.
    They are of the model's own law (log-softmax of the logits), before any option."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens, all but the first."""
    grammar: GrammarSpec | None = None

    @property
    def workload(self) -> WorkloadClass:
        """The kind of request this is, for those who learn how drafts fare."""
        if self.grammar is not None:
            return "structured"
        if self.temperature == 0:
            return "greedy"
        return "hot" if self.temperature > HOT else "cool"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    """A client's say in drafting for its own request."""

    enabled: bool = True
    max_k: int | None = None
    """Upper bound of K for this request; None leaves it to the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request as it enters the engine."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: SamplingParams
    speculative: SpeculativeOptions = SpeculativeOptions()
    generated: tuple[int, ...] = ()
    """Tokens that another engine has generated for it already; this one goes on after them."""
    priority: Priority = "normal"
    client: str = ""
    """Who sent it: clients share a busy engine fairly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    logprob: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""


class Delta(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What one step did for one request. The last one carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...]
    """Tokens emitted in this step, in order; empty only when the request ends without one."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Set when finish_reason is `error`: what went wrong, for the client."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token of `token_ids` where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first delta, for prompt tokens 1.. where they were asked for."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache, in total."""
    num_drafted: int = 0
    """Draft tokens verified for this request, in total so far."""
    num_accepted: int = 0
    """Draft tokens accepted for this request, in total so far."""
    queue_s: float = 0.0
    """Seconds from its arrival in the engine to its first step."""
    num_accepted_now: int = 0
    """Of `token_ids`, so many from the front are accepted draft tokens."""
    last: EmittedKind | None = None
    """Origin of the token after them; None where the answer ended before it."""
    error_kind: ErrorKind | None = None
    """Set when finish_reason is `error`: the cause. None counts as `internal`."""
    error_field: str | None = None
    """Set when error_kind is `invalid_request`: the field of SamplingParams that was refused, where it is known."""
