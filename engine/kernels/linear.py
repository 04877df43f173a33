"""Matrix products whose rows do not depend on how many rows there are.

Owns one program per tile of the output. Tiles have one size, whatever the batch, and a program adds up the inner
dimension from its beginning to its end. So the bits of an output depend on its row of inputs alone. cuBLAS chooses
tiles, and splits of the inner dimension, by the number of rows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the annotations of a kernel, so that its arguments cannot have types.

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

ROWS, COLUMNS, INNER = 64, 32, 64
"""Size of a tile, and how much of the inner dimension a step of a program takes."""


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of x W^T + b. The number of rows is not specialised, so that all batches run the same machine code."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    real, inside = row < num_rows, column < OUT
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, IN, INNER):
        k = start + inner
        left = tl.load(x + row[:, None] * IN + k[None, :], mask=real[:, None] & (k < IN)[None, :], other=0.0)
        right = tl.load(weight + column[:, None] * IN + k[None, :], mask=inside[:, None] & (k < IN)[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@torch.library.custom_op("paceline::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b, added up in float32. One launch.

    Args:
        x: [N, in] contiguous.
        weight: [out, in] contiguous; less than 2^31 elements.
        bias: [out], or None.

    Returns:
        [N, out] in the dtype of `x`.
    """
    num_rows, size = x.shape
    columns = weight.shape[0]
    out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    linear_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(columns, COLUMNS))](
        *(x, weight, weight if bias is None else bias, out, num_rows),
        IN=size,
        OUT=columns,
        HAS_BIAS=bias is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        INNER=INNER,
        num_warps=4,
    )
    return out


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return x.new_empty(x.shape[0], weight.shape[0])


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The twin of `linear`."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
