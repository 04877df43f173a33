"""What `paceline bench gpu` says of two ranks on one GPU is wrong where they differ from the whole model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda

from bench.gpu.lab import CheckFailed, Lab
from bench.gpu.planted import SHAPE_DRY, planted_pair, save_model
from bench.gpu.ranks import FP32_BOUND, HostStaged, logit_difference, same_or_near_ties, settings
from engine.workers.bring_up import bring_up_locally
from engine.workers.target_shard import TargetShard

LAB = Lab(torch.device("cpu"), dry=True, until_s=time.monotonic() + 3600)


def test_outputs_may_part_at_near_ties_only() -> None:
    asked: list[Any] = []

    def gap(*at: Any) -> float:
        asked.append(at)
        return 0.1

    expected = {"0": [1, 2, 3], "1": [4, 5, 6]}
    found = {"0": [1, 2, 3], "1": [4, 7, 9]}
    assert same_or_near_ties(expected, found, gap, bound=0.1) == {"same_tokens": 4, "near_ties": 1, "largest_gap": 0.1}
    assert asked == [("1", [4], 5, 7)]
    with pytest.raises(CheckFailed, match=r"request 1 differs at token 1, where the logits are 0\.1 apart"):
        same_or_near_ties(expected, found, gap, bound=0.09)
    with pytest.raises(ValueError, match="shorter"):
        same_or_near_ties(expected, {"0": [1, 2, 3], "1": [4]}, gap, bound=1.0)


class HostOnly:
    """A group of two equal ranks that takes tensors in host memory."""

    rank = 0
    size = 2

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "cpu"
        tensor += tensor

    broadcast = all_reduce

    def gather_logits(self, local: torch.Tensor, columns: list[int]) -> torch.Tensor:
        assert local.device.type == "cpu"
        return torch.cat([local, local], dim=1)[:, : sum(columns)]


def test_sums_of_ranks_on_one_gpu_go_through_the_host_and_back() -> None:
    group: Any = HostOnly()
    with fake_cuda() as recorder:
        staged, tensor = HostStaged(group), torch.ones(3, 4, device=CUDA)
        for operation in (staged.all_reduce, staged.broadcast):
            recorder.uploads = 0
            operation(tensor)
            assert (recorder.uploads, recorder.num_reads) == (1, 1)
            recorder.reads.clear()
        logits = staged.gather_logits(tensor, [4, 3])
        assert logits is not None
        assert logits.device == CUDA
        assert logits.shape == (3, 7)


def test_a_model_with_one_other_weight_is_noticed(tmp_path: Path) -> None:
    target, _ = planted_pair(LAB, shape=SHAPE_DRY)
    shards = []
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        save_model(target, SHAPE_DRY, tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["hidden_size"] == 32
        shards.append(TargetShard(settings(LAB, tmp_path / name, 1), tmp_path / name, rank=0, node_id="n"))
        bring_up_locally(shards[-1:])
        with torch.inference_mode():
            target._weights.layers[2].o.weight[3, 3] += 0.5  # type: ignore[attr-defined]
    assert logit_difference(LAB, shards[0], shards[0])[0] == 0.0
    assert logit_difference(LAB, *shards)[0] > 10 * FP32_BOUND
