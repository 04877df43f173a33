"""Native kernels: a whole forward in one call, in bf16 on CPUs with AVX512-BF16.

They are optional: where the machine or its compiler does not support them, `engine.model.decoder.Decoder` computes the
same with PyTorch's operators. `engine.model.load.load_model` chooses. Knows nothing of the Python side of a model.
"""

from __future__ import annotations

from engine.model.native.library import LayerWeights, NativeCodes, NativeForward, NativeUnavailable, Shape, load_library

__all__ = ["LayerWeights", "NativeCodes", "NativeForward", "NativeUnavailable", "Shape", "load_library"]
