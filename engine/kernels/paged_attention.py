"""Attention of decode and verify rows over the paged KV cache, with split KV and packed query heads.

Owns spans of few rows. All query heads of a KV head and all rows of a span share one program, so K and V are read once
for them. The KV length is split over programs, whose results a second kernel combines (Flash-Decoding: Dao et al.
2023). A row sees the context and, among the rows of its own span, those before it; in a tree, its ancestors.

    program (span s, KV head g, split i)   [rows x heads of g] @ K of split i -> partial sum, maximum, denominator
    program (row n, query head h)          partial results of all splits      -> output
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the annotations of a kernel, so that its arguments cannot have types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import CUT_PACKED, PARTIAL_BYTES
from engine.kernels.e4m3 import decoded, float_view
from engine.quantization.kv_cache import FP8, dequantised

KEYS, FP8_KEYS = 64, 32
"""Keys of one step of a program; divides the block size of the cache. Fewer of a cache in FP8, whose decoding takes
registers."""
MAX_PACKED = 128
"""Most rows x heads of one program."""
TOKENS_PER_SPLIT = 512


@triton.jit(do_not_specialize=["table_width"])
def attend_split_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    cu_q,
    kv_lens,
    tables,
    tree_slots,
    ancestors,
    partial,
    maxima,
    sums,
    scale,
    query_stride,
    table_width,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    TREES: tl.constexpr,
    RECORD: tl.constexpr,
):
    """One span, one KV head and one split of the KV length.

    RECORD is the size of a record of the cache in FP8, or 0 for a cache of the type of `query`.
    """
    WIDTH: tl.constexpr = RECORD if RECORD else DIM
    span = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(cu_q + span)
    q_len = tl.load(cu_q + span + 1) - first
    kv_len = tl.load(kv_lens + span)
    packed = tl.arange(0, ROWS)
    row = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    real = row < q_len
    column = tl.arange(0, DIM)
    query += first.to(tl.int64) * query_stride
    q = tl.load(
        query + row[:, None] * query_stride + head[:, None] * DIM + column[None, :], mask=real[:, None], other=0.0
    )
    if TREES:
        num_tree_slots = tl.load(tree_slots + span)
        word = tl.load(ancestors + first + row, mask=real, other=0)
        is_node = row >= q_len - num_tree_slots
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM], tl.float32)
    num_blocks = tl.cdiv(kv_len, BLOCK)
    per_split = tl.cdiv(num_blocks, SPLITS)
    for block in range(split * per_split, tl.minimum((split + 1) * per_split, num_blocks)):
        position = block * BLOCK + tl.arange(0, BLOCK)
        inside = position < kv_len
        page = tl.load(tables + span * table_width + block * BLOCK // PAGE).to(tl.int64)
        # One 64-bit offset per block: 64-bit offsets of every element would not fit into registers.
        base = page * (PAGE * KV_HEADS * WIDTH) + kv_head * WIDTH
        offset = (block * BLOCK % PAGE + tl.arange(0, BLOCK)) * (KV_HEADS * WIDTH)
        place = offset[:, None] + column[None, :]
        k = tl.load(keys + base + place, mask=inside[:, None], other=0.0)
        if RECORD:
            k = decoded(k).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if RECORD:  # One scale per key, so it multiplies a column of scores. The codes were divided by 256.
            at = (base + DIM) // 4 + offset // 4
            scores *= tl.load(key_scales + at, mask=inside, other=0.0)[None, :] * 256.0
        own = position - (kv_len - q_len)
        seen = own[None, :] <= row[:, None]
        if TREES:
            node = position - (kv_len - num_tree_slots)
            bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
            on_path = (node < 0)[None, :] | (((word[:, None] >> bit[None, :]) & 1) == 1)
            seen = tl.where(is_node[:, None], on_path, seen)
        scores = tl.where(seen & inside[None, :] & real[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # A row may see no key of this split.
        shrink = tl.exp(top - finite)
        p = tl.exp(scores - finite[:, None])
        v = tl.load(values + base + place, mask=inside[:, None], other=0.0)
        total = total * shrink + tl.sum(p, axis=1)
        if RECORD:
            v = decoded(v).to(q.dtype)
            p *= tl.load(value_scales + at, mask=inside, other=0.0)[None, :] * 256.0
        result = result * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    where = ((first + row).to(tl.int64) * KV_HEADS * GROUP + head) * SPLITS + split
    tl.store(partial + where[:, None] * DIM + column[None, :], result, mask=real[:, None])
    tl.store(maxima + where, top, mask=real)
    tl.store(sums + where, total, mask=real)


@triton.jit
def combine_kernel(partial, maxima, sums, out, DIM: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """One row and one query head: the splits' results, weighted by their shares of the softmax denominator."""
    where = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, WIDTH)
    real = split < SPLITS
    column = tl.arange(0, DIM)
    top = tl.load(maxima + where * SPLITS + split, mask=real, other=float("-inf"))
    share = tl.exp(top - tl.max(top, axis=0))
    denominator = tl.sum(share * tl.load(sums + where * SPLITS + split, mask=real, other=0.0), axis=0)
    rows = tl.load(partial + (where * SPLITS + split)[:, None] * DIM + column[None, :], mask=real[:, None], other=0.0)
    total = tl.sum(rows * share[:, None], axis=0) / denominator
    tl.store(out + where * DIM + column, total.to(out.dtype.element_ty))


