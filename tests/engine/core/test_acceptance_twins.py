"""The two implementations of the acceptance rules give equal tokens, for any mix of requests in a step.

Promise: `accept_all`, which treats all spans together, equals `accept_each`, which treats one span after the other, bit
for bit: both use the same random stream and the same distributions.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import random_parents

from engine.core.acceptance import SampledSpan, accept_all
from engine.core.acceptance_each import accept_each
from engine.core.request import Request
from engine.core.step import Draft, DraftRow, RowVerdict, Span
from engine.core.verifier import accept_or_reject
from engine.messages import SamplingParams, Submit
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.tree import branches, chain_parents, children_of

VOCAB = 300
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 5, 280]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.sampled_from([None, None, 7]),
    num_logprobs=st.sampled_from([None, 0, 3]),
    num_prompt_logprobs=st.sampled_from([None, None, 2]),
)
SPANS = st.lists(
    st.tuples(SAMPLINGS, st.integers(0, 9), st.booleans(), st.booleans(), st.sampled_from(["chain", "tree"])),
    min_size=1,
    max_size=6,
)


def step_of(spans: list[Any], vocab: torch.Tensor | None, seed: int) -> tuple[torch.Tensor, list[Span], Draft]:
    """A step of spans (sampling, k, drafted from q, drafted by the target's own distribution, shape)."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    width = VOCAB if vocab is None else len(vocab)
    step_spans, rows, logits = [], [], []
    for key, (sampling, k, from_q, close, shape) in enumerate(spans):
        prompt = tuple(torch.randint(0, VOCAB, (6,), generator=generator).tolist())
        request = Request(
            submit=Submit(request_id=str(key), prompt=prompt, sampling=sampling),
            key=key,
            stream_key=key + seed,
            tokens=list(prompt),
        )
        options = TokenOptions.of(sampling, len(prompt))
        request.logits_processor = LogitsProcessor(options) if options is not None else None
        num_prompt_rows = 0 if sampling.num_prompt_logprobs is None else 5
        span_logits = torch.randn(num_prompt_rows + k + 1, VOCAB, generator=generator) * 3
        parents = random_parents(rng, k) if shape == "tree" else chain_parents(k)
        parent_rows = [num_prompt_rows + parent + 1 for parent in parents]
        own = span_logits[parent_rows]
        columns = own if vocab is None else own[:, vocab]
        q = torch.softmax(columns + (0.1 if close else 3.0) * torch.randn(k, width, generator=generator), -1)
        tokens = torch.zeros(k, dtype=torch.long)
        for nodes in children_of(parents):
            if nodes:  # Siblings have one q, and are drawn from it without replacement.
                tokens[nodes] = torch.multinomial(q[nodes[0]], len(nodes), generator=generator)
        token_ids = (tokens if vocab is None else vocab[tokens]).tolist()
        step_spans.append(Span(request, 0, len(prompt), k, True, "plan"))
        is_tree = branches(parents)
        rows.append(DraftRow(tuple(token_ids), q if from_q else None, parents=parents if is_tree else ()))
        logits.append(span_logits)
    return torch.cat(logits), step_spans, Draft(tuple(rows), vocab)


def tokens_of(verdicts: tuple[RowVerdict, ...]) -> list[Any]:
    return [(verdict.token_ids, verdict.num_accepted, verdict.last, verdict.path) for verdict in verdicts]


@settings(max_examples=120, deadline=None)
@given(spans=SPANS, reduced=st.booleans(), seed=st.integers(0, 2**31))
def test_both_implementations_give_equal_verdicts(spans: list[Any], reduced: bool, seed: int) -> None:
    vocab = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:200] if reduced else None
    logits, step_spans, draft = step_of(spans, vocab, seed)
    fast = accept_or_reject(logits.clone(), step_spans, draft, acceptance="together")
    slow = accept_or_reject(logits.clone(), step_spans, draft, acceptance="each")
    assert tokens_of(fast) == tokens_of(slow)
    told = accept_or_reject(logits.clone(), step_spans, draft, acceptance="together", most_likely=logits.argmax(dim=-1))
    assert told == fast, "what the forward found is used only where no option has changed the logits"
    assert [verdict.logprobs for verdict in fast] == [verdict.logprobs for verdict in slow]
    assert [verdict.prompt_logprobs for verdict in fast] == [verdict.prompt_logprobs for verdict in slow]
    for (sampling, *_), verdict in zip(spans, fast, strict=True):
        assert len(verdict.logprobs) == (0 if sampling.num_logprobs is None else len(verdict.token_ids))
        assert len(verdict.prompt_logprobs) == (0 if sampling.num_prompt_logprobs is None else 5)


def test_drafts_are_accepted_recovered_and_extended() -> None:
    """The three outcomes of a drafted span, with a target that is certain of token 1."""
    logits = torch.full((6, 4), -50.0)
    logits[:, 1] = 50.0
    sampling = SamplingParams(temperature=1.0)
    spans, rows = [], []
    for key, drafted in enumerate(((1,), (2, 1), ())):
        request = Request(
            submit=Submit(request_id=str(key), prompt=(0,), sampling=sampling), key=key, stream_key=key, tokens=[0]
        )
        spans.append(Span(request, 0, 1, len(drafted), True, "plan"))
        rows.append(DraftRow(drafted))
    for acceptance in ("together", "each"):
        verdicts = accept_or_reject(logits.clone(), spans, Draft(tuple(rows)), acceptance=acceptance)
        assert tokens_of(verdicts) == [((1, 1), 1, "bonus", ()), ((1,), 0, "recovered", ()), ((1,), 0, "plain", ())]


def test_a_path_goes_through_the_branches_that_the_target_chooses() -> None:
    """The root position has three children, of which the second one has two. The target chooses 1, then 2, then 0."""
    chosen = {0: 1, 2: 2, 4: 0}  # by row
    logits = torch.zeros(6, 4)
    for row, token in chosen.items():
        logits[row, token] = 100.0
    sampling = SamplingParams(temperature=1.0)
    request = Request(submit=Submit(request_id="0", prompt=(0,), sampling=sampling), key=0, stream_key=1, tokens=[0])
    row = DraftRow((3, 1, 3, 2, 0), parents=(-1, -1, 1, 1, -1))
    sampled = SampledSpan(0, Span(request, 0, 1, 5, True, "plan"), row, range(6), request.row_sampling)
    for outcome in (accept_all(logits.clone(), [sampled], None), accept_each(logits.clone(), [sampled], None)):
        assert outcome.path is not None
        assert outcome.path.tolist() == [[1, 3, -1, -1, -1]]
    for acceptance in ("together", "each"):
        (verdict,) = accept_or_reject(
            logits.clone(), [Span(request, 0, 1, 5, True, "plan")], Draft((row,)), acceptance=acceptance
        )
        assert tokens_of((verdict,)) == [((1, 2, 0), 2, "bonus", (1, 3))]
