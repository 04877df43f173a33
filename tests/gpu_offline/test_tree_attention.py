"""Draft trees in the attention of the GPU path, against the reference, and in a whole step.

Promise: through the contract of PyTorch's paged flash attention, every row of any tree gets the reference's result,
whatever is in KV slots that no row sees; a step over trees waits for the device once, eager and recorded.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import varlen_contract
from fake_cuda import CUDA, fake_cuda
from fake_graphs import Guarded, Recording
from fake_models import fake_decoder
from fake_steps import MODES, K, batch_of, fake_proposer, fake_shard, request_rows, tree_draft, verifier_of
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B
from tiny_models import VOCAB, scattered_blocks, write_model
from trees import TreeSpan, random_parents

from engine.config import CUDA_PAGE
from engine.core.packing import SpanRows, pack_spans
from engine.core.step import DeviceDrafts, Draft, DraftRow, ForwardInput
from engine.draft.messages import DraftRequestRow
from engine.draft.proposer import OnDevice
from engine.graphs.buckets import Bucket, find_bucket, make_buckets
from engine.graphs.forward import GraphedForward
from engine.graphs.static_memory import StaticInputs, fill_spans, fill_trees
from engine.messages import SamplingParams
from engine.model.attention import ReferenceAttention
from engine.model.attention_padded import PaddedAttention
from engine.model.attention_varlen import PagedTrees, VarlenAttention
from engine.model.decoder import Decoder
from engine.model.load import load_model
from engine.model.runner import ModelRunner
from engine.sampling.row_sampling import RowSampling
from engine.sampling.staging import to_host
from engine.tree_paths import find_paths

CPU = torch.device("cpu")
PAGE = varlen_contract.PAGE
SPAN = st.integers(1, 600).flatmap(
    lambda committed: st.tuples(
        st.just(committed), st.integers(1, min(committed, 9)), st.sampled_from([0, 1, 3, 6, 20, 64])
    )
)
TARGETS = {"llama-8b": (LLAMA_8B, 1), "qwen3-8b": (QWEN3_8B, 1), "llama-70b tp 4": (LLAMA_70B, 4)}


@pytest.fixture(scope="module", autouse=True)
def _contract() -> None:
    varlen_contract.register()


def forward_of(sizes: list[tuple[int, int, int]], rng: random.Random) -> tuple[ForwardInput, int]:
    """The input of spans of (committed tokens, rows among them, nodes), and the number of blocks it uses."""
    lengths = [committed + nodes for committed, _, nodes in sizes]
    num_blocks = sum(-(-length // PAGE) for length in lengths) + 1
    # Block 0 belongs to nobody, as the scratch block does.
    blocks = [
        [1 + block for block in owned]
        for owned in scattered_blocks(lengths, num_blocks=num_blocks - 1, block_size=PAGE)
    ]
    spans = [
        TreeSpan([0] * committed, rows, [0] * nodes, random_parents(rng, nodes), owned).rows()
        for (committed, rows, nodes), owned in zip(sizes, blocks, strict=True)
    ]
    return pack_spans(spans, PAGE), num_blocks


def results(attention: Any, forward_input: ForwardInput, num_blocks: int, *, window: int = 0) -> tuple[Any, Any]:
    """Results of an attention and of the reference, for random queries, keys and values."""
    generator = torch.Generator().manual_seed(len(forward_input.token_ids))
    keys, values = (torch.randn(num_blocks, PAGE, 2, 16, generator=generator).bfloat16() for _ in range(2))
    keys[0] = values[0] = float("nan")
    query = torch.randn(len(forward_input.token_ids), 6, 16, generator=generator).bfloat16()
    return tuple(
        each.attend(query, keys, values, each.prepare(forward_input, block_size=PAGE)).float()
        for each in (attention, ReferenceAttention(window=window))
    )


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(SPAN, min_size=1, max_size=4), seed=st.integers(0, 2**20))
def test_rows_of_trees_equal_the_reference(sizes: list[tuple[int, int, int]], seed: int) -> None:
    forward_input, num_blocks = forward_of(sizes, random.Random(seed))
    found, expected = results(VarlenAttention(device=CPU), forward_input, num_blocks)
    assert (found - expected).abs().max().item() < 0.03


@pytest.mark.parametrize("window", [1, 3, 40, 300])
def test_a_window_counts_along_the_path(window: int) -> None:
    forward_input, num_blocks = forward_of([(500, 1, 20), (20, 3, 9), (300, 2, 0)], random.Random(window))
    padded = PaddedAttention(group_size=3, dtype=torch.bfloat16, device=CPU, window=window)
    attention = VarlenAttention(device=CPU, window=window, padded=padded)
    found, expected = results(attention, forward_input, num_blocks, window=window)
    assert (found - expected).abs().max().item() < 0.03


def test_the_flash_call_of_chains_is_left_out_where_all_rows_are_on_paths() -> None:
    attention = VarlenAttention(device=CPU)
    for sizes, has_chains in (([(300, 1, 9), (20, 1, 3)], False), ([(300, 1, 9), (20, 1, 0)], True)):
        rng = random.Random(1)
        forward_input, _ = forward_of(sizes, rng)
        prepared = attention.prepare(forward_input, block_size=PAGE)
        if forward_input.tree is not None:
            assert isinstance(prepared, PagedTrees)
            assert (prepared.chains is not None) == has_chains


def test_a_path_without_room_is_refused() -> None:
    chain = pack_spans([SpanRows([1, 2, 3], 0, [1], 3, num_tree_slots=3, ancestors=(1, 3, 7))], PAGE)
    assert chain.tree is not None
    lengths = (chain.q_lens, chain.kv_lens, chain.block_tables)
    with pytest.raises(ValueError, match="a path of 3 slots, there is room for 2"):
        find_paths(*lengths, chain.tree.num_slots, chain.tree.ancestors, block_size=PAGE, width=2)


def test_trees_have_buckets_of_their_own() -> None:
    buckets = make_buckets(max_requests=8, max_k=3, trees=True)
    tree = pack_spans([SpanRows([1] * 4, 9, [1], 4, num_tree_slots=3, ancestors=(1, 2, 5))] * 2, PAGE)
    chain = pack_spans([SpanRows([1] * 4, 9, [1], 4)] * 2, PAGE)
    assert find_bucket(buckets, tree) == Bucket(8, 8, 4, trees=True)
    assert find_bucket(buckets, chain) == Bucket(8, 8, 4)
    assert find_bucket(make_buckets(max_requests=8, max_k=3), tree) is None
    later_level = pack_spans([SpanRows([1] * 2, 9, [1], 2, num_tree_slots=4, ancestors=(5, 9))], PAGE)
    assert find_bucket(buckets, later_level) is None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_padded_replay_of_trees_gives_the_eager_result(family: str, tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "m", family), dtype=torch.bfloat16, kernel="reference")
    assert isinstance(model, Decoder)
    model._attention = {0: VarlenAttention(device=CPU)}
    eager, runner = (ModelRunner(model, num_blocks=20, block_size=PAGE) for _ in range(2))
    capture, rng = Recording(), random.Random(5)
    buckets = make_buckets(max_requests=5, max_k=6, trees=True)
    graphs = GraphedForward(runner, buckets, capture, max_kv=3 * PAGE, max_ids=8)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 3, 255, 300, 511)]
    blocks = [[1 + 3 * i, 2 + 3 * i, 3 + 3 * i] for i in range(5)]
    prefill = pack_spans([SpanRows(text, 0, owned, 1) for text, owned in zip(texts, blocks, strict=True)], PAGE)
    for forward in (eager.forward, graphs.forward):
        forward(prefill)
    num_trees = 0
    for step in range(10):
        members = rng.sample(range(5), rng.randint(1, 5))
        spans = []
        for i in members:
            nodes = rng.randint(0, 6)
            texts[i].append(rng.randrange(VOCAB))
            tokens = [rng.randrange(VOCAB) for _ in range(nodes)]
            spans.append(TreeSpan(texts[i], 1, tokens, random_parents(rng, nodes), blocks[i]).rows())
        forward_input = pack_spans(spans, PAGE)
        num_trees += forward_input.tree is not None
        expected, found = eager.forward(forward_input), graphs.forward(forward_input)
        assert capture.num_replays == step + 1
        one, other = found.require_logits().float(), expected.require_logits().float()
        assert torch.isfinite(one).all()
        assert (one - other).abs().max() <= 0.03 * other.abs().max()
    assert num_trees > 6


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "recorded"])
def test_a_step_over_trees_waits_once(target: str, graphs: bool) -> None:
    """Every mode in one step; trees and chains mixed."""
    shape, tp = TARGETS[target]
    with fake_cuda() as recorder:
        shard = fake_shard(shape, tp=tp, feature_layers=(0, 1, 2), tree="auto")
        if graphs:
            object.__setattr__(shard.config, "max_num_requests", 12)
            capture = Guarded(recorder)
            shard.record(capture)
            assert capture.num_recorded == len(make_buckets(max_requests=12, max_k=K, trees=True))
        batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], K, vocab_size=shape["vocab_size"])
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        recorder.downloads = 0
        verdict = verify(batch, tree_draft(len(MODES)))
        assert len(verdict.rows) == len(MODES)
        assert recorder.reads == {"event": 1}
        assert recorder.downloads == 1


def test_trees_of_prompt_lookup_beside_chains_that_the_host_has_not_seen_wait_once() -> None:
    with fake_cuda() as recorder:
        shard = fake_shard(LLAMA_8B)
        batch = batch_of([SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)] * 2, K)
        ids = torch.zeros(4, K, dtype=torch.int64, device=shard.device)
        probs = torch.empty(4, K, LLAMA_8B["vocab_size"], device=shard.device)
        drafts = DeviceDrafts(ids, torch.zeros(4, K, device=shard.device), probs)
        rows = [*tree_draft(2).rows, DraftRow(num_on_device=K, device_row=2)]
        rows.append(DraftRow((), probs[3], num_on_device=3, device_row=3))
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        verdict = verify(batch, Draft(tuple(rows), on_device=drafts))
        assert [len(row.confidences) for row in verdict.rows] == [0, 0, K, 3]
        assert recorder.reads == {"event": 1}


@pytest.mark.parametrize("kind", ["llama-1b", "eagle", "medusa"])
def test_a_draft_model_reads_each_level_of_a_tree_once(kind: str) -> None:
    """The nodes of a level depend on the tokens of the level before."""
    with fake_cuda() as recorder:
        batch = batch_of([SamplingParams(temperature=0.0)] * 3, K)
        proposer, features = fake_proposer(kind, LLAMA_8B)
        memory = OnDevice(
            torch.zeros(3, K, dtype=torch.int32, device=CUDA),
            torch.zeros(3, K, device=CUDA),
            torch.zeros(64, dtype=torch.int32, device=CUDA),
            to_host,
        )
        probs = torch.empty(3, K, LLAMA_8B["vocab_size"], device=CUDA)
        rows = [wide(row) for row in request_rows(kind, batch)]
        recorder.reads.clear()
        found = proposer.propose(rows, [], probs, features, memory)
        assert all(row.token_ids and not row.num_on_device for row in found)
        assert 1 <= recorder.num_reads <= K


def wide(row: DraftRequestRow) -> DraftRequestRow:
    sampling = RowSampling(0.0, 1.0, 1, 1, False)
    return DraftRequestRow(
        *(row.key, row.start, row.new_tokens, row.k, sampling), width=2, feature_rows=row.feature_rows
    )


@pytest.mark.parametrize(("fused", "most"), [(False, 35), (True, 11)], ids=["torch", "triton"])
def test_launches_per_layer_with_trees(fused: bool, most: int) -> None:
    tree = pack_spans([SpanRows([1] * 4, 600, [1, 2, 3], 4, num_tree_slots=3, ancestors=(1, 2, 5))], CUDA_PAGE)
    counts = []
    for num_layers in (1, 2):
        with fake_cuda() as recorder:
            decoder, caches = fake_decoder(LLAMA_8B, num_layers=num_layers, fused=fused)
            recorder.launches.clear()
            recorder.uploads = 0
            decoder.forward(tree, caches)
            counts.append(recorder.num_launches)
            assert recorder.num_reads == 0
            assert recorder.uploads <= 2
    assert counts[1] - counts[0] <= most


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
def test_a_replay_of_trees_uploads_once(fused: bool) -> None:
    tree = pack_spans(
        [
            SpanRows([1] * 4, 600, [1, 2, 3], 4, num_tree_slots=3, ancestors=(1, 2, 5)),
            SpanRows([1], 9, [4], 1),
        ],
        CUDA_PAGE,
    )
    with fake_cuda() as recorder:
        decoder, _ = fake_decoder(LLAMA_8B, num_layers=2, fused=fused)
        assert decoder.masks_trees(4) == fused
        assert not decoder.masks_trees(100), "more rows than a program of the kernel takes"
        runner = ModelRunner(decoder, num_blocks=8, block_size=CUDA_PAGE)
        buckets = make_buckets(max_requests=3, max_k=3, trees=True)
        graphs = GraphedForward(runner, buckets, Guarded(recorder), max_kv=3 * CUDA_PAGE, max_ids=16)
        recorder.uploads = 0
        recorder.reads.clear()
        assert len(graphs.forward(tree).require_logits()) == 5
        assert recorder.uploads == 1
        assert recorder.num_reads == 0


def test_a_recorded_tree_has_its_bits_and_padding_has_none() -> None:
    """For the kernel that masks trees itself: the KV lengths stay, and rows that pad the bucket are no nodes."""
    tree = pack_spans([SpanRows([1] * 4, 9, [1], 4, num_tree_slots=3, ancestors=(1, 2, 5))], PAGE)
    bucket = Bucket(6, 2, 4, trees=True)
    lengths = dict.fromkeys(("token_ids", "places", "positions", "slots", "ancestors"), ((6,), "int64"))
    others = {"cu_q": ((3,), "int32"), "cu_kv": ((3,), "int32"), "kv_lens": ((2,), "int32")}
    layout = lengths | others | {"num_tree_slots": ((2,), "int32"), "block_tables": ((2, 3), "int32")}
    inputs = StaticInputs(layout, CPU)
    for forward_input in (tree, pack_spans([SpanRows([1], 9, [1], 1)], PAGE), tree):
        fill_spans(inputs.arrays, forward_input, bucket)
        fill_trees(inputs.arrays, forward_input.tree, PAGE)
    assert inputs.arrays["num_tree_slots"].tolist() == [3, 0]
    assert inputs.arrays["ancestors"].tolist() == [0, 1, 2, 5, 0, 0]
    assert inputs.arrays["kv_lens"].tolist() == [13, 1]
    assert inputs.arrays["cu_q"].tolist() == [0, 4, 5]
