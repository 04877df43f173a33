"""What a training run is told: the objective's weights and the trainer's settings.

Values only, no torch, so that the command line can show their defaults at once. What they do is in `losses` and
`trainer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Objective:
    """Weights of the parts of the loss."""

    kl_weight: float = 1.0
    ce_weight: float = 0.2
    """Cross-entropy to the target's likeliest token: what greedy acceptance asks for."""
    temperature: float = 1.0
    """Of the target's law in the KL part."""
    feature_weight: float = 0.0
    """Feature regression, for drafts that stand in for the target's features (Li et al. 2024, EAGLE)."""
    step_decay: float = 0.8
    """Loss weight of unrolled step s is step_decay ** s (Li et al. 2025, EAGLE-3)."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run; all of it is stored with the checkpoint."""

    steps: int = 3
    """Chain steps unrolled."""
    chain_every: int = 6
    """Steps after the first are unrolled from each n-th position only (another offset per batch), weighted n-fold."""
    row_len: int = 1024
    batch_tokens: int = 1536
    lr: float = 1e-3
    head_lr_scale: float = 0.5
    muon: bool = True
    """Muon for the matrices (Jordan et al. 2024); AdamW otherwise, and always for the head and the norms."""
    muon_lr: float = 0.02
    weight_decay: float = 0.05
    warmup: float = 0.03
    """Fraction of the budget; after it the rate falls as a cosine to a twentieth."""
    constant: bool = False
    """Hold the rate after the warm-up instead: for runs whose data and budget still grow."""
    cooldown_s: float = 0.0
    """With `time_s`: the rate falls linearly to nothing over the last seconds."""
    average: float = 0.998
    """Decay of the running average of the weights, which is what a finished or stopped run leaves; 0 is none."""
    budget_tokens: int = 2_000_000
    """Token positions read, counted once per pass."""
    time_s: float | None = None
    """Stop by then, schedule unfinished; resuming continues it."""
    prompt_weight: float = 0.4
    """Loss weight of positions the target did not write."""
    feature_noise: float = 0.0
    """Uniform noise of this relative size on features (Li et al. 2024, EAGLE)."""
    seed: int = 0
    checkpoint_s: float = 120.0
    objective: Objective = field(default_factory=Objective)
