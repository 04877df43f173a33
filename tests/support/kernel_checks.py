"""The Triton kernels against their twins, under Triton's interpreter: `python kernel_checks.py NAME`.

A process of its own, because the interpreter must be chosen before Triton is imported. Ends with status 0 if equal.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
# The interpreter multiplies with NumPy. The bits of a product of newer x86 cores depend on the row's place in a tile,
# which those of a GPU's tensor cores do not.
os.environ["OPENBLAS_CORETYPE"] = "Nehalem"

import random
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from tiny_models import VOCAB, random_cuts, run_cuts, write_model

from engine.core.packing import SpanRows, pack_spans
from engine.kernels.choose import choose, choose_reference
from engine.kernels.e4m3 import decoded, encoded
from engine.kernels.elementwise import add_rms_norm, add_rms_norm_reference, silu_mul, silu_mul_reference
from engine.kernels.linear import linear, linear_reference
from engine.kernels.paged_attention import num_splits, paged_attention, paged_attention_reference
from engine.kernels.rope_cache import rope_cache, rope_cache_reference
from engine.model.attention import KernelAttention, ReferenceAttention, make_attention
from engine.model.collectives import Solo
from engine.model.decoder import Decoder, LayerCache, dense_mlp
from engine.model.device import Compute
from engine.model.fused_decoder import FusedDecoder, InvariantDecoder, InvariantLinear
from engine.model.load import load_model
from engine.model.runner import ModelRunner
from engine.quantization.kv_cache import FP8, dequantised, quantised
from engine.tree import ancestor_masks

BOUND = {torch.float32: 2e-5, torch.float16: 6e-3}
"""By element type. The interpreter has no correct bfloat16; the kernels treat both 16-bit types alike."""


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    difference = (found.float() - expected.float()).abs().max().item()
    assert difference <= BOUND[found.dtype], (found.dtype, difference)
    assert expected.abs().max().item() > 0.1


def check_elementwise() -> None:
    for dtype in BOUND:
        for rows, size in ((1, 64), (5, 576), (3, 1536)):
            hidden, delta = (torch.randn(rows, size).to(dtype) for _ in range(2))
            weight = (1 + 0.2 * torch.randn(size)).to(dtype)
            twin = hidden.clone()
            close(add_rms_norm(hidden, delta, weight, 1e-5), add_rms_norm_reference(twin, delta, weight, 1e-5))
            assert torch.equal(hidden, twin)
            gate, up = (torch.randn(rows, size).to(dtype) for _ in range(2))
            gate_twin = gate.clone()
            silu_mul(gate, up)
            silu_mul_reference(gate_twin, up)
            close(gate, gate_twin)


def check_rope_cache() -> None:
    for dtype in BOUND:
        for heads, kv_heads, dim, norm in ((4, 2, 64, False), (3, 3, 32, True), (8, 2, 16, True)):
            qkv = torch.randn(5, heads + 2 * kv_heads, dim).to(dtype)
            angles = torch.rand(5, dim // 2) * 6
            cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype).unsqueeze(1)
            sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype).unsqueeze(1)
            slots = torch.tensor([3, 0, 30, 17, 8])
            weights = [(1 + 0.2 * torch.randn(dim)).to(dtype) if norm else None for _ in range(2)]
            results = []
            for run in (rope_cache, rope_cache_reference):
                copy, keys, values = qkv.clone(), *(torch.zeros(2, 16, kv_heads, dim, dtype=dtype) for _ in range(2))
                run(copy, cos, sin, slots, keys, values, *weights, 1e-6)
                results.append((copy[:, :heads].contiguous(), keys, values))
            for found, expected in zip(*results, strict=True):
                close(found, expected)


def check_paged_attention() -> None:
    assert [num_splits(rows, 32, 128, 131_072) for rows in (1, 64, 512, 4096)] == [256, 64, 8, 1]
    assert [num_splits(1, 32, 128, max_kv) for max_kv in (1, 512, 513)] == [1, 1, 2]
    for dtype in BOUND:
        for heads, kv_heads, dim, block in ((4, 1, 32, 64), (8, 2, 16, 128)):
            q_lens, kv_lens = [1, 4, 3, 2], [70, 4, 600, 129]
            table = torch.randperm(40)[: 4 * 10].view(4, 10).int()
            keys, values = (torch.randn(40, block, kv_heads, dim).to(dtype) for _ in range(2))
            rows = sum(q_lens)
            wide = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
            query = wide[:, :heads]  # Rows with a stride, as in a model.
            cu_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
            lens = torch.tensor(kv_lens, dtype=torch.int32)
            # Chains, then trees: a root position with three nodes, three nodes of a tree of five slots, and two rows.
            slots = torch.tensor([0, 3, 5, 0], dtype=torch.int32)
            words = torch.tensor([0, 0, 1, 2, 5, 5, 9, 22, 0, 0])
            for trees in ((None, None), (slots, words)):
                arguments = (query, keys, values, cu_q, lens, table, *trees, 4, 600)
                close(paged_attention(*arguments), paged_attention_reference(*arguments))
            assert not torch.equal(paged_attention(*arguments), paged_attention(*arguments[:6], None, None, 4, 600))


@triton.jit
def code_kernel(numbers, codes, back, SIZE: tl.constexpr):
    """Codes of numbers, and what they stand for."""
    place = tl.arange(0, SIZE)
    found = encoded(tl.load(numbers + place))
    tl.store(codes + place, found)
    tl.store(back + place, decoded(found).to(tl.float32) * 256.0)


def check_e4m3() -> None:
    """Every code, the middle between each two, numbers beside it, and random ones of any size."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()
    exact = every[every.isfinite()]
    middles = (exact.sort().values[1:] + exact.sort().values[:-1]) / 2
    near = torch.cat((middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(-1e9))))
    num_random = 2048 - len(exact) - len(middles) - len(near)
    others = torch.randn(num_random) * torch.logspace(-4, 2, num_random)
    numbers = torch.cat((exact, middles, near, others)).clamp(-448, 448)
    codes, back = torch.zeros(2048, dtype=torch.uint8), torch.zeros(2048)
    code_kernel[(1,)](numbers, codes, back, SIZE=2048)
    expected = numbers.to(torch.float8_e4m3fn)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(back, expected.float())


