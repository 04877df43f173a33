"""Plans: the arithmetic by hand, on shapes whose parameter counts are published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from autoscale.simulation import planning
from autoscale.simulation.gpus import GPUS, Cluster, parse_gpus
from autoscale.simulation.planning import Plan, Traffic, plan_cpu, plan_gpus
from autoscale.simulation.shapes import SHAPES, draft_forward, eagle_of, shape_of, target_forward
from engine.checkpoint.draft_check import fit_medusa
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.workers.memory_plan import GIB, weight_bytes

TRAFFIC = Traffic(streams=(1, 8, 64), context_len=1000, acceptance=0.6)


def settings(**changed: Any) -> EngineConfig:
    return EngineConfig.parse({"model": "m", "device": "cuda", "speculative": {"method": "none"}, **changed})


def of_70b(**changed: Any) -> Plan:
    draft = shape_of("llama-3.2-1b")
    engine = settings(speculative={"draft": "d", "k": 5}, **changed)
    return plan_gpus(engine, shape_of("llama-3.1-70b"), draft, Cluster(GPUS["h100"], 4), TRAFFIC)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_named_shapes_have_the_published_number_of_weights(name: str, num_parameters: int) -> None:
    assert weight_bytes(shape_of(name), WHOLE, torch.bfloat16) == 2 * num_parameters


def test_every_named_shape_has_its_count_above() -> None:
    assert len(SHAPES) == 8


def test_a_forward_reads_all_weights_but_an_untied_embedding() -> None:
    large, tied = shape_of("llama-3.1-8b"), shape_of("llama-3.2-1b")
    assert target_forward(large, WHOLE).read_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert target_forward(tied, WHOLE).read_bytes == 2 * 1_235_814_400
    assert target_forward(tied, WHOLE).flops_per_row == 2 * 1_235_814_400
    assert draft_forward(tied) == target_forward(tied, WHOLE)
    quarter = target_forward(large, ShardSpec(0, 4)).read_bytes
    assert quarter == pytest.approx(target_forward(large, WHOLE).read_bytes / 4, rel=1e-3)


def test_a_pass_of_an_eagle_draft_reads_one_layer_its_head_and_two_projections() -> None:
    target = shape_of("llama-3.1-8b")
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14_336 + 2 * 4096
    expected = layer + 32_768 * 4096 + 4096 + 2 * 4096 * 4096
    assert draft_forward(eagle_of(target)).read_bytes == 2 * expected


def test_a_pass_of_medusa_heads_reads_their_blocks_and_outputs() -> None:
    target = shape_of("llama-3.1-8b")
    values = {"medusa_num_heads": 4, "medusa_num_layers": 2}
    apart = fit_medusa(ModelConfig.parse(values), target)
    assert draft_forward(apart).read_bytes == 2 * (4 * 2 * 4096**2 + 4 * 128_256 * 4096)
    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "truncated_vocab_size": 32_768, "original_lm_head": True}
    shared = fit_medusa(ModelConfig.parse(values | sizes), target)
    assert draft_forward(shared).read_bytes == 2 * (4 * 2 * 4096**2 + 32_768 * 4096)
    engine = settings(speculative={"draft": "d"})
    with pytest.raises(ConfigError, match=r"draft: its weights take 4\.5 GB"):
        plan_gpus(engine, target, apart, parse_gpus("L4"), TRAFFIC)
    assert plan_gpus(engine, target, shared, parse_gpus("H200"), TRAFFIC).points


def test_the_step_of_one_stream_waits_for_memory() -> None:
    """8B on an H200: 15.0 GB at 70 % of 4.8 TB/s, and 1000 cached tokens of 128 KiB, and fixed 0.8 ms."""
    target = shape_of("llama-3.1-8b")
    plan = plan_gpus(settings(), target, None, parse_gpus("H200"), TRAFFIC)
    read = (target_forward(target, WHOLE).read_bytes + 1000 * 2 * 32 * 8 * 128 * 2) / (0.7 * 4.8e12)
    assert plan.points[0].plain_tpot_s == pytest.approx(read + 3e-4 + 5e-4)
    assert plan.points[0].plain_tokens_per_s == pytest.approx(1 / (read + 8e-4))
    assert plan.pays_up_to is None
    assert plan.points[0].tpot_s == plan.points[0].plain_tpot_s
    computing = 512 * target_forward(target, WHOLE).flops_per_row / (0.5 * 989e12)
    assert plan.prompt_tokens_per_s == pytest.approx(512 / (computing + 8e-4)), "512 rows wait for arithmetic"


def test_a_small_model_waits_for_the_launches_of_the_host() -> None:
    plan = plan_gpus(settings(), shape_of("smollm2-135m"), None, parse_gpus("H100"), TRAFFIC)
    context = 1000 * 2 * 30 * 3 * 64 * 2 / (0.7 * 3.35e12)
    assert plan.points[0].plain_tpot_s == pytest.approx(30 * 17 * 5e-6 + context + 8e-4)


def test_70b_takes_four_h100_and_drafting_pays_at_low_load() -> None:
    plan = of_70b()
    assert (plan.tensor_parallel_size, plan.num_replicas, len(plan.memory)) == (4, 1, 2)
    assert plan.memory[0].parts[0].num_bytes / GIB == pytest.approx(34.3, abs=0.1)
    assert plan.kv_tokens == plan.memory[0].kv_tokens < plan.memory[1].kv_tokens, "the draft is on the first GPU"
    assert plan.longest_context == 131_072
    assert plan.points[0].gain > 1.3
    assert plan.points[0].mean_k >= plan.points[2].mean_k > 0
    assert plan.pays_up_to is not None
    assert 64 < plan.pays_up_to <= plan.most_streams
    assert of_70b(max_model_len=4096).longest_context == 4096


def test_drafting_stops_where_one_more_stream_gains_too_little() -> None:
    plan = of_70b()
    assert plan.pays_up_to is not None
    at = replace(TRAFFIC, streams=(plan.pays_up_to, plan.pays_up_to + 1))
    engine = settings(speculative={"draft": "d", "k": 5})
    cluster = Cluster(GPUS["h100"], 4)
    last, next_one = plan_gpus(engine, shape_of("llama-3.1-70b"), shape_of("llama-3.2-1b"), cluster, at).points
    assert last.gain >= 1.03 > next_one.gain


def test_a_rejected_draft_never_pays() -> None:
    engine = settings(speculative={"draft": "d", "k": 5})
    rejected = replace(TRAFFIC, acceptance=0.0)
    target, draft = shape_of("llama-3.1-70b"), shape_of("llama-3.2-1b")
    plan = plan_gpus(engine, target, draft, Cluster(GPUS["h100"], 4), rejected)
    assert plan.pays_up_to == 0
    assert all(point.mean_k == 0 and point.gain == 1 for point in plan.points)


def test_eight_small_replicas_where_one_gpu_is_enough() -> None:
    plan = plan_gpus(settings(), shape_of("llama-3.1-8b"), None, Cluster(GPUS["h100"], 8), TRAFFIC)
    assert (plan.tensor_parallel_size, plan.num_replicas) == (1, 8)
    price = plan.cost_per_million(plan.points[1], 24.0)
    assert price == pytest.approx(24.0 / 3600 / (8 * plan.points[1].tokens_per_s) * 1e6)
    sharded = settings(tensor_parallel_size=4)
    plan = plan_gpus(sharded, shape_of("llama-3.1-8b"), None, Cluster(GPUS["h100"], 8), TRAFFIC)
    assert (plan.tensor_parallel_size, plan.num_replicas) == (4, 2)


def test_streams_that_the_cache_does_not_hold_are_said_to_wait() -> None:
    engine = settings(max_model_len=4096)
    plan = plan_gpus(engine, shape_of("llama-3.1-8b"), None, parse_gpus("RTX4090"), TRAFFIC)
    assert [point.fits for point in plan.points] == [point.streams * 1000 <= plan.kv_tokens for point in plan.points]
    assert plan.points[0].fits
    assert not plan.points[2].fits
    assert plan.most_streams == plan.kv_tokens // 1000


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="the KV cache needs 4096 tokens"):
        plan_gpus(settings(), shape_of("llama-3.1-70b"), None, parse_gpus("2xL4"), TRAFFIC)
    with pytest.raises(ConfigError, match="--tp: 4 given; 2xL4 has 2 GPUs"):
        plan_gpus(settings(tensor_parallel_size=4), shape_of("llama-3.1-8b"), None, parse_gpus("2xL4"), TRAFFIC)
    engine = settings(speculative={"draft": "d"})
    with pytest.raises(ConfigError, match=r"draft: its weights take 6\.4 GB.*leaves 2\.6 GB"):
        plan_gpus(engine, shape_of("llama-3.2-1b"), shape_of("llama-3.2-3b"), parse_gpus("RTX3090"), TRAFFIC)
    with pytest.raises(ConfigError, match=r"neither a folder with a config\.json nor one of: llama-3\.1-8b"):
        shape_of("gpt-5")


@pytest.mark.parametrize("text", ["", "4", "4x", "0xH100", "H101", "4 x H100 y"])
def test_a_wrong_name_of_gpus_is_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpus: .* A100-80, .*RTX4090"):
        parse_gpus(text)


@pytest.mark.parametrize(("text", "count"), [("h100", 1), ("4xH100", 4), ("1024xl40s", 1024)])
def test_gpus_are_parsed(text: str, count: int) -> None:
    cluster = parse_gpus(text)
    assert cluster.count == count
    assert str(cluster) == f"{count}x{cluster.gpu.name}"


LINEAR = CostTable(tuple(0.010 + 0.001 * rows for rows in ROW_KNOTS), (0.002,) * len(BATCH_KNOTS), handoff_s=0.001)


def of_cpu(table: CostTable, method: str, acceptance: float = 0.8, **settings: str) -> Plan:
    draft = {} if method == "none" else {"draft": "d"}
    speculative = {"method": method, "k": 4, **draft}
    engine = EngineConfig.parse({"model": "m", "device": "cpu", "speculative": speculative, **settings})
    traffic = Traffic(streams=(1, 4), context_len=100, acceptance=acceptance)
    weights = weight_bytes(smollm2(), WHOLE, torch.bfloat16)
    return plan_cpu(engine, smollm2(), table, traffic, weights=weights, kv_budget=GIB, num_cores=2)


def smollm2() -> ModelConfig:
    return shape_of("smollm2-135m")


def test_a_measured_table_gets_what_it_lacks() -> None:
    """A row takes 1 ms after the first 10 ms; then 0.5 ms per step, 40 us per row and 80 us of CPU per token.

    Steps that served requests were longer by the time that serving took, so learned costs hold it.
    """
    plan = of_cpu(LINEAR, "none")
    expected = [0.010 + n * 0.001 + 0.0005 + n * 4e-5 + n * 8e-5 for n in (1, 4)]
    assert [point.plain_tpot_s for point in plan.points] == pytest.approx(expected)
    learned = replace(LINEAR, overhead_s=0.002, sample_row_s=1e-4)
    expected = [0.010 + n * 0.001 + 0.002 + n * 1e-4 for n in (1, 4)]
    assert [point.plain_tpot_s for point in of_cpu(learned, "none").points] == pytest.approx(expected)
    assert plan.memory[0].parts[0].name == "weights"
    assert len(of_cpu(LINEAR, "draft_model").memory[0].parts) == len(plan.memory[0].parts) + 1, "the draft's process"
    assert plan.kv_tokens == GIB // (2 * 30 * 3 * 64 * 2)
    assert of_cpu(LINEAR, "none", kv_cache_dtype="int8").kv_tokens == GIB // (2 * 30 * 3 * (64 + 4))
    assert plan.longest_context == 8192


def test_drafting_on_a_cpu_is_the_best_of_all_lengths() -> None:
    """One stream: the best K of 0 to 4 by hand, each pass 2 ms, each row 1.04 ms, the handoff 1 ms."""
    point = of_cpu(LINEAR, "draft_model").points[0]
    plain = 0.010 + 0.001 + 0.0005 + 4e-5
    tpots = {}
    for k in range(1, 5):
        tokens = sum(0.8**i for i in range(k + 1))
        tpots[k] = (plain + 0.001 + k * (0.002 + 0.00104)) / tokens + 8e-5
    best = min(tpots, key=lambda k: tpots[k])
    assert point.mean_k == best
    assert point.tpot_s == pytest.approx(tpots[best])
    assert point.tpot_s < plain + 8e-5


def test_the_assumptions_are_those_of_the_simulated_machine() -> None:
    assert (planning.BANDWIDTH_SHARE, planning.FLOPS_SHARE) == (0.7, 0.5)
