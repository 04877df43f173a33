"""The Speculation board: what K is and why, what it gains, how well the draft is believed, where a step's time goes.

Owns the choice and words of its panels. Queries come from the declarations.
"""

from __future__ import annotations

from dashboards.model import Board, Panel, Row
from dashboards.promql import Scope
from dashboards.queries import gain, switches


def board(scope: Scope) -> Board:
    """The board for these series."""
    return Board(
        uid="paceline-speculation",
        title="Paceline / Speculation",
        description="How far ahead the draft runs, why, and what that gains over not drafting at all.",
        rows=(_gain(scope), _pace(scope), _acceptance(scope), _time(scope)),
        annotations=(switches(scope),),
    )


def _gain(scope: Scope) -> Row:
    numbers = (
        Panel(
            title="Gain over K = 0",
            unit="x",
            description="Realised goodput over the cost model's goodput of the same steps without drafting. Below 1, "
            "speculation costs more than it gives; the policy should then switch it off by itself.",
            queries=(gain(scope),),
            shape="number",
            width=6,
            height=5,
            decimals=2,
            warn_below=1.0,
        ),
        Panel(
            title="Acceptance rate",
            unit="percentunit",
            description="Accepted over verified draft tokens. What is enough depends on the draft's cost: it must "
            "exceed the time of a draft step over that of a target step.",
            queries=(scope.declared("accepted_tokens_total"),),
            shape="number",
            width=6,
            height=5,
            maximum=1,
        ),
        Panel(
            title="Tokens per request and step",
            unit="short",
            description="1 is plain decoding; the most is K + 1.",
            queries=(scope.declared("emitted_tokens_total"),),
            shape="number",
            width=6,
            height=5,
            decimals=2,
        ),
        Panel(
            title="Accepted tokens per draft",
            unit="short",
            description="Mean over drafts, so steps at K = 0 do not count.",
            queries=(scope.declared("accepted_per_draft"),),
            shape="number",
            width=6,
            height=5,
            decimals=2,
        ),
    )
    lines = (
        Panel(
            title="Goodput against K = 0",
            unit="tokens/s",
            description="Decode-only steps: what was realised, what the cost model predicted, and what it predicts "
            "for the same steps at K = 0. Realised under K = 0 for long means that drafting does not pay.",
            queries=(
                scope.declared("realised_tokens_total", "realised"),
                scope.declared("predicted_tokens_total", "predicted"),
                scope.declared("plain_tokens_total", "at K = 0"),
            ),
            width=12,
        ),
        Panel(
            title="Cost-model error",
            unit="percentunit",
            description="Relative error of the predicted duration of single steps. A high median makes the choice of "
            "K a guess: look for another load on the device.",
            queries=(
                scope.declared("cost_error_ratio", "median"),
                scope.quantile(0.9, "cost_error_ratio", legend="p90"),
            ),
            width=6,
        ),
        Panel(
            title="Predicted and realised step time",
            unit="percentunit",
            description="Share of the wall clock that decode-only steps took, as predicted and as it was, and as it "
            "would have been at K = 0.",
            queries=(
                scope.rate("realised_seconds_total", legend="realised"),
                scope.rate("predicted_seconds_total", legend="predicted"),
                scope.rate("plain_seconds_total", legend="at K = 0"),
            ),
            width=6,
        ),
    )
    return Row("What it gains", (*numbers, *lines))


