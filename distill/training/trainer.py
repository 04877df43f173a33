"""The training loop: batches in, checkpoints and a JSONL file of curves out. It can be resumed at any time.

Owns optimiser, schedule, budget and checkpoint. Knows a draft only by `unroll(batch, steps)` and its parameters.
Weights compute in `compute_dtype` from float32 master weights (bfloat16 is 2-3 times faster on CPUs that support it).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distill.data.shards import Batch, batches
from distill.models.layers import Chains, VocabularyMap
from distill.settings import TrainConfig
from distill.training.losses import head_loss, soft_targets


class Draft(Protocol):
    """The interface of a draft for training and evaluation."""

    vocabulary: VocabularyMap
    head: nn.Linear

    def unroll(self, batch: Batch, steps: int, first_root: int = 0, every: int = 1) -> Chains:
        """Final hidden states by chain step; see `EagleDraft.unroll`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `nn.Module`."""


@dataclass(frozen=True)
class Progress:
    """One line of the curves: means since the last line."""

    tokens: int
    seconds: float
    loss: float
    """Cross-entropy part per position of step 0, nats (soft targets of mass <= 1 + ce_weight)."""
    hits: tuple[float, ...]
    """Share of generated positions at which the draft's best token is the target's best, by chain step."""
    lr: float
    tokens_per_s: float


@dataclass(frozen=True)
class Scored:
    """The n positions of one chain step that have weight, flattened."""

    hidden: Tensor
    """[n, H] final hidden states."""
    rows: Tensor
    """[n, M] draft rows of the distribution to imitate; see `soft_targets`."""
    weights: Tensor
    """[n, M] weights of the rows; see `soft_targets`."""
    weight: Tensor
    """[n] loss weight of the position."""
    best: Tensor
    """[n] the target's best token."""


def step_loss(
    draft: Draft, batch: Batch, config: TrainConfig, offset: int = 0
) -> tuple[Tensor, list[float], list[float], float]:
    """Mean loss of a batch, summed loss and hits per step, and total weight of the positions at step 0.

    Later chain steps start from positions `offset`, `offset + chain_every`, ...
    """
    count = max(float(batch.weight[:, 1:].sum()), 1.0)
    every = config.chain_every
    chains = draft.unroll(batch, config.steps, offset, every)
    if not chains.hidden or batch.tokens.shape[1] < 2:
        raise ValueError("batch: rows of one token have nothing to learn from")
    scored: list[Scored] = []
    errors = torch.zeros((), device=batch.weight.device)
    for step, hidden in enumerate(chains.hidden):
        # At step s root t is compared with the target's distribution at t + 1 + s.
        at = slice(step + 1 + offset, None, every) if step else slice(1, None)
        scored.append(_score(draft, batch, hidden, at, every if step else 1, config))
        if config.objective.feature_weight and chains.feature_errors:
            input_weight = batch.weight[:, step + 1 + offset :: every] * every
            errors = errors + config.objective.step_decay**step * (chains.feature_errors[step] * input_weight).sum()
    decays = [config.objective.step_decay**step for step in range(len(scored))]
    scale = torch.cat([part.weight * decay for part, decay in zip(scored, decays, strict=True)])
    hidden, rows, weights = (torch.cat([getattr(p, name) for p in scored]) for name in ("hidden", "rows", "weights"))
    loss, best, each = head_loss(hidden, draft.head.weight, rows, weights, scale)
    losses, hits, start = [], [], 0
    for part in scored:
        at = slice(start, start + len(part.weight))
        losses.append(float((each[at] * part.weight).sum()))
        hits.append(float(((draft.vocabulary.draft_vocab[best[at]] == part.best) * part.weight).sum()))
        start = at.stop
    return (loss + config.objective.feature_weight * errors) / count, losses, hits, count


