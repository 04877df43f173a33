"""Makes a Hugging Face folder of a GGUF file: config, tokenizer, and either bf16 safetensors or a link to the file.

Owns the mapping of GGUF metadata to the keys of config.json. A metadata value of the architecture that is not known is
refused, because it could change the result. Knows nothing of caches or the source of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.errors import ConfigError
from engine.gguf import GGUF_FILE
from engine.gguf.file import GGUFFile
from engine.gguf.tensors import ROPE_FACTORS, GGUFTensors, check_architecture, head_dim
from engine.gguf.tokenizer import special_ids, write_tokenizer

_WEIGHTS_FILE = "model.safetensors"

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "expert_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    "rope.scaling.attn_factor",
}
"""Metadata values of an architecture that are read."""


def convert(source: Path, folder: Path, *, on_tensor: Callable[[int, int], None]) -> None:
    """Write the model of a GGUF file into a folder, in bfloat16.

    Args:
        source: GGUF file.
        folder: existing folder for the files.
        on_tensor: called after each tensor with the number converted so far and the total.

    Raises:
        ConfigError: the file is damaged, or its architecture or tokenizer is not supported.
        OSError, SafetensorError: the folder cannot be written.
    """
    describe(source, folder)
    file = GGUFTensors(source)
    tensors = {}
    for done, name in enumerate(file.keys(), start=1):
        tensors[name] = file.get_tensor(name).to(torch.bfloat16)
        on_tensor(done, len(file.keys()))
    save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})


def link(source: Path, folder: Path) -> None:
    """Write a folder whose weights stay in the GGUF file.

    Args:
        source: GGUF file, absolute.
        folder: existing folder for the files.

    Raises:
        ConfigError: the file is damaged, or its architecture or tokenizer is not supported.
        OSError: the folder cannot be written.
    """
    describe(source, folder)
    (folder / GGUF_FILE).symlink_to(source)


def describe(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer of a GGUF file.

    Raises:
        ConfigError: the file is damaged, or its architecture or tokenizer is not supported.
        OSError: the folder cannot be written.
    """
    with GGUFFile(source) as file:
        config = _config(file)
        _write_json(folder / "config.json", config)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        _write_json(folder / "generation_config.json", {key: config[key] for key in keys if key in config})
        write_tokenizer(file, folder, max_len=config["max_position_embeddings"])


def _config(file: GGUFFile) -> dict[str, Any]:
    name = check_architecture(file)
    prefix = name + "."
    for key in file.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN:
            raise ConfigError(
                f"model: {file.path}: {key} = {str(file.metadata[key])[:60]} is not supported; use the Hugging Face "
                "folder of this model"
            )
    dim, heads = head_dim(file), file.get(prefix + "attention.head_count", int)
    for key, allowed in (("attention.value_length", dim), ("rope.dimension_count", dim), ("expert_count", 0)):
        given = file.metadata.get(prefix + key, allowed)
        if given != allowed:
            raise ConfigError(f"model: {file.path}: {prefix}{key} = {given!r} is not supported; allowed: {allowed}")
    kv_heads = prefix + "attention.head_count_kv"
    config: dict[str, Any] = {
        "architectures": [_FAMILIES[name]],
        "model_type": name,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": file.get(prefix + "embedding_length", int),
        "intermediate_size": file.get(prefix + "feed_forward_length", int),
        "num_hidden_layers": _num_layers(file, prefix),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(kv_heads, int) if kv_heads in file.metadata else heads,
        "head_dim": dim,
        "vocab_size": file.shape("token_embd.weight")[0],
        "max_position_embeddings": file.get(prefix + "context_length", int),
        # Stored as float32. Six digits restore the decimal number of the original config.
        "rms_norm_eps": float(f"{file.get(prefix + 'attention.layer_norm_rms_epsilon', float):.6g}"),
        "rope_theta": float(file.get(prefix + "rope.freq_base", float))
        if prefix + "rope.freq_base" in file.metadata
        else 10000.0,
        "tie_word_embeddings": "output.weight" not in file.names,
        "attention_bias": name != "qwen2" and "blk.0.attn_q.bias" in file.names,
        "mlp_bias": "blk.0.ffn_up.bias" in file.names,
    }
    scaling = _rope_scaling(file, prefix, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | {f"{name}_token_id": token for name, token in _end_ids(file).items()}


def _end_ids(file: GGUFFile) -> dict[str, Any]:
    """Ids for config.json. A text ends with EOS, or with the end of a turn where the file names one."""
    ids: dict[str, Any] = {name: token for name, token in special_ids(file).items() if name != "unk"}
    key = "tokenizer.ggml.eot_token_id"
    if key in file.metadata and file.get(key, int) != ids.get("eos"):
        ids["eos"] = [*([ids["eos"]] if "eos" in ids else []), file.get(key, int)]
    return ids


def _rope_scaling(file: GGUFFile, prefix: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """The value of `rope_scaling`, or None. Divisors of each frequency are a longrope with equal factors."""
    if ROPE_FACTORS in file.names:
        shape = file.shape(ROPE_FACTORS)
        if shape != (config["head_dim"] // 2,):
            raise ConfigError(f"model: {file.path}: {ROPE_FACTORS} has shape {list(shape)}")
        factors = [float(value) for value in file.read(ROPE_FACTORS)]
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    kind = file.metadata.get(prefix + "rope.scaling.type", "none")
    if kind == "none":
        return None
    values: dict[str, Any] = {"rope_type": kind, "factor": file.get(prefix + "rope.scaling.factor", float)}
    if kind == "yarn":
        original = file.get(prefix + "rope.scaling.original_context_length", int)
        values["original_max_position_embeddings"] = original
    elif kind != "linear":
        raise ConfigError(f"model: {file.path}: {prefix}rope.scaling.type = {kind!r}; allowed: none, linear, yarn")
    if file.metadata.get(prefix + "rope.scaling.attn_factor", 1.0) != 1.0:
        raise ConfigError(f"model: {file.path}: {prefix}rope.scaling.attn_factor is not supported; allowed: 1.0")
    return values


def _num_layers(file: GGUFFile, prefix: str) -> int:
    """Number of layers, bounded by the number of tensors: a damaged number must not fill the memory with names."""
    count: int = file.get(prefix + "block_count", int)
    if not 0 < count <= len(file.names):
        raise ConfigError(f"model: {prefix}block_count = {count}, but the file holds {len(file.names)} tensors")
    return count


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