def _pace(scope: Scope) -> Row:
    return Row(
        "K and why",
        (
            Panel(
                title="K in force",
                unit="short",
                description="Mean K over requests and steps, and the plan's upper bound on each replica (0: disabled).",
                queries=(
                    scope.declared("k", "mean K"),
                    scope.declared("plan_max_k", "bound {{replica}}"),
                ),
                decimals=1,
            ),
            Panel(
                title="Why K is what it is",
                unit="ops",
                description="Requests per step and second by the reason of their K: the policy's own choice, batch, "
                "acceptance, memory, the client's cap, catching up, draft down, probe. `memory` or `draft_down` in "
                "quantity is a fault, the others are decisions.",
                queries=(scope.declared("k_reasons_total", "{{reason}}"),),
                shape="stacked",
            ),
            Panel(
                title="K of requests",
                unit="short",
                description="Distribution of K over requests and steps.",
                queries=(scope.buckets("k"),),
                shape="heatmap",
            ),
            Panel(
                title="Switches",
                unit="short",
                description="Times that drafting went on or off, by cause. Many in a minute mean that the policy sits "
                "on its threshold.",
                queries=(scope.declared("switches_total", "{{cause}}"),),
                shape="stacked",
                width=6,
            ),
            Panel(
                title="Probes",
                unit="short",
                description="Looks at whether off is still right. None while drafting is off for long means that it "
                "cannot come back by itself.",
                queries=(scope.declared("probes_total", "probes"),),
                width=6,
            ),
            Panel(
                title="Decoding requests per step",
                unit="short",
                description="The batch, to which the best K falls.",
                queries=(
                    scope.declared("batch_requests", "mean"),
                    scope.quantile(0.95, "batch_requests"),
                ),
                width=6,
            ),
            Panel(
                title="Plan version",
                unit="short",
                description="Rises as the controller refreshes the plan; a flat line on one replica only means that "
                "it does not hear the controller.",
                queries=(scope.declared("plan_version", "{{replica}}"),),
                width=6,
            ),
        ),
    )


def _acceptance(scope: Scope) -> Row:
    by_position = scope.declared("accepted_positions_total", "position {{position}}")
    return Row(
        "Acceptance",
        (
            Panel(
                title="Acceptance by position",
                unit="percentunit",
                description="Accepted over reached draft tokens at each position. Even lines are a good draft; a steep "
                "fall makes a long draft useless.",
                queries=(by_position,),
                maximum=1,
            ),
            Panel(
                title="Acceptance by position, now",
                unit="percentunit",
                description="The same, as bars.",
                queries=(by_position,),
                shape="bars",
                maximum=1,
            ),
            Panel(
                title="Accepted per draft",
                unit="short",
                description="Distribution of accepted tokens over drafts.",
                queries=(scope.buckets("accepted_per_draft"),),
                shape="heatmap",
            ),
            Panel(
                title="Tokens drafted, accepted, emitted",
                unit="tokens/s",
                description="Emitted is accepted plus one token per request and step.",
                queries=(
                    scope.rate("drafted_tokens_total", legend="drafted"),
                    scope.rate("reached_positions_total", legend="reached"),
                    scope.rate("accepted_tokens_total", legend="accepted"),
                    scope.rate("emitted_tokens_total", legend="emitted"),
                ),
                width=12,
            ),
            Panel(
                title="Drafts and verdicts",
                unit="ops",
                description="Verdicts are requests that a step gave a token; drafts are those that were drafted for.",
                queries=(
                    scope.declared("drafts_total", "drafts"),
                    scope.declared("verdicts_total", "verdicts"),
                ),
                width=12,
            ),
        ),
    )


def _time(scope: Scope) -> Row:
    return Row(
        "Where a step's time goes",
        (
            Panel(
                title="Share of time by phase",
                unit="percentunit",
                description="Seconds per second and replica group in schedule, draft, handoff, verify, sample.",
                queries=(scope.declared("phase_seconds", "{{phase}}"),),
                shape="stacked",
            ),
            Panel(
                title="Phase duration",
                unit="s",
                description="Mean duration; draft and handoff count only steps that asked a draft. A handoff above a "
                "millisecond means that the two processes fight for a core.",
                queries=(scope.mean("phase_seconds", "phase", legend="{{phase}}"),),
            ),
            Panel(
                title="Step duration",
                unit="s",
                description="Whole steps, prefill included.",
                queries=(
                    scope.declared("step_seconds", "mean"),
                    scope.quantile(0.5, "step_seconds"),
                    scope.quantile(0.99, "step_seconds"),
                ),
                width=4,
            ),
            Panel(
                title="Steps",
                unit="ops",
                description="Steps of the loop per second; 0 with requests running is a hung engine.",
                queries=(scope.declared("steps_total", "steps"),),
                width=4,
            ),
        ),
    )
