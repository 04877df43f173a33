"""Draft chains as CUDA graphs: they draft what the eager chain drafts, without a read, an upload or a decision inside.

Values are compared on CPU tensors with a recording that keeps its function; what a recording may not do on a GPU is
counted with fake CUDA tensors. No CUDA graph exists here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from fake_graphs import Guarded, Recording
from fake_models import fake_decoder, fake_eagle, fake_medusa
from fake_steps import MODES, K, batch_of, request_rows
from fakes import LoopbackEndpoint, ToyModel
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import LLAMA_1B, LLAMA_8B
from tiny_models import VOCAB, write_model
from torch.utils._python_dispatch import TorchDispatchMode
from toy_eagle import FeaturedToy
from toy_heads import random_heads
from toy_medusa import ToyHeads

from bench.gpu.lab import SpanAttention
from engine.config import CUDA_PAGE, EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.packing import SpanRows, pack_spans
from engine.draft.messages import DraftRequestRow
from engine.draft.parallel import with_masked
from engine.draft.proposer import OnDevice, Proposer
from engine.graphs.chain import RecordedChain
from engine.graphs.chain_rows import WHOLE_ROWS, ChainRows
from engine.graphs.static_memory import StaticInputs
from engine.medusa.architecture import MedusaArchitecture
from engine.medusa.recorded import RecordedHeads
from engine.messages import SamplingParams
from engine.model.decoder import Decoder
from engine.model.eagle_head import EagleHead
from engine.model.layers import PlainLinear, RmsNorm
from engine.model.load import LoadedDraft, load_model
from engine.sampling.distribution import WarpOptions, warp, warp_together
from engine.sampling.row_sampling import RowSampling
from engine.sampling.staging import to_host
from engine.workers.loaded_draft import heads_parts, make_architecture

CPU = torch.device("cpu")
MAX_K = 4
SAMPLINGS = {
    "greedy": [RowSampling(0.0, 1.0, 1, 0, False)],
    "sampled": [
        RowSampling(0.9, 1.0, 5, 3, False),
        RowSampling(1.0, 1.0, 6, 0, True),
        RowSampling(0.0, 1.0, 1, 0, False),
    ],
    "truncated": [
        RowSampling(0.9, 0.8, 5, 3, False, 9, 0.01),
        RowSampling(1.2, 1.0, 5, 0, True),
        RowSampling(1, 0.5, 2, 1, False),
    ],
}


def config_of(*, max_requests: int = 6, k: int = MAX_K) -> EngineConfig:
    return EngineConfig.parse(
        {"model": "m", "block_size": CUDA_PAGE, "max_num_requests": max_requests, "max_model_len": 600}
        | {"speculative": {"k": k, "draft": "d"}}
    )


def loaded_draft(kind: str, folder: Path) -> LoadedDraft:
    """A small float32 draft whose attention runs on a CPU as it does on a GPU."""
    model = load_model(write_model(folder / "m", "llama"), dtype=torch.float32, kernel="reference")
    assert isinstance(model, Decoder)
    model._attention = {0: SpanAttention(device=CPU)}
    if kind == "draft_model":
        return LoadedDraft(model, None)
    model.feature_layers = (2,)
    if kind == "parallel":
        object.__setattr__(model.config, "positions_per_pass", MAX_K)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(1)

    def linear(columns: int) -> PlainLinear:
        return PlainLinear(torch.randn(size, columns, generator=generator) * columns**-0.5)

    norms = [RmsNorm(torch.ones(size), 1e-5) for _ in range(2)]
    mask = torch.randn(size, generator=generator) if kind == "parallel" else None
    return LoadedDraft(
        model, EagleHead(torch.ones(1, size), linear(size), norms[0], linear(size), norms[1], linear(size), 1e-5, mask)
    )


def endpoint_of(draft: LoadedDraft, features: torch.Tensor | None, capture: Recording | None) -> LoopbackEndpoint:
    architecture, recorded = make_architecture(config_of(), draft, VOCAB, num_blocks=16, capture=capture)
    assert (recorded is None) == (capture is None)
    pool = BlockPool(16, CUDA_PAGE, prefix_cache=False, ahead=1 if architecture.reads_features else 0)
    proposer = Proposer(architecture, pool, vocab=None, max_model_len=600, recorded=recorded)
    return LoopbackEndpoint(proposer, max_rows=8, max_k=MAX_K, draft_vocab=VOCAB, features=features, on_device=True)


def compare(found: LoopbackEndpoint, expected: LoopbackEndpoint, rows: list[DraftRequestRow], *, bound: float) -> Any:
    """Both drafts of the same request; the tokens of the rows."""
    one, other = found.ask(rows, deadline_s=1.0), expected.ask(rows, deadline_s=1.0)
    assert one.rows == other.rows
    tokens = []
    for place, row in enumerate(one.rows):
        length = row.num_on_device
        mine, theirs = found.drafted(len(rows)), expected.drafted(len(rows))
        tokens.append(theirs.token_ids[place, :length].tolist())
        assert mine.token_ids[place, :length].tolist() == tokens[-1]
        assert torch.allclose(mine.confidences[place, :length], theirs.confidences[place, :length], atol=bound)
        if row.has_probs:
            assert torch.allclose(mine.probs[place, :length], theirs.probs[place, :length], atol=bound)
    return tokens


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "parallel"])
@pytest.mark.parametrize("choice", SAMPLINGS)
def test_a_recorded_chain_drafts_what_the_eager_one_drafts(kind: str, choice: str, tmp_path: Path) -> None:
    """Over several requests: any K per row, early exit, any number of accepted tokens."""
    rng, capture = random.Random(len(choice)), Recording()
    features = None
    draft = loaded_draft(kind, tmp_path)
    if draft.head is not None:
        features = torch.randn(64, draft.decoder.config.hidden_size, generator=torch.Generator().manual_seed(2))
    chain, eager = endpoint_of(draft, features, capture), endpoint_of(draft, features, None)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (3, 254, 9, 30, 5)]
    sent, lengths = [0] * len(texts), []
    for turn in range(6):
        keys = rng.sample(range(len(texts)), rng.randint(1, len(texts)))
        ks = [MAX_K] * len(keys) if turn % 2 else [rng.randint(0, MAX_K) for _ in keys]
        rows = []
        for place, (key, k) in enumerate(zip(keys, ks, strict=True)):
            sampling = SAMPLINGS[choice][key % len(SAMPLINGS[choice])]
            new = tuple(texts[key][sent[key] :])
            reads = tuple((sent[key] + i) % 64 for i in range(len(new))) if features is not None else ()
            threshold = 0.0 if place % 2 else 0.05
            rows.append(DraftRequestRow(key, sent[key], new, k, sampling, None, threshold, feature_rows=reads))
            sent[key] = len(texts[key])
        before = capture.num_replays
        tokens = compare(chain, eager, rows, bound=1e-4)
        lengths.append((max(ks), capture.num_replays - before))
        for key, drafted in zip(keys, tokens, strict=True):
            texts[key] += [*drafted[: rng.randint(0, len(drafted))], rng.randrange(VOCAB)]
    # One more where the forward over committed tokens is replayed too: all but the prompts.
    chain_only = [num - (1 if k == MAX_K and kind != "parallel" else k) for k, num in lengths]
    assert set(chain_only) == {0, 1}, lengths
    assert {k for k, _ in lengths} > {MAX_K}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    ks=st.lists(st.integers(0, MAX_K), min_size=1, max_size=5),
    choice=st.sampled_from(sorted(SAMPLINGS)),
    reduced=st.booleans(),
)
def test_recorded_choices_of_medusa_heads_are_the_eager_ones(
    seed: int, ks: list[int], choice: str, reduced: bool
) -> None:
    """Drafts whose positions come from one forward: only the choice is replayed. The logits are equal, so all is."""
    toy = ToyModel(vocab_size=7, columns=5 if reduced else 7, seed=seed)
    vocab = torch.tensor([4, 0, 2, 1, 6]) if reduced else None
    target, endpoints = FeaturedToy(vocab_size=7), []
    for is_recorded in (True, False):
        heads: Any = ToyHeads(toy, MAX_K)
        recorded = None
        if is_recorded:
            recorded = RecordedChain(
                *((1, 2, 5), Recording()), max_k=MAX_K, columns=toy.columns, vocab=vocab, device=CPU, model=None
            )
        pool = BlockPool(40, 1001, prefix_cache=False)
        proposer = Proposer(MedusaArchitecture(heads), pool, vocab=vocab, max_model_len=1000, recorded=recorded)
        features = torch.tensor([target.features_after([1, 2, token]) for token in range(7)], dtype=torch.float32)
        endpoints.append(
            LoopbackEndpoint(
                proposer, max_rows=8, max_k=MAX_K, draft_vocab=toy.columns, features=features, on_device=True
            )
        )
    rows = [
        DraftRequestRow(
            key, 0, (1, 2, 3), k, SAMPLINGS[choice][key % len(SAMPLINGS[choice])], feature_rows=(-1, 1, key % 7)
        )
        for key, k in enumerate(ks)
    ]
    tokens = compare(*endpoints, rows, bound=1e-6)
    assert [len(row) for row in tokens] == ks


def test_medusa_heads_are_recorded_for_most_requests_first() -> None:
    """So that the memory of later recordings fits into that of the first."""
    with torch.inference_mode():
        heads = random_heads(num_heads=2, hidden=16, vocab=11, generator=torch.Generator().manual_seed(3))
    recorded: list[Any] = []

    def capture(function: Any) -> Any:
        recorded.append(function.args)
        return function

    RecordedHeads(heads, [1, 4, 2], capture)
    assert recorded == [(4, 0), (4, 1), (2, 0), (2, 1), (1, 0), (1, 1)]


def test_recorded_medusa_heads_compute_what_the_eager_ones_compute() -> None:
    """With real heads of random weights; requests of different K in one call."""
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        heads = random_heads(num_heads=3, hidden=16, vocab=11, generator=generator)
    parts = heads_parts(config_of(k=3), heads, Recording())
    eager = MedusaArchitecture(heads)
    spans = [
        with_masked(SpanRows([7, 8], 3, [1], 1, (4, 9)), 2),
        SpanRows([5, 6], 0, [2], 0, (1, 2)),
        SpanRows([5], 0, [3], 1, (1,)),
    ]
    features = torch.randn(5, 16, generator=generator)
    with torch.inference_mode():
        one, other = (
            architecture.compute_committed(pack_spans(spans, 16), features, [2, 0, 0])
            for architecture in (parts.architecture, eager)
        )
        assert torch.allclose(one.logits, other.logits, atol=1e-5)
        for _ in range(2):
            one, other = (each.select([0]).following() for each in (one, other))
            assert one is not None
            assert other is not None
            assert torch.allclose(one.logits, other.logits, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0.05, 3), st.sampled_from([0, 1, 3, 9, 40]), st.sampled_from([0.0, 0.02, 0.4, 1.0]),
            st.sampled_from([1.0, 0.9, 0.3, 1e-4]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**20),
)  # fmt: skip
def test_options_on_the_device_give_the_distribution_of_those_on_the_host(rows: list[Any], seed: int) -> None:
    """Bit for bit, with equal logits among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(rows), 30, generator=generator) * 3).round(decimals=1)
    samplings = [RowSampling(t, top_p, 0, 0, False, top_k, min_p) for t, top_k, min_p, top_p in rows]
    options = WarpOptions(
        temperature=torch.tensor([[s.temperature] for s in samplings]),
        cuts=torch.tensor([[s.top_k > 0 or s.min_p > 0] for s in samplings]),
        top_k=torch.tensor([[min(s.top_k or 30, 30)] for s in samplings]),
        min_p=torch.tensor([[s.min_p] for s in samplings]),
        top_p=torch.tensor([[s.top_p] for s in samplings]),
    )
    truncates = any(s.top_k or s.min_p or s.top_p < 1 for s in samplings)
    assert torch.equal(warp_together(logits, options, truncates=truncates), warp(logits, samplings, nucleus="sort"))


