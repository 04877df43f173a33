"""The row of the Speculation board on a draft that learns from live traffic.

Owns the choice and text of its panels. They are empty where no draft is adapted.
"""

from __future__ import annotations

from dashboards.model import Panel, Row
from dashboards.promql import Scope


def adaptation(scope: Scope) -> Row:
    """The row for these series."""
    return Row(
        "Online adaptation of the draft",
        (
            Panel(
                title="Held-out acceptance",
                unit="short",
                description="Tokens per verify step on requests that were not trained on: with the weights that serve, "
                "and with those in training. The second above the first for long means that swaps fail; see the log.",
                queries=(scope.declared("draft_adaptation_held_out_tokens_per_step", "{{weights}} {{replica}}"),),
                decimals=2,
            ),
            Panel(
                title="Live acceptance, first token",
                unit="percentunit",
                description="Share of first drafted tokens that live requests accepted with the weights that serve. A "
                "fall after a swap beyond chance takes the weights back.",
                queries=(scope.declared("draft_adaptation_live_acceptance_ratio", "{{replica}}"),),
                maximum=1,
            ),
            Panel(
                title="Swaps and rollbacks",
                unit="short",
                description="Times that better weights came in, and that they were taken back. Rollbacks after most "
                "swaps mean that the traffic changes faster than the draft learns.",
                queries=(
                    scope.declared("draft_adaptation_swaps_total", "swaps"),
                    scope.declared("draft_adaptation_rollbacks_total", "rollbacks"),
                ),
            ),
            Panel(
                title="Trainer's CPU time",
                unit="percentunit",
                description="CPUs that the trainer takes, at most the configured share. It is 0 while requests run "
                "without a pause: then the draft does not learn.",
                queries=(scope.declared("draft_adaptation_cpu_seconds_total", "CPUs"),),
                width=6,
            ),
            Panel(
                title="Positions trained on",
                unit="tokens/s",
                description="Generated positions per second that the draft is trained on.",
                queries=(scope.declared("draft_adaptation_tokens_total", "positions"),),
                width=6,
            ),
            Panel(
                title="Training steps and requests",
                unit="ops",
                description="Steps of the trainer, and requests or parts of them that reached it. No requests while "
                "there is traffic means that no listed key sends any.",
                queries=(
                    scope.declared("draft_adaptation_steps_total", "steps"),
                    scope.declared("draft_adaptation_documents_total", "requests"),
                ),
                width=6,
            ),
            Panel(
                title="Requests kept to learn from",
                unit="bytes",
                description="Memory of the requests in the trainer's buffer, bounded by the settings.",
                queries=(scope.declared("draft_adaptation_buffer_bytes", "{{replica}}"),),
                width=6,
            ),
        ),
    )
