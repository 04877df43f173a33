"""`paceline bench experts --dry-run` measures both models in whole engines and reports them side by side."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from bench.gpu.experts import SHAPES, K, experts
from bench.gpu.lab import Lab
from bench.gpu.planted import planted_pair
from engine.model.layers import Experts, GatedMlp


def test_both_models_are_measured_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    assert experts(argparse.Namespace(dry_run=True, streams=[1, 3], rounds=1, scale=0.05, out=out)) == 0
    rows = json.loads(out.read_text())
    assert [(row["model"], row["streams"]) for row in rows] == [(name, count) for name in SHAPES for count in (1, 3)]
    for row in rows:
        assert 0 < row["acceptance"] <= 1
        assert 0 <= row["K of goodput"] <= K
        assert min(row[f"fixed {K} / off"], row["goodput / off"], row["goodput / best fixed"]) > 0


def test_the_target_has_experts_and_its_draft_has_none() -> None:
    lab = Lab(torch.device("cpu"), True, time.monotonic())
    target, draft = planted_pair(lab, shape=SHAPES["experts"][1])
    assert [type(layer.mlp) for layer in target._weights.layers] == [GatedMlp, Experts, Experts]
    assert [type(layer.mlp) for layer in draft._weights.layers] == [GatedMlp]


def test_measured_shapes_compute_as_much_for_each_token() -> None:
    (dense, _), (sparse, _) = SHAPES.values()
    assert dense["intermediate_size"] == sparse["num_experts_per_tok"] * sparse["moe_intermediate_size"]