def num_warps(packed: int) -> int:
    """Warps of a program of `packed` rows x heads, so that its accumulators fit into registers."""
    return 8 if packed >= 64 else 4


def num_stages(*, trees: bool) -> int:
    """Steps of a program in flight: of chains the page of a step is loaded one step ahead of its keys. With trees that
    spills registers on a B200."""
    return 2 if trees else 3


def num_splits(num_rows: int, num_heads: int, dim: int, max_kv: int) -> int:
    """Programs that share the KV length of a span: fewer for many rows, so that their results fit into memory."""
    most = PARTIAL_BYTES // (4 * num_rows * num_heads * dim)
    return max(1, min(-(-max_kv // TOKENS_PER_SPLIT), most))


@torch.library.custom_op("paceline::paged_attention", mutates_args=())
def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_tree_slots: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    max_q: int,
    max_kv: int,
    invariant: bool = False,
) -> torch.Tensor:
    """Attention of spans of at most `max_q` rows. Two launches.

    Args:
        query: [N, H, D]; D is a power of two. The rows may have a stride.
        keys, values: [num_blocks, block_size, G, D], the cache; block_size is a multiple of 64. For FP8 uint8 records
            of D + 4.
        cu_q: [S + 1] int32 cumulative rows.
        kv_lens: [S] int32 KV length of each span, its rows included.
        block_tables: [S, W] int32.
        num_tree_slots: [S] int32 KV slots at the end of each span that belong to a tree; None: nothing branches.
        ancestors: [N] int64 bits of each row's ancestors in its tree and of itself; None likewise.
        max_q: most rows of a span; max_q * H / G is at most 128.
        max_kv: largest KV length.
        invariant: whether the bits of a row depend on nothing but its span: programs have one size, of 64 rows x query
            heads, and nothing is split, which takes long for few long spans. max_q * H / G is then at most 64.

    Returns:
        [N, H * D].
    """
    num_rows, num_heads, dim = query.shape
    kv_heads, is_fp8 = keys.shape[2], keys.dtype is FP8
    group = num_heads // kv_heads
    packed = max(CUT_PACKED if invariant else 16, triton.next_power_of_2(max_q * group))
    if packed > MAX_PACKED or keys.shape[1] % KEYS:
        raise ValueError(
            f"{max_q} rows x {group} heads, blocks of {keys.shape[1]}: more than {MAX_PACKED}, or not x {KEYS}"
        )
    splits = 1 if invariant else num_splits(num_rows, num_heads, dim, max_kv)
    shape = (num_rows, num_heads, splits)
    partial = torch.empty(*shape, dim, dtype=torch.float32, device=query.device)
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    out = torch.empty(num_rows, num_heads * dim, dtype=query.dtype, device=query.device)
    attend_split_kernel[(len(kv_lens), kv_heads, splits)](
        query,
        keys,
        values,
        float_view(keys),
        float_view(values),
        cu_q,
        kv_lens,
        block_tables,
        kv_lens if num_tree_slots is None else num_tree_slots,
        kv_lens if ancestors is None else ancestors,
        partial,
        maxima,
        sums,
        dim**-0.5,
        query.stride(0),
        block_tables.shape[1],
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=keys.shape[1],
        ROWS=packed,
        BLOCK=FP8_KEYS if is_fp8 else KEYS,
        SPLITS=splits,
        TREES=num_tree_slots is not None,
        RECORD=keys.shape[3] if is_fp8 else 0,
        num_warps=num_warps(packed),
        num_stages=num_stages(trees=num_tree_slots is not None),
    )
    combine_kernel[(num_rows * num_heads,)](
        partial, maxima, sums, out, DIM=dim, SPLITS=splits, WIDTH=triton.next_power_of_2(splits)
    )
    return out


@paged_attention.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_tree_slots: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    max_q: int,
    max_kv: int,
    invariant: bool = False,
) -> torch.Tensor:
    del keys, values, cu_q, kv_lens, block_tables, num_tree_slots, ancestors, max_q, max_kv, invariant
    return query.new_empty(query.shape[0], query.shape[1] * query.shape[2])


def paged_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_tree_slots: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    max_q: int,
    max_kv: int,
    invariant: bool = False,
) -> torch.Tensor:
    """The twin of `paged_attention`: one span after the other, in float32."""
    del max_q, max_kv, invariant
    group = query.shape[1] // keys.shape[2]
    if keys.dtype is FP8:
        keys, values = (dequantised(cache, torch.float32) for cache in (keys, values))
    out = torch.empty_like(query)
    for span, (kv_len, table) in enumerate(zip(kv_lens.tolist(), block_tables.tolist(), strict=True)):
        first, last = int(cu_q[span]), int(cu_q[span + 1])
        q_len, context = last - first, kv_len - (last - first)
        blocks = table[: -(-kv_len // keys.shape[1])]
        k, v = (cache[blocks].flatten(0, 1)[:kv_len].float().repeat_interleave(group, 1) for cache in (keys, values))
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device)
        seen[:, context:] = seen[:, context:].tril()
        if num_tree_slots is not None and ancestors is not None and num_tree_slots[span] > 0:
            nodes = int(num_tree_slots[span])
            first_node = max(0, q_len - nodes)
            bits = ancestors[first + first_node : last, None] >> torch.arange(nodes, device=query.device)
            seen[first_node:, : kv_len - nodes] = True
            seen[first_node:, kv_len - nodes :] = (bits & 1).bool()
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * query.shape[2] ** -0.5
        probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", probs, v).to(out.dtype)
    return out.flatten(1)
