"""What crosses the socket between a replica and its engine: requests in, deltas out.

Owns the values of a request and of its response. Knows token ids, never text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]

ErrorKind = Literal["invalid_request", "internal"]
"""Cause of an error: a value in the request that the engine refuses, or a fault of the engine."""

EmittedKind = Literal["accepted", "recovered", "bonus", "plain"]
"""Where a token comes from.

    accepted   the draft; the target accepted it
    recovered  the target, in place of the first rejected draft token
    bonus      the target, after a draft of which every token was accepted
    plain      the target, in a step without a draft for the request
"""

Priority = Literal["high", "normal", "low"]
"""Sets a request's share of a busy engine, by weight. Every priority makes progress."""

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice"]

WorkloadClass = Literal["greedy", "cool", "hot", "structured"]
"""Classes of requests with similar draft acceptance.

    greedy      temperature 0
    cool        temperature up to HOT
    hot         temperature above HOT
    structured  the output must match a grammar, at any temperature
"""

WORKLOADS: tuple[WorkloadClass, ...] = get_args(WorkloadClass)

HOT = 0.8
"""Temperature above which a request's workload is `hot`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A grammar that the text of the response must match."""

    kind: GrammarKind
    """Language of `text`."""
    text: str = ""
    """A JSON schema, a regular expression or EBNF; for `choice` a JSON array of strings; empty for `json_object`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGrammar:
    """What the engine found about a grammar: its rules, or why it is refused."""

    ebnf: str = ""
    """The grammar in EBNF, for combining it with other rules; empty if it is refused."""
    problem: str | None = None
    """Why it does not parse or cannot be enforced; None if it can."""


class CheckGrammar(Protocol):
    """Checks a grammar without a tokenizer. Takes milliseconds."""

    def __call__(self, spec: GrammarSpec, before: str = "") -> CheckedGrammar:
        """
        Args:
            spec: the grammar.
            before: EBNF of a grammar whose text comes before it; empty for none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. `deployments` checks the values; the engine trusts them.

    The options apply in this order: logit_bias; repetition, presence and frequency penalties; the masks of min_tokens
    and of the grammar; temperature; then top_k, min_p and top_p on the probabilities. With the defaults the
    distribution is the model's.
    """

    temperature: float = 1.0
    """Divides the logits. 0 is greedy: the most likely token."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the most likely token's; 0 keeps all."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that has been generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, value added to its logit)."""
    max_tokens: int = 16
    """Upper bound of the number of generated tokens."""
    min_tokens: int = 0
    """No stop token is chosen before this many generated tokens, unless only stop tokens are allowed."""
    seed: int | None = None
    """With a seed, equal requests get equal tokens in any batch and at any K. None draws a new seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after the first of these, which is emitted. Includes the model's EOS ids."""
    num_logprobs: int | None = None
    """Report the log-probability of each emitted token and of this many most likely tokens; None reports nothing.
    Log-probabilities are the log-softmax of the model's logits, before any option applies."""
    num_prompt_logprobs: int | None = None
    """Report log-probabilities in the same way for every prompt token but the first; None reports nothing."""
    grammar: GrammarSpec | None = None
    """The grammar that the response must match; None allows any text."""

    @property
    def workload(self) -> WorkloadClass:
        """The class under which draft acceptance of this request is learned."""
        if self.grammar is not None:
            return "structured"
        if self.temperature == 0:
            return "greedy"
        return "hot" if self.temperature > HOT else "cool"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    """A client's limits on drafting for its request."""

    enabled: bool = True
    """False: no drafting for this request."""
    max_k: int | None = None
    """Upper bound of K for this request; None sets no bound beyond the plan's."""
    learn: bool = True
    """False: the draft does not learn from this request, whatever the settings allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """A LoRA adapter as requests name it."""

    number: int
    """Stands for the weights: an adapter that is loaded again gets another number. At least 1."""
    name: str
    """Name that clients send as `model`. Acceptance is learned and counted by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request as it enters the engine."""

    request_id: str
    """Unique among the requests of the engine; repeated in every delta."""
    prompt: tuple[int, ...]
    """Token ids of the prompt, at least one."""
    sampling: SamplingParams
    """How its tokens are chosen."""
    speculative: SpeculativeOptions = SpeculativeOptions()
    """The client's limits on drafting."""
    generated: tuple[int, ...] = ()
    """Tokens that another engine generated for this request; generation continues after them."""
    priority: Priority = "normal"
    """Weight of the request in the waiting queue."""
    client: str = ""
    """Name of the client; clients share a busy engine fairly."""
    adapter: AdapterRef | None = None
    """The adapter of the target that computes it; None for the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    logprob: float
    """Log-probability of the token at this position."""
    top: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, log-probability) of the most likely tokens, most likely first."""


class VerifiedTree(Struct, frozen=True, array_like=True, gc=False):
    """A draft with branches that a step verified."""

    token_ids: tuple[int, ...]
    """Token of each node."""
    parents: tuple[int, ...]
    """Parent of each node, which comes before it; -1 for the last token of the step before."""
    path: tuple[int, ...]
    """The accepted nodes, from the root on."""


class Delta(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What one step emitted for one request. The last delta of a request carries `finish_reason`."""

    request_id: str
    """The request's id, as submitted."""
    token_ids: tuple[int, ...]
    """Tokens emitted in this step, in order; empty only when the request ends without a token."""
    finish_reason: FinishReason | None = None
    """Why the request ended; None while it runs."""
    error: str | None = None
    """Message for the client about what went wrong; None unless the request failed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token of `token_ids` if the request asked for them, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the first delta, one entry per prompt token but the first if the request asked for them, else empty."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache, in total."""
    num_drafted: int = 0
    """Draft tokens verified for this request, in total so far."""
    num_accepted: int = 0
    """Draft tokens accepted for this request, in total so far."""
    queue_s: float = 0.0
    """Seconds from the request's arrival in the engine to its first step."""
    num_accepted_now: int = 0
    """Number of accepted draft tokens of this step; they are the first of `token_ids`."""
    last: EmittedKind | None = None
    """Origin of the token after the accepted ones; None if the request ended before that token."""
    error_kind: ErrorKind | None = None
    """Set when finish_reason is `error`: the cause. None counts as `internal`."""
    error_field: str | None = None
    """Set when error_kind is `invalid_request`: the refused field of SamplingParams, where it is known."""
    tree: VerifiedTree | None = None
    """The draft of this step where it branched; None for a chain and without a draft."""
