"""The forward of a whole plan in one native call, for bf16 on CPUs that have AVX512-BF16.

Optional: where the machine or its compiler does not serve, `engine.model.decoder.Decoder` does the same with PyTorch's
operators. `engine.model.load.load_model` chooses. Knows nothing of the models in Python.
"""

from __future__ import annotations

from engine.model.native.library import LayerWeights, NativeForward, NativeUnavailable, Shape, load_library

__all__ = ["LayerWeights", "NativeForward", "NativeUnavailable", "Shape", "load_library"]
