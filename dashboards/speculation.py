"""The Speculation board: K and its reasons, the gain, acceptance, and the time of a step by phase.

Owns the choice and text of its panels. Queries come from the declarations.
"""

from __future__ import annotations

from dashboards.adaptation import adaptation
from dashboards.model import Board, Panel, Row
from dashboards.promql import Scope
from dashboards.queries import gain, switches


def board(scope: Scope) -> Board:
    """The board for these series."""
    return Board(
        uid="paceline-speculation",
        title="Paceline / Speculation",
        description="K, its reasons, and the gain over decoding without drafts.",
        rows=(_gain(scope), _pace(scope), _acceptance(scope), _time(scope), adaptation(scope)),
        annotations=(switches(scope),),
    )


def _gain(scope: Scope) -> Row:
    numbers = (
        Panel(
            title="Gain over K = 0",
            unit="x",
            description="Realised goodput over the cost model's goodput of the same steps without drafting. Below 1, "
            "speculation costs more than it gains; the policy should then switch it off.",
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
            description="Accepted over verified draft tokens. Drafting pays where it exceeds the time of a draft "
            "pass over the time of a target step.",
            queries=(scope.declared("accepted_tokens_total"),),
            shape="number",
            width=6,
            height=5,
            maximum=1,
        ),
        Panel(
            title="Tokens per request and step",
            unit="short",
            description="1 is decoding without drafts; the largest value is K + 1.",
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
            description="Steps without prompts: realised goodput, predicted goodput, and the goodput predicted for "
            "the same steps at K = 0. Realised goodput below that of K = 0 for long means that drafting does not pay.",
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
            description="Relative error of the predicted duration of single steps. With a high median K is "
            "chosen by wrong costs: look for another load on the device.",
            queries=(
                scope.declared("cost_error_ratio", "median"),
                scope.quantile(0.9, "cost_error_ratio", legend="p90"),
            ),
            width=6,
        ),
        Panel(
            title="Predicted and realised step time",
            unit="percentunit",
            description="Share of wall-clock time taken by steps without prompts: realised, predicted, and predicted "
            "at K = 0.",
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
                title="Reasons of K",
                unit="ops",
                description="Requests per step and second by the reason of their K: the policy's choice, batch, "
                "acceptance, memory, the limit of the client, catching up, draft down, probe. Many `memory` or "
                "`draft_down` are a fault; the others are decisions.",
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
                description="Changes between drafting and not drafting, by cause. Many per minute mean that the gain "
                "is close to the threshold.",
                queries=(scope.declared("switches_total", "{{cause}}"),),
                shape="stacked",
                width=6,
            ),
            Panel(
                title="Probes",
                unit="short",
                description="Drafts for a few steps while drafting is off, to measure acceptance again. Without probes "
                "drafting cannot be switched on again.",
                queries=(scope.declared("probes_total", "probes"),),
                width=6,
            ),
            Panel(
                title="Decoding requests per step",
                unit="short",
                description="Size of the batch. The best K falls with it.",
                queries=(
                    scope.declared("batch_requests", "mean"),
                    scope.quantile(0.95, "batch_requests"),
                ),
                width=6,
            ),
            Panel(
                title="Plan version",
                unit="short",
                description="Rises with every change of the plan. One replica below the others does not reach the "
                "controller.",
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
                description="Accepted over reached draft tokens at each position. A steep fall over the positions "
                "means that long drafts do not pay.",
                queries=(by_position,),
                maximum=1,
            ),
            Panel(
                title="Acceptance by position, now",
                unit="percentunit",
                description="Current acceptance rate at each position.",
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
                description="Verdicts count requests that got a token in a step; drafts count those among them that "
                "had a draft.",
                queries=(
                    scope.declared("drafts_total", "drafts"),
                    scope.declared("verdicts_total", "verdicts"),
                ),
                width=12,
            ),
            Panel(
                title="Depth of drafts",
                unit="short",
                description="Mean number of tokens on the longest path of a draft. In a chain these are all tokens.",
                queries=(scope.declared("drafted_levels_total", "depth"),),
                width=12,
            ),
            Panel(
                title="Branches taken",
                unit="percentunit",
                description="Share of drafts whose accepted path takes a branch. Chains have none.",
                queries=(scope.declared("branches_taken_total", "branch taken"),),
                maximum=1,
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
                description="Seconds per second spent in schedule, draft, handoff, verify and sample.",
                queries=(scope.declared("phase_seconds", "{{phase}}"),),
                shape="stacked",
            ),
            Panel(
                title="Phase duration",
                unit="s",
                description="Mean duration; draft and handoff count only steps with a draft request. A handoff above "
                "a millisecond means that the two processes compete for a core.",
                queries=(scope.mean("phase_seconds", "phase", legend="{{phase}}"),),
            ),
            Panel(
                title="Step duration",
                unit="s",
                description="Duration of whole steps, prefill included.",
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
                description="Steps of the loop per second; 0 while requests are running means that the engine hangs.",
                queries=(scope.declared("steps_total", "steps"),),
                width=4,
            ),
        ),
    )
