"""CUDA IPC, as far as it can be tested without a GPU: refused allocator settings, and the API of this torch."""

from __future__ import annotations

import inspect

import pytest
from torch.multiprocessing import reductions

from engine.draft_buffer.cuda_ipc import refuse_expandable_segments
from engine.errors import ConfigError


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_name(variable: str) -> None:
    for value in ("expandable_segments:True", "max_split_size_mb:64, expandable_segments:true"):
        with pytest.raises(ConfigError, match=f"{variable}.*expandable_segments:False"):
            refuse_expandable_segments({variable: value})
    for value in ("", "expandable_segments:False", "roundup_power2_divisions:[256:1,512:2]"):
        refuse_expandable_segments({variable: value})


def test_this_torch_names_the_arguments_that_rebuild_a_cuda_tensor() -> None:
    names = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    assert {"storage_device", "ref_counter_handle", "ref_counter_offset"} <= set(names)