def records_of(cache: torch.Tensor) -> torch.Tensor:
    return quantised(cache * torch.rand(*cache.shape[:3], 1) * 3, FP8)


def check_fp8_rope_cache() -> None:
    """The scales differ in their last bit at most. The codes are the same but where that bit moves a middle."""
    for dtype in BOUND:
        heads, kv_heads, dim = 4, 2, 64
        qkv = torch.randn(5, heads + 2 * kv_heads, dim).to(dtype)
        qkv[2, heads:] = 0
        cos, sin = torch.ones(5, 1, dim, dtype=dtype), torch.zeros(5, 1, dim, dtype=dtype)
        slots = torch.tensor([3, 0, 30, 17, 8])
        results = []
        for run in (rope_cache, rope_cache_reference):
            copy, caches = qkv.clone(), [torch.zeros(2, 16, kv_heads, dim + 4, dtype=torch.uint8) for _ in range(2)]
            run(copy, cos, sin, slots, *caches, None, None, 1e-6)
            results.append([copy, *(dequantised(cache, torch.float32) for cache in caches)])
        for found, expected in zip(*results, strict=True):
            close(found, expected)
        for cache, rows in zip(results[0][1:], (qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]), strict=True):
            off = (cache.view(-1, kv_heads, dim)[slots] - rows.float()).abs()
            assert (off <= rows.float().abs() / 16 + rows.float().abs().amax(-1, keepdim=True) / 448 / 512).all()
            assert not cache.view(-1, kv_heads, dim)[30].any()
            assert int((cache.view(-1, kv_heads * dim) != 0).any(1).sum()) == 4


