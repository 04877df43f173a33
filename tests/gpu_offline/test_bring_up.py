"""What a GPU engine does before the first request: settings of the device, lasting draft memory, warm-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from fake_steps import fake_shard
from fakes import ToyModel
from model_shapes import LLAMA_8B

from deployments.cluster.paced_shard import cost_identity
from deployments.cluster.placement import bundles, most_cpus
from deployments.settings import AppSettings
from engine.config import CPU_BLOCK, CUDA_PAGE, EngineConfig
from engine.core.block_pool import BlockPool
from engine.draft.architectures import PlainArchitecture
from engine.draft.proposer import Proposer
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import TargetEndpoint
from engine.errors import ConfigError
from engine.model.device import gpu_name, with_device
from engine.workers.draft_worker import warm_up

SPEC = BufferSpec(max_rows=2, max_k=2, max_request_tokens=8, max_released=2, draft_vocab=16)


class FakeBlock:
    """Device memory that the target exports, in host memory."""

    def __init__(self) -> None:
        self.memory = torch.zeros(SPEC.payload_bytes, dtype=torch.uint8)
        self.device = torch.device("cpu")

    def payload(self) -> Any:
        return FakePayload(self.memory)


class FakePayload:
    """The target's view of a `FakeBlock`."""

    export = object()

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def publish(self) -> None:
        pass

    def acquire(self) -> None:
        pass


def test_a_draft_that_is_lost_comes_back_over_the_same_device_memory() -> None:
    block: Any = FakeBlock()
    endpoint = TargetEndpoint(SPEC, block=block, node_id="n", epoch=1, spin_s=0.0)
    address = endpoint.probs.data_ptr()
    endpoint.close()  # The drafter closes its endpoint when it loses the draft, which may hang and still write.
    renewed = endpoint.renew(epoch=2)
    assert renewed.handle().transport == "cuda_ipc"
    assert renewed.probs.data_ptr() == address
    renewed.close()


def test_auto_takes_the_block_size_of_the_device() -> None:
    config = EngineConfig.parse({"model": "m"})
    assert with_device(config, has_cuda=True).kv_block_size == CUDA_PAGE
    assert with_device(config, has_cuda=False).kv_block_size == CPU_BLOCK
    with pytest.raises(ConfigError, match="block_size"):
        with_device(EngineConfig.parse({"model": "m", "block_size": 16}), has_cuda=True)


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_local_ray_offers_the_cpus_of_all_bundles(device: str, tp: int) -> None:
    """A `--tp 4` replica on GPUs has five bundles of one CPU each."""
    settings = AppSettings.parse({"engine": {"model": "m", "device": device, "tensor_parallel_size": tp}})
    on_cuda = AppSettings.parse({"engine": {"model": "m", "device": "cuda", "tensor_parallel_size": tp}})
    assert most_cpus(settings) >= max(sum(b["CPU"] for b in bundles(some)) for some in (settings, on_cuda))


def test_a_draft_has_drafted_before_its_first_request_and_holds_nothing() -> None:
    toy = ToyModel(vocab_size=16)
    pool = BlockPool(64, toy.block_size, prefix_cache=False)
    model = Proposer(PlainArchitecture(toy.forward), pool, vocab=None, max_model_len=32)
    num_free = pool.num_free
    warm_up(model, 16, 0, torch.float32, torch.device("cpu"))
    assert toy.num_rows >= 2 * 3 + 2  # Two requests of three tokens, then at least one more pass over both.
    assert pool.num_free == num_free


def test_cost_tables_tell_gpus_apart() -> None:
    assert gpu_name(torch.device("cpu")) == ""
    gpus = [("NVIDIA H100 80GB HBM3", 81_559), ("NVIDIA H200", 143_771), ("NVIDIA H100 80GB HBM3", 40_000)]
    names = {
        gpu_name(CUDA, lambda _, name=name, mib=mib: SimpleNamespace(name=name, total_memory=mib << 20))  # type: ignore[misc]
        for name, mib in gpus
    }
    assert len(names) == 3


def test_cost_tables_tell_recorded_forwards_from_eager_ones() -> None:
    with fake_cuda():
        shard = fake_shard(LLAMA_8B)
        object.__setattr__(shard, "device", torch.device("cpu"))
        eager = cost_identity(shard)
        object.__setattr__(shard.config, "cuda_graphs", "on")
        assert cost_identity(shard) == eager | {"graphs": "on"}