def _score(draft: Draft, batch: Batch, hidden: Tensor, at: slice, fold: int, config: TrainConfig) -> Scored:
    """Hidden states [R, roots, H] with the distributions at positions `at`. Each counts `fold` times."""
    ids, logprobs = batch.top_ids[:, at].flatten(0, 1), batch.top_logprobs[:, at].flatten(0, 1)
    weight = batch.weight[:, at].flatten() * fold
    used = weight.nonzero()[:, 0]
    rows, weights = soft_targets(ids[used], logprobs[used], draft.vocabulary.to_draft, config.objective)
    return Scored(hidden.flatten(0, 1)[used], rows, weights, weight[used], ids[used, 0])


class Masters:
    """Float32 master weights and their optimisers, for a model that computes in a lower precision."""

    def __init__(self, draft: nn.Module, config: TrainConfig) -> None:
        self.live = [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.live}
        self.average = {name: value.detach().clone() for name, value in self.masters.items()}
        self.decay, self.num_steps = config.average, 0
        matrices = {n for n, p in self.live if p.ndim == 2 and "head" not in n and "norm" not in n}
        head = {n for n, _ in self.live if "head" in n}
        groups = [
            {"params": [self.masters[n] for n in sorted(head)], "lr": config.lr * config.head_lr_scale},
            {
                "params": [m for n, m in self.masters.items() if n not in matrices | head],
                "lr": config.lr,
                "weight_decay": 0.0,
            },
        ]
        body = [self.masters[n] for n in sorted(matrices)]
        self.optimizers: list[torch.optim.Optimizer] = []
        if config.muon:
            self.optimizers.append(torch.optim.Muon(body, lr=config.muon_lr, weight_decay=config.weight_decay))
        else:
            groups.append({"params": body, "lr": config.lr})
        self.optimizers.append(
            torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
        )
        self.base = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def step(self, scale: float, clip: float = 1.0) -> None:
        """One update at `scale` times the base rates; gradients are clipped to norm `clip` and cleared."""
        for name, live in self.live:
            self.masters[name].grad = None if live.grad is None else live.grad.float()
            live.grad = None
        torch.nn.utils.clip_grad_norm_([m for m in self.masters.values() if m.grad is not None], clip)
        for optimizer, rates in zip(self.optimizers, self.base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            optimizer.step()
        self.num_steps += 1
        share = 1 - min(self.decay, self.num_steps / (self.num_steps + 9)) if self.decay else 1.0
        with torch.no_grad():
            for name, value in self.masters.items():
                self.average[name].lerp_(value, share)
        self.publish(self.masters)

    @torch.no_grad()
    def publish(self, values: Mapping[str, Tensor]) -> None:
        """Copy the master weights or their average into the computing weights."""
        for name, live in self.live:
            live.copy_(values[name])

    def state(self) -> dict[str, Any]:
        """State for resuming."""
        return {
            "masters": {name: value.detach() for name, value in self.masters.items()},
            "average": self.average,
            "num_steps": self.num_steps,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        for name, value in state["masters"].items():
            self.masters[name].copy_(value)
            self.average[name].copy_(state["average"][name])
        self.num_steps = state["num_steps"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.publish(self.masters)


def rate(fraction: float, warmup: float, *, constant: bool = False) -> float:
    """Linear warm-up, then a cosine from 1 to 0.05 (or 1), at `fraction` of the budget."""
    if fraction < warmup:
        return (fraction + 1e-3) / warmup
    if constant:
        return 1.0
    along = min((fraction - warmup) / (1 - warmup), 1.0)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * along))


def train(
    draft: nn.Module,
    folders: Sequence[Path],
    out: Path,
    config: TrainConfig,
    *,
    skip: frozenset[str] = frozenset(),
    compute_dtype: torch.dtype = torch.bfloat16,
    report: Callable[[Progress], None] | None = None,
    report_tokens: int = 50_000,
) -> None:
    """Train until the token or time budget is spent; continues from `out/checkpoint.pt` if there is one.

    Writes `checkpoint.pt` (master weights, optimiser, position in the data) and appends to `curves.jsonl` in `out`.
    Leaves the averaged weights in `draft`.
    """
    out.mkdir(parents=True, exist_ok=True)
    masters = Masters(draft, config)
    draft.to(compute_dtype)
    tokens, start, earlier_s = _resume(out, masters)
    device = next(draft.parameters()).device
    noise = torch.Generator().manual_seed(config.seed + tokens)
    began = saved = time.monotonic()
    meter = Meter(tokens)
    source = batches(
        folders,
        row_len=config.row_len,
        batch_tokens=config.batch_tokens,
        seed=config.seed,
        prompt_weight=config.prompt_weight,
        start=start,
        skip=skip,
    )
    for done, batch in source:
        elapsed = time.monotonic() - began
        if tokens >= config.budget_tokens or (config.time_s is not None and elapsed > config.time_s):
            break
        offset = int(torch.randint(config.chain_every, (), generator=noise))
        loss, losses, hits, count = step_loss(draft, _noisy(batch, config, noise).to(device), config, offset)  # type: ignore[arg-type]
        loss.backward()  # type: ignore[no-untyped-call]
        scale = rate(tokens / config.budget_tokens, config.warmup, constant=config.constant)
        if config.time_s is not None and config.cooldown_s:
            scale *= min(max((config.time_s - elapsed) / config.cooldown_s, 0.01), 1.0)
        masters.step(scale)
        tokens += int((batch.weight > 0).sum())
        meter.add(losses, hits, count)
        if tokens - meter.since >= report_tokens or tokens >= config.budget_tokens:
            line = meter.line(tokens, earlier_s + elapsed, scale * config.lr)
            with (out / "curves.jsonl").open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
            if report is not None:
                report(line)
        if time.monotonic() - saved > config.checkpoint_s:
            saved = time.monotonic()
            _save(out, masters, tokens, done, earlier_s + elapsed, config)
    _save(out, masters, tokens, done, earlier_s + time.monotonic() - began, config)
    masters.publish(masters.average)


class Meter:
    """Means between two lines of the curves."""

    def __init__(self, tokens: int) -> None:
        self.since, self._clock = tokens, time.monotonic()
        self._losses: list[float] = []
        self._hits: list[float] = []
        self._count = 0.0

    def add(self, losses: list[float], hits: list[float], count: float) -> None:
        """Add the sums of one batch."""
        if not self._losses:
            self._losses, self._hits = [0.0] * len(losses), [0.0] * len(hits)
        self._losses = [a + b for a, b in zip(self._losses, losses, strict=False)]
        self._hits = [a + b for a, b in zip(self._hits, hits, strict=False)]
        self._count += count

    def line(self, tokens: int, seconds: float, lr: float) -> Progress:
        """Return the means and reset the sums."""
        now = time.monotonic()
        speed = (tokens - self.since) / (now - self._clock)
        hits = tuple(round(hit / self._count, 4) for hit in self._hits)
        line = Progress(tokens, round(seconds, 1), round(self._losses[0] / self._count, 4), hits, lr, round(speed, 1))
        self.since, self._clock, self._losses, self._hits, self._count = tokens, now, [], [], 0.0
        return line


def _noisy(batch: Batch, config: TrainConfig, rng: torch.Generator) -> Batch:
    if not config.feature_noise:
        return batch
    scale = batch.features.float().square().mean(-1, keepdim=True).sqrt() * config.feature_noise
    noise = (torch.rand(batch.features.shape, generator=rng) - 0.5) * 2 * scale
    return Batch(
        batch.tokens, (batch.features + noise).to(batch.features.dtype), batch.top_ids, batch.top_logprobs, batch.weight
    )


def _save(out: Path, masters: Masters, tokens: int, done: int, seconds: float, config: TrainConfig) -> None:
    state = {**masters.state(), "tokens": tokens, "done": done, "seconds": seconds, "config": asdict(config)}
    torch.save(state, out / "checkpoint.partial")
    os.replace(out / "checkpoint.partial", out / "checkpoint.pt")


def _resume(out: Path, masters: Masters) -> tuple[int, int, float]:
    path = out / "checkpoint.pt"
    if not path.exists():
        return 0, 0, 0.0
    state = torch.load(path, weights_only=True)
    masters.restore(state)
    return state["tokens"], state["done"], state["seconds"]