def check_fp8_attention() -> None:
    """The kernel against its twin; then the attention of a model, prompts longer than a program and trees included,
    against plain loops over the dequantised cache."""
    for dtype in BOUND:
        heads, kv_heads, dim = 4, 1, 32
        keys, values = (records_of(torch.randn(40, 64, kv_heads, dim)) for _ in range(2))
        table = torch.randperm(39)[: 3 * 10].view(3, 10).int()
        query = torch.randn(8, heads, dim).to(dtype)
        cu_q, lens = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 5, 8], [70, 4, 600]))
        slots, words = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 0, 1, 2, 5, 5, 9, 22])
        for trees in ((None, None), (slots, words)):
            arguments = (query, keys, values, cu_q, lens, table, *trees, 4, 600)
            close(paged_attention(*arguments), paged_attention_reference(*arguments))
    group, block = 8, 64
    prompts = [SpanRows([1] * 40, 3, [1], 1), SpanRows([1] * 16, 0, [2], 1), SpanRows([1], 100, [3, 4], 1)]
    masks = ancestor_masks((-1, 0, 0, 1, *range(3, 16)))
    tree = SpanRows([1] * 19, 50, [5, 6], 1, list(range(50, 69)), num_tree_slots=17, ancestors=masks)
    attention = KernelAttention(group_size=group, device=torch.device("cpu"))
    for spans in (prompts, [*prompts, tree]):
        plan = pack_spans(spans, block)
        query = torch.randn(len(plan.token_ids), group, 16)
        caches = [records_of(torch.randn(8, block, 1, 16)) for _ in range(2)]
        found = attention.attend(query, *caches, attention.prepare(plan, block_size=block))
        close(found, ReferenceAttention().attend(query, *caches, plan))


def check_choose() -> None:
    """Greedy and sampled rows; equal logits, excluded tokens, a row of equal columns; more columns than one step."""
    for rows, size in ((1, 17), (5, 300), (3, 9001)):
        logits = (4 * torch.randn(rows, size)).round(decimals=1)
        logits[:, 3] = float("-inf")
        logits[-1] = 0.5
        temperature = torch.rand(rows, 1) + 0.2
        greedy = torch.arange(rows).unsqueeze(1) % 2 == 1
        words = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32)
        ids = torch.randperm(size) * 7
        depth = torch.tensor([1])
        for draws in (False, True):
            results = []
            for run in (choose, choose_reference):
                probs = torch.zeros(rows, 3, size)
                results.append((*run(logits, temperature, greedy, words, ids, depth, probs, draws), probs))
            (columns, confidences, probs), (expected, of_twin, probs_of_twin) = results
            assert torch.equal(columns, expected)
            assert (confidences - of_twin).abs().max() <= 1e-6
            assert (probs - probs_of_twin).abs().max() <= 1e-6
            assert (probs[:, 1].sum(1) > 0.99).all() if draws else not probs.any()
            assert not probs[:, [0, 2]].any()
    # The draws of many seeds are those of the twin, which compares the largest noise of each row.
    words = torch.randint(-(2**31), 2**31, (400, 2), dtype=torch.int32)
    logits, ids = torch.zeros(400, 50), torch.arange(50)
    ones, nobody = torch.ones(400, 1), torch.zeros(400, 1, dtype=torch.bool)
    arguments = (logits, ones, nobody, words, ids, torch.tensor([0]), torch.zeros(400, 1, 50), True)
    assert torch.equal(choose(*arguments)[0], choose_reference(*arguments)[0])


def check_fused_decoder() -> None:
    """The whole forward, with float32 weights and PyTorch's attention: prefill, then verification."""
    for family in ("llama", "qwen3"):
        with tempfile.TemporaryDirectory() as folder:
            model = load_model(write_model(Path(folder) / "m", family), dtype=torch.float32, kernel="torch")
        assert isinstance(model, Decoder)
        compute = Compute(torch.float32, torch.device("cpu"), "torch")
        fold = model.config.num_heads // model.config.num_kv_heads
        attention = make_attention("padded", group_size=fold, dtype=torch.float32, device=compute.device)
        fused = FusedDecoder(
            model.config, model._weights, compute, collectives=Solo(), attention={0: attention}, feature_layers=(0, 1)
        )
        model.feature_layers = (0, 1)
        results = []
        for decoder in (model, fused):
            shape = (6, 16, decoder.num_kv_heads, decoder.config.head_dim)
            caches = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(decoder.config.num_layers)]
            first = decoder.forward(pack_spans([SpanRows(list(range(3, 20)), 0, [1, 2], 1)], 16), caches)
            second = decoder.forward(
                pack_spans([SpanRows([4, 5, 6], 17, [1, 2], 3), SpanRows([7], 0, [5], 1)], 16), caches
            )
            results.append((first.logits, second.logits, second.hidden, caches[1].keys, caches[1].values))
        for found, expected in zip(results[1], results[0], strict=True):
            assert found is not None
            assert expected is not None
            close(found, expected)


