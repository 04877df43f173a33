"""What a choice, a plan and a prediction mean where nothing is said, and the classes of match lengths."""

from __future__ import annotations

from engine.core.pacing import MAX_MATCH_LEN, NUM_MATCH_CLASSES, KChoice, Prediction, SpeculationPlan, match_class


def test_a_choice_cuts_no_draft_unless_it_says_so() -> None:
    assert KChoice(3, "plan") == KChoice(
        3, "plan", k_by_match=None, exit_threshold=0.0, least_acceptance=0.0, node_price=0.0
    )


def test_a_plan_without_a_controller() -> None:
    assert SpeculationPlan() == SpeculationPlan(
        version=0, policy="goodput", max_k=5, max_batch=16, enabled=True, priors=()
    )
    assert Prediction() == Prediction(
        seconds=0.0, plain_s=0.0, expected_tokens=0.0, expected_s=0.0, switched=None, probed=False
    )


def test_matches_of_three_five_and_eight_tokens_begin_a_class() -> None:
    assert [match_class(length) for length in (0, 2, 3, 4, 5, 7, 8, 99)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (NUM_MATCH_CLASSES, MAX_MATCH_LEN) == (4, 8)
