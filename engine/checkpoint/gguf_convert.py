"""Converts a Llama model from a GGUF file to a Hugging Face folder: bf16 safetensors, config and tokenizer.

Owns the mapping of GGUF names, metadata and layout to those of Hugging Face. Knows nothing of caches or the source of
the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.model_config import SINGLE_FILE
from engine.errors import ConfigError

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""Token type of special tokens in the GGUF token list."""


def convert(source: Path, folder: Path, *, on_tensor: Callable[[int, int], None]) -> None:
    """Write the model of a GGUF file into a folder.

    Args:
        source: GGUF file of a Llama model with SmolLM's byte-level BPE tokenizer.
        folder: existing folder for the files.
        on_tensor: called after each tensor with the number converted so far and the total.

    Raises:
        ConfigError: the file is damaged, or its architecture or tokenizer is not supported.
        OSError, SafetensorError: the folder cannot be written.
    """
    with GGUFFile(source) as file:
        _check_kind(file)
        config = _config(file)
        names = _tensor_names(config["num_hidden_layers"])
        if "output.weight" in file.names:
            names["output.weight"] = "lm_head.weight"
        tensors = {}
        for done, (gguf_name, name) in enumerate(names.items(), start=1):
            array = file.read(gguf_name)
            if gguf_name.endswith(("attn_q.weight", "attn_k.weight")):
                array = _unpermute(array, config["head_dim"])
            tensors[name] = torch.from_numpy(np.array(array)).to(torch.bfloat16)
            on_tensor(done, len(names))
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(config))
        _write_tokenizer(file, folder, max_len=config["max_position_embeddings"])


def _check_kind(file: GGUFFile) -> None:
    for key, allowed in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        given = file.get(key, str)
        if given != allowed:
            raise ConfigError(f"model: {file.path} has {key} = {given!r}; allowed: {allowed}")


def _config(file: GGUFFile) -> dict[str, Any]:
    heads = file.get("llama.attention.head_count", int)
    hidden = file.get("llama.embedding_length", int)
    if heads < 1 or hidden % heads:
        raise ConfigError(f"model: {file.path} has {heads} heads for a hidden size of {hidden}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": file.get("llama.feed_forward_length", int),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("llama.attention.head_count_kv", int),
        "head_dim": hidden // heads,
        "vocab_size": file.shape("token_embd.weight")[0],
        "max_position_embeddings": file.get("llama.context_length", int),
        # Stored as float32. Six digits restore the decimal number of the original config.
        "rms_norm_eps": float(f"{file.get('llama.attention.layer_norm_rms_epsilon', float):.6g}"),
        "rope_theta": float(file.get("llama.rope.freq_base", float)),
        "tie_word_embeddings": "output.weight" not in file.names,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _num_layers(file: GGUFFile) -> int:
    """Number of layers, bounded by the number of tensors: a damaged number must not fill the memory with names."""
    count: int = file.get("llama.block_count", int)
    if not 0 < count <= len(file.names):
        raise ConfigError(f"model: llama.block_count = {count}, but the file holds {len(file.names)} tensors")
    return count


def _tensor_names(num_layers: int) -> dict[str, str]:
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    for index in range(num_layers):
        for gguf_name, name in _LAYER_TENSORS.items():
            names[f"blk.{index}.{gguf_name}.weight"] = f"model.layers.{index}.{name}.weight"
    return names | {"output_norm.weight": "model.norm.weight"}


def _unpermute(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of a q or k weight from GGUF's layout [pair, half] per head to Hugging Face's [half, pair]."""
    if weight.ndim != 2 or weight.shape[0] % head_dim:
        raise ConfigError(
            f"model: a q or k weight has shape {list(weight.shape)}; expected whole heads of {head_dim} rows"
        )
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(file: GGUFFile, folder: Path, *, max_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE after splitting digits."""
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list)
    merges = [str(merge).partition(" ")[::2] for merge in file.get("tokenizer.ggml.merges", list)]
    template = file.get("tokenizer.chat_template", str)
    special = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "unknown", "padding")}
    if len(kinds) != len(tokens) or not all(0 <= token < len(tokens) for token in special.values()):
        raise ConfigError(f"model: {file.path} has {len(tokens)} tokens, {len(kinds)} token types, specials {special}")
    try:
        bpe = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
        tokenizer = Tokenizer(bpe)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    except Exception as error:  # noqa: BLE001  The library raises bare exceptions for a bad vocabulary or bad merges.
        raise ConfigError(f"model: {file.path} holds no usable tokenizer: {error}") from None
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[special["bos"]],
            "eos_token": tokens[special["eos"]],
            "unk_token": tokens[special["unknown"]],
            "pad_token": tokens[special["padding"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_len,
            "chat_template": template,
        },
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
