"""The static inputs of a recorded forward: arrays on the host, device memory of the same layout, and what is in them.

Owns the layout, the copy and the padding. Rows that pad a bucket write to the scratch block, and nothing reads what
they compute. Knows no model and no recording (`engine.graphs.forward`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.step import ForwardInput, TreeMask
from engine.graphs.buckets import Bucket
from engine.sampling.staging import DTYPES
from engine.tree_paths import find_paths

Arrays = dict[str, npt.NDArray[Any]]


class StaticInputs:
    """The inputs of one recording.

    Args:
        layout: shape and element type of each array.
        device: of the tensors.
    """

    def __init__(self, layout: Mapping[str, tuple[tuple[int, ...], str]], device: torch.device) -> None:
        places: dict[str, tuple[int, int]] = {}
        total = 0
        for name, (shape, dtype) in layout.items():
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            places[name] = (total, total + num_bytes)
            total += -(-num_bytes // 16) * 16
        self._host = torch.zeros(total, dtype=torch.uint8)
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        numbers = self._host.numpy()
        self.arrays: Arrays = {}
        """On the host, to be written."""
        self.tensors: dict[str, torch.Tensor] = {}
        """On the device. They never move."""
        for name, (shape, dtype) in layout.items():
            start, end = places[name]
            self.arrays[name] = numbers[start:end].view(dtype).reshape(shape)
            self.tensors[name] = self._device[start:end].view(DTYPES[dtype]).view(shape)

    def upload(self) -> None:
        """Queue one copy of the arrays to the device. They may be written again at once.

        The device may read its source much later, when the host fills the arrays for the next position. So each copy
        has pinned memory of its own, which PyTorch gives out again when the device is done with it.
        """
        staged = torch.empty(self._host.shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._device.copy_(staged.copy_(self._host), non_blocking=True)


def fill_spans(arrays: Arrays, forward_input: ForwardInput, bucket: Bucket) -> None:
    """Write a forward and its padding. Padding rows have token 0, position 0 and KV slot 0, in the scratch block.

    Each span that pads the bucket takes one padding row and attends to slot 0. Further padding rows belong to no span.
    """
    num_rows, num_spans = len(forward_input.token_ids), len(forward_input.q_lens)
    for name, values in (
        ("token_ids", forward_input.token_ids),
        ("positions", forward_input.positions),
        ("slots", forward_input.slots),
    ):
        arrays[name][:num_rows] = values
        arrays[name][num_rows:] = 0
    arrays["places"][:] = -1
    if forward_input.device_tokens is not None:
        arrays["places"][:num_rows] = forward_input.device_tokens.places
    num_padding = min(bucket.spans - num_spans, bucket.rows - num_rows)
    q_lens = np.zeros(bucket.spans, dtype=np.int32)
    q_lens[:num_spans] = forward_input.q_lens
    q_lens[num_spans : num_spans + num_padding] = 1
    kv_lens = arrays["kv_lens"]
    kv_lens[:num_spans] = forward_input.kv_lens
    kv_lens[num_spans:] = q_lens[num_spans:]
    for name, lengths in (("cu_q", q_lens), ("cu_kv", kv_lens)):
        arrays[name][0] = 0
        np.cumsum(lengths, out=arrays[name][1:])
    tables = arrays["block_tables"]
    width = min(forward_input.block_tables.shape[1], tables.shape[1])
    tables[:] = 0
    tables[:num_spans, :width] = forward_input.block_tables[:, :width]


def fill_trees(arrays: Arrays, tree: TreeMask | None, block_size: int) -> None:
    """Write the trees of a forward, after `fill_spans`. Every row of a span is on a path, those that pad it too.

    Rows of no span see KV slot 0 alone. What flash attention leaves in them is not used.
    """
    num_slots = np.zeros(len(arrays["kv_lens"]), dtype=np.int32)
    words = np.zeros(len(arrays["slots"]), dtype=np.uint64)
    if tree is not None:
        num_slots[: len(tree.num_slots)] = tree.num_slots
        words[: len(tree.ancestors)] = tree.ancestors
    if "ancestors" in arrays:
        arrays["num_tree_slots"][:] = num_slots
        arrays["ancestors"][:] = words.view(np.int64)
        return
    hidden, kv_lens = arrays["hidden"], arrays["kv_lens"]
    found = find_paths(
        *(np.diff(arrays["cu_q"]), kv_lens, arrays["block_tables"], num_slots, words),
        block_size=block_size,
        whole=True,
        width=hidden.shape[1] - 1,
    )
    arrays["paths"][:] = 0
    hidden[:] = True
    hidden[:, 1] = False
    arrays["paths"][found.rows], hidden[found.rows] = found.slots, found.hidden
    kv_lens[:] = 1
    kv_lens[found.spans] = np.maximum(found.context_lens, 1)
    np.cumsum(kv_lens, out=arrays["cu_kv"][1:])
