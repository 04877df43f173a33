"""Building blocks of a decoder layer: linear layers, RMSNorm, the gated MLP and its mixture of experts.

Owns the choice of implementation. For bf16 on a CPU, `PackedLinear` reorders the weight once for oneDNN, which gives
about twice the memory bandwidth of `F.linear` at few rows, and `RmsNorm` runs through the faster LayerNorm kernel.
Everywhere else, and as the reference in tests, both use plain PyTorch operators. Knows nothing of models or shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from engine.checkpoint.families import Activation
from engine.quantization.weight import Quantised

LinearKind = Literal["auto", "reference"]

_NONE, _SILU, _GELU = "none", "swish", "gelu"


class Linear(Protocol):
    """y = x W^T + b: [N, in] -> [N, out], in the dtype of the weight. May fuse an elementwise operation."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b."""
        ...

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x W^T + b)."""
        ...

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        """gelu(x W^T + b), in its tanh approximation."""
        ...

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(x W^T + b) * other, other: [N, out]."""
        ...

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(x W^T + b) + other, other: [N, out]."""
        ...


class PlainLinear:
    """The reference: separate PyTorch operators.

    Args:
        weight: [out, in].
        bias: [out].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self(x), approximate="tanh")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)


class PackedLinear:
    """bf16 on a CPU. The weight is in oneDNN's blocked layout, and elementwise operations use the float32 accumulator.

    Args:
        weight: [out, in] bfloat16. It is copied and may be freed.
        bias: [out] bfloat16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._unary(x, self._weight, self._bias, _NONE, [], "")
        return y

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._unary(x, self._weight, self._bias, _SILU, [], "")
        return y

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._unary(x, self._weight, self._bias, _GELU, [], "tanh")
        return y

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._binary(x, other, self._weight, self._bias, "mul")
        return y

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._binary(x, other, self._weight, self._bias, "add")
        return y


class QuantisedLinear:
    """A layer whose weight stays quantised. Kernels that multiply it as it is read `weight`; called, it dequantises.

    Args:
        weight: [out, in].
        bias: [out].
    """

    def __init__(self, weight: Quantised, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def plain(self) -> PlainLinear:
        """The same layer with a dequantised bfloat16 weight."""
        return PlainLinear(self.weight.dequantised(), self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain()(x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain().silu(x)

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain().gelu_tanh(x)

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.plain().times(x, other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.plain().plus(x, other)


def unwrapped(linear: Linear) -> Linear:
    """The layer below one that adds adapters to it as `base`; other layers as they are."""
    base: Linear = getattr(linear, "base", linear)
    return base


def make_linear(
    weight: torch.Tensor | Quantised, bias: torch.Tensor | None = None, *, kind: LinearKind = "auto"
) -> Linear:
    """The fastest linear layer for the weight's device and dtype.

    Args:
        weight: [out, in].
        bias: [out], with the dtype and device of the weight.
        kind: `reference` forces `PlainLinear`.
    """
    if isinstance(weight, Quantised):
        return QuantisedLinear(weight, bias)
    eligible = kind == "auto" and weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    if eligible and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    The fast path uses that LayerNorm of (x, -x) has mean 0 and so is RMSNorm in its first half.

    Args:
        weight: [size].
        eps: added to the mean square.
        fast: allows the fast path where it is faster: bf16 on a CPU, few rows.
    """

    MAX_FAST_ROWS = 32
    """With more rows, doubling the width costs more than the fast path saves."""

    def __init__(self, weight: torch.Tensor, eps: float, *, fast: bool = False) -> None:
        self.weight = weight
        self._eps = eps
        eligible = fast and weight.device.type == "cpu" and weight.dtype is torch.bfloat16
        self._doubled = torch.cat((weight, weight)) if eligible else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x, [..., size]."""
        size = self.weight.shape[0]
        if self._doubled is None or x.shape[0] > self.MAX_FAST_ROWS:
            return F.rms_norm(x, (size,), self.weight, self._eps)
        mirrored = F.layer_norm(torch.cat((x, x.neg()), -1), (2 * size,), self._doubled, None, self._eps)
        return mirrored[..., :size].contiguous()


class Block(Protocol):
    """A part of a layer whose output is added to the residual: [N, hidden] -> [N, hidden]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        ...

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The output + other."""
        ...


class GatedMlp:
    """down(activation(gate(x)) * up(x)).

    Args:
        gate, up: hidden -> intermediate.
        down: intermediate -> hidden.
        activation: of the gate.
    """

    def __init__(self, gate: Linear, up: Linear, down: Linear, *, activation: Activation = "silu") -> None:
        self.gate, self.up, self.down = gate, up, down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._inner(x))

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.down.plus(self._inner(x), other)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.gate.silu(x) if self._activation == "silu" else self.gate.gelu_tanh(x)
        return self.up.times(x, gated)


class Experts:
    """A mixture of experts. Each row is computed by its `per_token` experts with the highest scores.

    The rows of one expert are one product, so a forward reads the weights of every expert that some row wakes.

    Args:
        router: hidden -> one score per expert.
        experts: by number.
        per_token: experts of each row.
        normalise: whether the weights of a row's experts are scaled to add up to 1.
    """

    def __init__(self, router: Linear, experts: Sequence[GatedMlp], *, per_token: int, normalise: bool) -> None:
        self._router = router
        self._experts = experts
        self._per_token = per_token
        self._normalise = normalise

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._add_to(torch.zeros_like(x), x)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._add_to(other.clone(), x)

    def _add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        probs = self._router(x).float().softmax(-1)  # [N, experts]
        weights, chosen = probs.topk(self._per_token, dim=-1)  # [N, per_token]
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            result = self._experts[number](x.index_select(0, rows)) * weights[rows, place, None]
            out.index_add_(0, rows, result.to(out.dtype))
        return out