def check_linear() -> None:
    """Sizes that are no multiples of a tile; and the bits of a row are those that it has alone, at any place."""
    for dtype in BOUND:
        for rows, size, columns in ((1, 64, 32), (70, 100, 45), (3, 200, 70)):
            x, weight = torch.randn(rows, size).to(dtype), (torch.randn(columns, size) / size**0.5).to(dtype)
            for bias in (None, torch.randn(columns).to(dtype)):
                close(linear(x, weight, bias), linear_reference(x, weight, bias))
        x = torch.randn(70, 200).to(dtype)
        alone = torch.cat([linear(row[None], weight, None) for row in x])
        for first, last in ((0, 70), (3, 70), (60, 67), (5, 7), (0, 0)):
            assert torch.equal(linear(x[first:last], weight, None), alone[first:last])


def check_invariant() -> None:
    """The bits of a row of a whole forward do not depend on its neighbours, nor on how its prompt is cut. No product is
    left to PyTorch."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (5, 20, 70)]
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "m", "qwen3", num_hidden_layers=1)
        model = load_model(path, dtype=torch.float32, kernel="torch")
    assert isinstance(model, Decoder)
    compute, group = Compute(torch.float32, torch.device("cpu"), "torch"), model.config.num_heads // model.num_kv_heads
    attention = KernelAttention(group_size=group, device=compute.device, invariant=True)
    decoder = InvariantDecoder(
        model.config, model._weights, compute, collectives=Solo(), attention={0: attention}, feature_layers=()
    )
    weights, (layer,) = decoder._weights, decoder._weights.layers
    mlp = dense_mlp(layer)
    for part in (weights.head, layer.qkv, layer.o, mlp.gate, mlp.up, mlp.down):
        assert isinstance(part, InvariantLinear)
    runner = ModelRunner(decoder, num_blocks=8, block_size=64)
    alone = [run_cuts(runner, [prompt], [[len(prompt)]])[0] for prompt in prompts]
    exact = run_cuts(ModelRunner(model, num_blocks=8, block_size=64), prompts, [[len(each)] for each in prompts])
    together = run_cuts(runner, prompts, [random_cuts(rng, len(prompt), 25) for prompt in prompts])
    for found, expected, of_batch in zip(alone, exact, together, strict=True):
        close(found, expected)
        assert torch.equal(found, of_batch)


def check_invariant_attention() -> None:
    """Beside a span of many splits, and as rows of a longer span, a row has the bits that it has alone. Without the
    option it has not."""
    group, dim, block = 4, 32, 64
    caches = [torch.randn(12, block, 1, dim) for _ in range(2)]
    blocks, other = [1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 1, 2, 3]
    short, long = SpanRows([1] * 5, 200, blocks, 1), SpanRows([1], 600, other, 1)
    query = torch.randn(6, group, dim)
    equal = []
    for invariant in (True, False):
        attention = KernelAttention(group_size=group, device=torch.device("cpu"), invariant=invariant)

        def attended(spans: list[SpanRows], rows: torch.Tensor, attention: KernelAttention = attention) -> torch.Tensor:
            plan = pack_spans(spans, block)
            return attention.attend(rows, *caches, attention.prepare(plan, block_size=block))

        both, alone = attended([short, long], query), attended([short], query[:5])
        single = [attended([SpanRows([1], 200 + row, blocks, 1)], query[row : row + 1]) for row in range(5)]
        equal.append(torch.equal(both[:5], alone) and torch.equal(alone, torch.cat(single)))
    assert equal == [True, False], equal


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        globals()[f"check_{sys.argv[1]}"]()
