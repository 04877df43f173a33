"""The weights and the KV cache of a model in memory: in which form the engine keeps them, and what memory they take.

Owns the arithmetic and the lines that `paceline serve` prints. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.medusa_config import file_names
from engine.checkpoint.model_config import SINGLE_FILE, ModelConfig
from engine.config import EngineConfig
from engine.gguf import GGUF_FILE
from engine.model.native import NativeUnavailable
from engine.model.native.library import check_machine
from engine.model.native.limits import check_native

if TYPE_CHECKING:
    from engine.gguf.file import GGUFFile

MIN_KV_TOKENS = 2048
"""KV cache that has to fit where `kv_cache_tokens` is not given and takes what is free."""


def native_problem(engine: EngineConfig, config: ModelConfig | None = None) -> str | None:
    """Why the native kernel does not compute this engine's forward on the CPU; None where it does.

    Args:
        engine: the settings.
        config: of the target; None leaves the model out of account.
    """
    if engine.forward_kernel == "torch":
        return "the settings choose torch"
    if engine.dtype == "float32":
        return "it computes bfloat16 only"
    if engine.tensor_parallel_size > 1:
        return "it computes whole models only, and tensor_parallel_size is above 1"
    try:
        check_machine()
        if config is not None:
            check_native(config)
    except NativeUnavailable as error:
        return str(error)
    return None


def weights_line(engine: EngineConfig, folder: Path) -> str | None:
    """What is done with quantised weights and what memory it takes; None if the weights are floats."""
    config = ModelConfig.load(folder)
    link = folder / GGUF_FILE
    if config.quantization is None and not link.exists():
        return None
    label = "GGUF" if config.quantization is None else config.quantization.label
    files = [link] if config.quantization is None else folder.glob("*.safetensors")
    stored = f"Weights: {label}, {size_text(sum(file.stat().st_size for file in files))} in the files"
    loaded = size_text(model_bytes(engine, folder)[0])
    if not _stays_packed(engine, config):
        return f"{stored}, dequantised at load to {_dtype(engine)}: {loaded} in memory"
    if config.quantization is None:
        with _open(link) as file:
            types = ", ".join(file.quantised_types())
        form = f"packed on the native kernel ({types})" if types else "16 bits each"
        return f"{stored}, {form}: {loaded} in memory"
    return f"{stored}, packed where the native kernel has their layout, at most {loaded} in memory"


def cache_line(engine: EngineConfig) -> str | None:
    """That the KV cache is lossy; None where it is not."""
    if engine.kv_cache_dtype == "auto":
        return None
    return f"KV cache: {engine.kv_cache_dtype}, which is lossy: logits and outputs differ from those of auto"


def _stays_packed(engine: EngineConfig, config: ModelConfig) -> bool:
    return engine.packed == "auto" and engine.device != "cuda" and native_problem(engine, config) is None


def _open(path: Path) -> GGUFFile:
    from engine.gguf.file import GGUFFile  # Imports numpy, which the waiting command needs for GGUF files only.

    return GGUFFile(path)


def _dtype(engine: EngineConfig) -> str:
    return "float32" if engine.dtype == "float32" else "bfloat16"


def model_bytes(engine: EngineConfig, folder: Path) -> tuple[int, int]:
    """Bytes of weights and of the KV cache over all shards."""
    config = ModelConfig.load(folder)
    width = 4 if engine.dtype == "float32" else 2
    tokens = engine.kv_cache_tokens or MIN_KV_TOKENS
    per_head = config.head_dim * width if engine.kv_cache_dtype == "auto" else config.head_dim + 4  # codes, one scale
    cache = 2 * config.num_layers * config.num_kv_heads * per_head * tokens
    if (folder / GGUF_FILE).exists() and _stays_packed(engine, config):
        with _open(folder / GGUF_FILE) as file:
            return file.packed_bytes(), cache
    return weight_bytes(folder, config) * width // 2, cache


def weight_bytes(folder: Path, config: ModelConfig) -> int:
    """Bytes of a model's weights with 16 bits each, as nearly every model stores them, or by its shape where there are
    no files. Quantised ones count as dequantised: for those of Hugging Face it is the upper bound."""
    files = list(folder.glob("*.safetensors"))
    if config.quantization is not None or (folder / GGUF_FILE).is_symlink() or not files:
        has_head = not config.tie_word_embeddings
        heads, kv_heads = config.num_heads, config.num_kv_heads
        return 2 * config.num_weights(heads=heads, kv_heads=kv_heads, part=lambda total: total, has_head=has_head)
    if config.medusa is not None and (names := file_names(folder)) is not None:
        return sum((folder / name).stat().st_size for name in names)
    single = folder / SINGLE_FILE
    return sum(file.stat().st_size for file in ([single] if single.is_file() else files))


def size_text(num_bytes: int) -> str:
    """For example `0.3 GB` or `98 MB`."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"
