"""The statistics of a step, counted by hand."""

from __future__ import annotations

from engine.core.drafter import NoDrafter
from engine.core.request import Request
from engine.core.stats import RowOutcome, step_stats
from engine.core.step import Batch, Draft, DraftRow, RowVerdict, Span, Verdict
from engine.messages import Delta, SamplingParams, Submit


def request(key: int, num_tokens: int, *, temperature: float = 1.0) -> Request:
    submit = Submit(request_id=f"r{key}", prompt=(1, 2), sampling=SamplingParams(temperature=temperature))
    return Request(submit=submit, key=key, stream_key=0, tokens=[1] * num_tokens)


def test_every_count_of_a_step() -> None:
    rejected, complete, plain, prompt = (request(key, 10 * key) for key in (1, 2, 3, 4))
    complete.finish_reason, complete.num_accepted, complete.num_draft_steps = "stop", 5, 2
    plain.finish_reason = "length"
    spans = (
        Span(rejected, 9, 1, 4, True, "plan", None, 0.5),
        Span(complete, 19, 1, 2, True, "plan"),
        Span(plain, 29, 1, 0, True, "memory"),
        Span(prompt, 8, 6, 0, False, "plan"),
    )
    rows = (
        DraftRow((5, 6, 7), None, (0.9, 0.8, 0.7), "plan"),
        DraftRow((5, 6), None, (), "probe", "lookup", 4),
        DraftRow(reason="memory"),
        DraftRow(),
    )
    verdict = Verdict(
        (
            RowVerdict((5, 1), 1, "recovered"),
            RowVerdict((5, 6, 1), 2, "bonus"),
            RowVerdict((1,), 0, "plain"),
            RowVerdict(),
        ),
        verify_s=0.3,
        sample_s=0.4,
    )
    deltas = [Delta(request_id="r", token_ids=tokens) for tokens in ((5, 1), (5, 6, 1), (1,))]
    draft = Draft(rows, None, 0.1, 0.2, 6)
    stats = step_stats(Batch(7, spans, 3), draft, verdict, deltas, aborted=(99,), schedule_s=0.5, step_s=0.6)
    assert (stats.step_id, stats.num_waiting, stats.num_decodes, stats.num_prefill_tokens) == (7, 3, 3, 6)
    assert stats.num_rows == 3 + 6 + 5
    assert stats.context_len == 9 + 19 + 29 + 8
    assert (stats.num_drafted, stats.num_accepted, stats.num_emitted, stats.depth) == (5, 3, 6, 3)
    assert stats.drafted_by_position == (2, 2, 0), "the third token of the first draft was not reached"
    assert stats.accepted_by_position == (2, 1, 0)
    assert stats.k_by_reason == {"plan": 1, "probe": 1, "memory": 1}
    assert stats.outcomes == (
        RowOutcome(1, 3, 1, 10, "hot", 4, (0.9, 0.8, 0.7), "method", 0),
        RowOutcome(2, 2, 2, 20, "hot", 0, (), "lookup", 4),
    )
    assert stats.ended == (99, 2, 3)
    assert stats.accepted_per_finished == (2.5,), "a request without drafts has no mean"
    assert stats.num_caught_up == 6
    assert (stats.draft_s, stats.handoff_s, stats.verify_s, stats.sample_s) == (0.1, 0.2, 0.3, 0.4)
    assert (stats.schedule_s, stats.step_s) == (0.5, 0.6)


def test_a_step_without_drafts_has_no_positions_and_no_seconds_of_a_draft() -> None:
    only = request(1, 3)
    batch = Batch(1, (Span(only, 2, 1, 0, True, "off"),), 0)
    verdict = Verdict((RowVerdict((4,), 0, "plain"),))
    stats = step_stats(batch, NoDrafter().draft(batch), verdict, [], schedule_s=0.0, step_s=0.0)
    assert (stats.draft_s, stats.handoff_s, stats.num_caught_up, stats.verify_s, stats.sample_s) == (0, 0, 0, 0, 0)
    assert (stats.depth, stats.drafted_by_position, stats.outcomes, stats.num_drafted) == (0, (), (), 0)
    assert stats.k_by_reason == {"off": 1}
    assert stats.ended == ()


def test_a_workload_is_named_by_temperature_and_grammar() -> None:
    assert [SamplingParams(temperature=t).workload for t in (0.0, 0.1, 0.8, 0.81)] == ["greedy", "cool", "cool", "hot"]


def test_an_outcome_is_of_a_greedy_request_and_its_method_unless_it_says_otherwise() -> None:
    assert RowOutcome(1, 2, 1, 10) == RowOutcome(1, 2, 1, 10, "greedy", 0, (), "method", 0)


def test_a_tree_is_counted_by_depth_and_its_nodes_by_path() -> None:
    """Nodes 0 and 1 under the root position, 2 and 3 under 0, 4 under 3. The path 0, 3 is accepted, 4 rejected."""
    tree = request(1, 12)
    row = DraftRow((5, 6, 7, 8, 9), None, (0.9, 0.1, 0.5, 0.3, 0.2), parents=(-1, -1, 0, 0, 3))
    verdict = Verdict((RowVerdict((5, 8, 1), 2, "recovered", path=(0, 3)),))
    batch = Batch(1, (Span(tree, 9, 1, 5, True, "plan"),), 0)
    stats = step_stats(batch, Draft((row,)), verdict, [], schedule_s=0, step_s=0)
    assert (stats.num_drafted, stats.num_accepted, stats.depth) == (5, 2, 3)
    assert (stats.drafted_by_position, stats.accepted_by_position) == ((1, 1, 1), (1, 1, 0))
    (outcome,) = stats.outcomes
    assert (outcome.num_levels, outcome.left_first_path) == (3, True)
    assert (list(outcome.reached_nodes), list(outcome.accepted_nodes)) == ([0, 1, 4], [0, 3])


def test_a_path_without_children_reaches_no_further_depth() -> None:
    row = DraftRow((5, 6, 7), parents=(-1, -1, 0))
    verdict = Verdict((RowVerdict((6, 1), 1, "bonus", path=(1,)),))
    batch = Batch(1, (Span(request(1, 12), 9, 1, 3, True, "plan"),), 0)
    stats = step_stats(batch, Draft((row,)), verdict, [], schedule_s=0, step_s=0)
    assert (stats.drafted_by_position, stats.accepted_by_position) == ((1, 0), (1, 0))


def test_a_chain_reaches_what_follows_its_accepted_tokens() -> None:
    for drafted, accepted, reached in ((3, 0, 1), (3, 2, 3), (3, 3, 3)):
        outcome = RowOutcome(1, drafted, accepted, 10)
        assert (outcome.reached_nodes, outcome.accepted_nodes) == (range(reached), range(accepted))
        assert (outcome.num_levels, outcome.left_first_path) == (drafted, False)
