"""Which models the native library computes. Imports no torch."""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from engine.model.native.library import NativeUnavailable


def check_native(config: ModelConfig) -> None:
    """Check that the library supports the sizes of a model.

    Raises:
        NativeUnavailable: a size is not a multiple of the SIMD width, or the model has more than a plain Llama.
    """
    if config.beyond_llama is not None:
        raise NativeUnavailable(f"it does not compute {config.beyond_llama}")
    for name, value, step in (
        ("hidden_size", config.hidden_size, 32),
        ("intermediate_size", config.intermediate_size, 32),
        ("head_dim", config.head_dim, 64),
    ):
        if value % step:
            raise NativeUnavailable(f"{name} is {value}, allowed are multiples of {step}")