class Copies(TorchDispatchMode):
    """Keeps the source of each copy, as a device does that has not got to it yet."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::copy_" and (kwargs or {}).get("non_blocking", len(args) > 2 and args[2]):
            self.sources.append(args[1])
        return func(*args, **(kwargs or {}))


def test_the_host_may_write_the_inputs_of_the_next_replay_before_the_device_has_copied_those_of_this_one() -> None:
    """The forwards of a chain are queued one after the other, with no wait in between."""
    inputs = StaticInputs({"a": ((3,), "int64"), "b": ((2,), "float32")}, CPU)
    with Copies() as copies:
        for value in (1, 2, 3):
            inputs.arrays["a"][:] = value
            inputs.upload()
    assert [source[:24].view(torch.int64).tolist() for source in copies.sources] == [[1] * 3, [2] * 3, [3] * 3]
    assert inputs.tensors["a"].tolist() == [3, 3, 3]


def fake_draft(kind: str, capture: Guarded, *, max_requests: int) -> tuple[Proposer, torch.Tensor | None]:
    """A recorded draft of an 8B target, and the features that it reads."""
    config = config_of(max_requests=max_requests, k=K)
    if kind == "medusa":
        parts = heads_parts(config, fake_medusa(LLAMA_8B, num_heads=K), capture)
        features = torch.empty(100, LLAMA_8B["hidden_size"], dtype=torch.bfloat16, device=CUDA)
        recorded, architecture, pool = parts.recorded, parts.architecture, parts.pool
    else:
        pool = BlockPool(40, CUDA_PAGE, prefix_cache=False, ahead=0 if kind == "llama-1b" else 1)
        features = None
        if kind == "llama-1b":
            draft = LoadedDraft(fake_decoder(LLAMA_1B | {"vocab_size": LLAMA_8B["vocab_size"]}, num_layers=2)[0], None)
        else:
            head, decoder, _ = fake_eagle(LLAMA_8B, is_parallel=kind == "parallel")
            if kind == "parallel":
                object.__setattr__(decoder.config, "positions_per_pass", K)
            draft = LoadedDraft(decoder, head)
            features = torch.empty(100, head.feature_width, dtype=torch.bfloat16, device=CUDA)
        architecture, recorded = make_architecture(
            config, draft, LLAMA_8B["vocab_size"], num_blocks=40, capture=capture
        )
    assert recorded is not None
    return Proposer(architecture, pool, vocab=None, max_model_len=4096, recorded=recorded), features


PLAIN_MODES = ("greedy", "temperature", "top_p", "top_k and min_p", "seeded", "logprobs")


@pytest.mark.parametrize("kind", ["llama-1b", "eagle", "parallel", "medusa"])
@pytest.mark.parametrize("num", [3, WHOLE_ROWS + 1])
def test_a_chain_is_replayed_and_read_once(kind: str, num: int) -> None:
    """All modes in one request, and the forward over committed tokens too. What the host launches besides does not grow
    with K."""
    launched = {}
    with fake_cuda() as recorder:
        capture = Guarded(recorder)
        proposer, features = fake_draft(kind, capture, max_requests=num)
        for k in (2, K):
            samplings = [SamplingParams(**MODES[PLAIN_MODES[place % len(PLAIN_MODES)]]) for place in range(num)]
            batch = batch_of(samplings, k)
            recorder.reads.clear()
            recorder.launches.clear()
            capture.num_replays = capture.num_launches = 0
            found = proposer.propose(request_rows(kind, batch, k), [], *memory_of(num, features))
            assert recorder.num_reads == 1, recorder.reads
            assert all(row.num_on_device == k for row in found)
            launched[k] = recorder.num_launches - capture.num_launches
            if kind in ("llama-1b", "eagle"):
                assert capture.num_replays == 1 + (1 if k == K and num <= WHOLE_ROWS else k)
            else:
                assert capture.num_replays == (2 * k if kind == "medusa" else 1 + k)
            assert launched[k] <= 26
    # A parallel draft copies the logits of each further position to where the choice reads them.
    assert launched[K] - launched[2] == {"parallel": K - 2, "medusa": K - 2}.get(kind, 0)


def memory_of(num: int, features: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, OnDevice]:
    """The memory of the draft buffer, for `propose`."""
    ids, new_tokens = (torch.zeros(size, dtype=torch.int32, device=CUDA) for size in ((num, K), (4096,)))
    on_device = OnDevice(ids, torch.zeros(num, K, device=CUDA), new_tokens, to_host)
    return torch.empty(num, K, LLAMA_8B["vocab_size"], device=CUDA), features, on_device


def test_options_that_the_host_applies_take_the_eager_chain() -> None:
    with fake_cuda() as recorder:
        capture = Guarded(recorder)
        proposer, _ = fake_draft("llama-1b", capture, max_requests=2)
        batch = batch_of([SamplingParams(temperature=0.0, presence_penalty=0.5)] * 2, K)
        processor = batch.spans[0].request.logits_processor
        assert processor is not None
        rows = [
            DraftRequestRow(row.key, row.start, row.new_tokens, row.k, row.sampling, processor.options)
            for row in request_rows("llama-1b", batch)
        ]
        capture.num_replays = 0
        recorder.reads.clear()
        proposer.propose(rows, [], *memory_of(2, None))
        assert recorder.num_reads == 1
        assert capture.num_replays == K  # The forwards are recorded on their own as well.


@pytest.mark.parametrize(("choice", "plain", "fused"), [("greedy", 8, 6), ("sampled", 51, 7), ("truncated", 80, 80)])
def test_the_fused_choice_is_one_launch(choice: str, plain: int, fused: int) -> None:
    """`kernel: triton`. The others copy the token to the results and count the position; truncation is not fused."""
    samplings = SAMPLINGS[choice][:1] * 2
    rows = ChainRows(
        ks=np.array([1, 1]),
        samplings=samplings,
        seeds=[[3], [4]],
        positions=np.array([5, 9]),
        kv_lens=np.array([5, 9], dtype=np.int32),
        slots=np.zeros((1, 2), dtype=np.int64),
        block_tables=np.zeros((2, 1), dtype=np.int32),
    )
    for is_fused, most in ((False, plain), (True, fused)):
        with fake_cuda() as recorder:
            capture = Guarded(recorder)
            chain = RecordedChain(
                *((2,), capture), max_k=2, columns=128_256, vocab=None, device=CUDA, model=None, fused=is_fused
            )
            capture.num_launches = 0
            chain.draft(rows)
            assert capture.num_launches == most
