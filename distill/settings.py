"""Settings of a training run: the weights of the objective and the parameters of the trainer.

Owns values only, no torch, so that the command line can show their defaults without loading it. `losses` and `trainer`
use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import ConfigError

NUM_HEADS = 5
"""Medusa heads of a draft whose options name no number."""


def check_architecture(
    architecture: str, *, heads: int | None, parallel: int | None, mask_only: bool = False, int8: bool
) -> None:
    """Check options that only some architectures have.

    Raises:
        ConfigError: names the option and what is allowed.
    """
    if architecture in ("eagle3", "medusa") and int8:
        raise ConfigError(
            f"int8: the public layout of {architecture} drafts has bfloat16 matrices only; leave --int8 out"
        )
    for name, value, owner in (("parallel", parallel, "eagle"), ("heads", heads, "medusa")):
        if value is not None and (architecture != owner or value < 2):
            raise ConfigError(
                f"{name}: {value} given with --architecture {architecture}; "
                f"allowed are numbers from 2, with {owner} only"
            )
    if mask_only and parallel is None:
        raise ConfigError("mask_only: given without --parallel, whose drafts alone have a mask")


def trained_steps(architecture: str, *, heads: int | None, parallel: int | None, unroll: int) -> int:
    """Drafted positions that are trained."""
    if architecture == "medusa":
        return heads or NUM_HEADS
    return 1 if architecture == "draft_model" else parallel or unroll


@dataclass(frozen=True)
class Objective:
    """Weights of the parts of the loss."""

    kl_weight: float = 1.0
    ce_weight: float = 0.2
    """Weight of the cross-entropy to the target's most likely token, which decides greedy acceptance."""
    temperature: float = 1.0
    """Temperature of the target's distribution in the KL part."""
    feature_weight: float = 0.0
    """Weight of the regression of features, for drafts that replace the target's features (Li et al. 2024, EAGLE)."""
    step_decay: float = 0.8
    """Loss weight of unrolled step s is step_decay ** s (Li et al. 2025, EAGLE-3)."""


@dataclass(frozen=True)
class TrainConfig:
    """Parameters of one training run. All are stored in the checkpoint."""

    steps: int = 3
    """Number of unrolled chain steps."""
    chain_every: int = 6
    """Later steps are unrolled from every n-th position only, at another offset per batch, with n-fold weight."""
    row_len: int = 1024
    batch_tokens: int = 1536
    lr: float = 1e-3
    head_lr_scale: float = 0.5
    muon: bool = True
    """Whether matrices are trained with Muon (Jordan et al. 2024). Otherwise, and for head and norms always, AdamW."""
    muon_lr: float = 0.02
    weight_decay: float = 0.05
    warmup: float = 0.03
    """Fraction of the budget for the warm-up. After it the rate falls as a cosine to a twentieth."""
    constant: bool = False
    """Whether the rate is constant after the warm-up, for runs whose data and budget still grow."""
    cooldown_s: float = 0.0
    """Seconds at the end of `time_s` over which the rate falls linearly to zero."""
    average: float = 0.998
    """Decay of the running average of the weights, which a run leaves when it ends; 0 for no average."""
    budget_tokens: int = 2_000_000
    """Number of token positions to train on; repeated passes count again."""
    time_s: float | None = None
    """Seconds after which the run stops before its schedule ends; a resumed run continues the schedule."""
    prompt_weight: float = 0.4
    """Loss weight of positions whose token the target did not generate."""
    feature_noise: float = 0.0
    """Uniform noise of this relative size on features (Li et al. 2024, EAGLE)."""
    seed: int = 0
    checkpoint_s: float = 120.0
    objective: Objective = field(default_factory=Objective)
