"""Quantised weights as codes: the values of dequantised ones, the form they have, and which weights have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised_models import pack_words

from engine.quantization.codes import has_codes, read_codes
from engine.quantization.config import Quantization
from engine.quantization.dequantize import dequantise
from engine.quantization.weight import Quantised, Rows, stacked_rows

NAME, OUT = "w.weight", 8


class Files(dict[str, torch.Tensor]):
    """Tensors by name, read like those of a checkpoint."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def read(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        assert tuple(self[name].shape) == shape
        return self[name][(rows or slice(None), cols or slice(None))[: len(shape)]]


def compressed(**weights: Any) -> Quantization:
    found = Quantization.parse({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}})
    assert found is not None
    return found


def gptq(**values: Any) -> Quantization:
    found = Quantization.parse({"quant_method": "gptq", **values})
    assert found is not None
    return found


def grid(groups: int, scale: float = 0.25) -> torch.Tensor:
    """[OUT, groups] scales that float16 holds."""
    return (1.0 + torch.arange(OUT * groups).view(OUT, groups)) * scale


def integers(low: int, high: int, width: int) -> torch.Tensor:
    """[OUT, width] that begin with the smallest and the largest value."""
    torch.manual_seed(1)
    values = torch.randint(low, high + 1, (OUT, width))
    values[0, :2] = torch.tensor([low, high])
    return values


def int8(width: int, groups: int, scale: float = 0.25, zero: int | None = None) -> Files:
    files = Files({NAME: integers(-128, 127, width).to(torch.int8), "w.weight_scale": grid(groups, scale)})
    if zero is not None:
        files["w.weight_zero_point"] = torch.full((OUT, groups), zero, dtype=torch.int8)
    return files


def packed4(width: int, groups: int) -> Files:
    return Files({"w.weight_packed": pack_words(integers(0, 15, width), 4), "w.weight_scale": grid(groups)})


def stored_gptq(width: int, groups: int, bits: int, index: torch.Tensor | None = None) -> Files:
    top = (1 << bits) - 1
    zeros = integers(0, top - 1, groups).t() if groups > 1 else torch.full((1, OUT), 3)
    files = Files(
        {
            "w.qweight": pack_words(integers(0, top, width), bits).t(),
            "w.qzeros": pack_words(zeros, bits),
            "w.scales": grid(groups).t(),
        }
    )
    if index is not None:
        files["w.g_idx"] = index
    return files


SHUFFLED = torch.tensor([1, *[0] * 31, *[1] * 31, 0], dtype=torch.int32)
SORTED = torch.tensor([0] * 32 + [1] * 32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("files", "quantization", "form"),
    [
        (int8(64, 1), compressed(strategy="channel"), (8, 0, False, True, 64)),
        (int8(48, 3), compressed(group_size=16), (8, 0, False, True, 16)),
        (int8(48, 3, scale=0.1), compressed(group_size=16), (8, 0, False, False, 16)),
        (int8(64, 2, zero=4), compressed(group_size=32, symmetric=False), (8, 0, True, True, 32)),
        (packed4(64, 2), compressed(num_bits=4, group_size=32), (4, -8, False, True, 32)),
        (stored_gptq(64, 2, 4), gptq(group_size=32), (4, 0, True, True, 32)),
        (stored_gptq(64, 2, 8), gptq(group_size=32, bits=8), (8, 0, True, True, 32)),
        (stored_gptq(64, 2, 4, SORTED), gptq(group_size=32, checkpoint_format="gptq_v2"), (4, 0, True, True, 32)),
    ],
)
def test_codes_have_the_values_of_the_dequantised_weight(
    files: Files, quantization: Quantization, form: tuple[Any, ...]
) -> None:
    width = 48 if form[4] == 16 else 64
    assert has_codes(files, quantization, NAME, (OUT, width))
    for rows in (slice(0, OUT), slice(3, 7)):
        codes = read_codes(files, quantization, NAME, (OUT, width), rows)
        expected = dequantise(files, quantization, NAME, (OUT, width), rows, slice(0, width))
        assert torch.equal(torch.from_numpy(codes.values()), expected)
        found = (codes.bits, codes.offset, codes.minimums is not None, codes.is_half, codes.block)
        assert found == form
        assert codes.scales.shape == (rows.stop - rows.start, width // codes.block)


def test_one_scale_for_all_is_spread_over_the_rows() -> None:
    files = Files({NAME: integers(-128, 127, 32).to(torch.int8), "w.weight_scale": torch.tensor([0.5])})
    codes = read_codes(files, compressed(), NAME, (OUT, 32), slice(2, 5))
    assert (codes.scales.tolist(), codes.minimums, codes.block) == ([[0.5]] * 3, None, 32)


@pytest.mark.parametrize(
    ("files", "quantization", "width", "expected"),
    [
        (int8(48, 2), compressed(group_size=24), 48, False),
        (int8(48, 2), compressed(group_size=32), 48, False),
        (int8(48, 1), compressed(strategy="channel"), 48, True),
        (int8(40, 1), compressed(strategy="channel"), 40, False),
        (int8(64, 4, scale=0.1, zero=3), compressed(group_size=16, symmetric=False), 64, False),
        (int8(64, 4, scale=0.1, zero=4), compressed(group_size=16, symmetric=False), 64, False),
        (int8(64, 4, scale=2.0**118, zero=3), compressed(group_size=16, symmetric=False), 64, False),
        (int8(64, 4, scale=2.0**100, zero=3), compressed(group_size=16, symmetric=False), 64, True),
        (int8(64, 4, scale=0.1, zero=0), compressed(group_size=16, symmetric=False), 64, True),
        (stored_gptq(64, 2, 4, SHUFFLED), gptq(group_size=32), 64, False),
        (
            Files({NAME: torch.zeros(OUT, 64).to(torch.float8_e4m3fn), "w.weight_scale": grid(1)}),
            compressed(type="float", strategy="channel"),
            64,
            False,
        ),
    ],
)
def test_which_weights_have_codes(files: Files, quantization: Quantization, width: int, expected: bool) -> None:
    assert has_codes(files, quantization, NAME, (OUT, width)) == expected


class OneWeight:
    """Files of one weight."""

    def __init__(self, files: Files, quantization: Quantization) -> None:
        self._files, self._quantization = files, quantization

    def read_codes(self, name: str, shape: tuple[int, int], rows: slice) -> Any:
        return read_codes(self._files, self._quantization, name, shape, rows)

    def read_float(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        assert rows is not None
        return dequantise(self._files, self._quantization, name, (shape[0], shape[1]), rows, slice(0, shape[1]))


def test_rows_of_several_weights_are_one_weight() -> None:
    files = OneWeight(int8(32, 1), compressed(strategy="channel"))
    first, second = (Quantised((Rows(files, NAME, (OUT, 32), part),)) for part in (slice(1, 3), slice(4, 8)))
    both = stacked_rows([first, second])
    assert isinstance(both, Quantised)
    assert both.shape == (6, 32)
    whole = files.read_float(NAME, (OUT, 32), rows=slice(0, OUT))
    expected = torch.cat([whole[1:3], whole[4:8]])
    assert torch.equal(torch.from_numpy(both.codes().values()), expected)
    assert torch.equal(both.dequantised(), expected.bfloat16())
    assert torch.equal(both.dequantised(torch.float32), expected)
    mixed = stacked_rows([first, torch.ones(1, 32, dtype=torch.bfloat16)])
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, torch.cat([whole[1:3].bfloat16(), torch.ones(1, 32, dtype=torch.bfloat16)]))
