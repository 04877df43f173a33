"""Small random models in GGUF files of every type, and the Hugging Face folder of the same, dequantised weights.

Blocks are random bytes with scales of a sensible size. `transformers`, or the definition where it has none, dequantises
them for the reference; the engine uses the package `gguf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from tiny_gguf import SPECIALS, TOKENS
from transformers.integrations.gguf.dequant import dequantize

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 256, 512, 4, 2, 64, 2
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_SCALES: dict[str, tuple[tuple[int, ...], float]] = {
    "Q4_0": ((0,), 0.02),
    "Q4_1": ((0, 2), 0.02),
    "Q5_0": ((0,), 0.01),
    "Q5_1": ((0, 2), 0.01),
    "Q8_0": ((0,), 0.0015),
    "Q4_K": ((0, 2), 0.0004),
    "Q5_K": ((0, 2), 0.0002),
    "Q6_K": ((208,), 0.00004),
}
"""Byte offsets of a block's float16 scales, and their size."""
_NAMES = {
    "attn_q": ("self_attn.q_proj", HEADS * DIM, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * DIM, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * DIM, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HEADS * DIM),
    "ffn_gate": ("mlp.gate_proj", INNER, HIDDEN),
    "ffn_up": ("mlp.up_proj", INNER, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, INNER),
}


def random_rows(kind: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Packed rows of a type, [rows, bytes] uint8."""
    if kind in ("F32", "F16", "BF16"):
        values = torch.from_numpy(rng.standard_normal((rows, cols)).astype(np.float32) * 0.1)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return values.to(dtype).view(torch.uint8).view(rows, -1).numpy()
    per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, cols // per_block, size), dtype=np.uint8)
    offsets, scale = _SCALES[kind]
    for offset in offsets:
        values = (rng.random(blocks.shape[:2]) * scale).astype(np.float16)
        blocks[..., offset : offset + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def meaning(kind: str, raw: np.ndarray, cols: int) -> torch.Tensor:
    """The float32 values of packed rows."""
    data = torch.from_numpy(raw)
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return data.contiguous().view(dtype).view(len(raw), cols).float()
    if kind in ("Q5_0", "Q5_1"):
        return _five_bits(kind, raw).reshape(len(raw), cols)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    return dequantize(data.reshape(-1, size), int(GGMLQuantizationType[kind])).reshape(len(raw), cols).float()


def _five_bits(kind: str, raw: np.ndarray) -> torch.Tensor:
    """Q5_0 and Q5_1, which `transformers` does not have: scale, minimum, 32 high bits, 16 bytes of low nibbles."""
    header = 2 if kind == "Q5_0" else 4
    blocks = raw.reshape(-1, header + 20)
    scales = np.ascontiguousarray(blocks[:, :header]).view(np.float16).astype(np.float32)
    high = np.unpackbits(blocks[:, header : header + 4], axis=1, bitorder="little")
    low = blocks[:, header + 4 :]
    values = np.concatenate((low & 15, low >> 4), axis=1) + 16 * high.astype(np.float32)
    return torch.from_numpy(scales[:, :1] * (values - 16) if header == 2 else scales[:, :1] * values + scales[:, 1:])


def write_gguf_model(
    path: Path,
    reference: Path,
    kind: str,
    *,
    architecture: str = "llama",
    num_layers: int = LAYERS,
    seed: int = 0,
    tied: bool = False,
    **metadata: Any,
) -> Path:
    """Write a model to `path`, and its plain folder without a tokenizer to `reference`.

    Args:
        kind: type of the matrices; norms are float32.
        architecture: llama, qwen2 or qwen3.
        num_layers: of the model.
        seed: of the weights.
        tied: whether the head is the embedding.
        metadata: further values of the architecture, with `__` for a dot. `rope_freqs` adds that tensor.
    """
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, architecture)
    factors = metadata.pop("rope_freqs", None)
    _write_metadata(writer, num_layers, metadata)
    state: dict[str, torch.Tensor] = {}

    def add(name: str, target: str, rows: int, cols: int, *, heads: int = 0) -> None:
        raw = random_rows(kind, rows, cols, rng)
        state[target] = meaning(kind, raw, cols)
        if heads:  # The order that llama.cpp's converter writes.
            raw = np.ascontiguousarray(raw.reshape(heads, 2, DIM // 2, -1).swapaxes(1, 2).reshape(rows, -1))
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])

    def add_vector(name: str, target: str, size: int, *, around: float) -> None:
        values = (around + 0.2 * rng.standard_normal(size)).astype(np.float32)
        state[target] = torch.from_numpy(values)
        writer.add_tensor(name, values)

    add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    else:
        add("output.weight", "lm_head.weight", len(TOKENS), HIDDEN)
    add_vector("output_norm.weight", "model.norm.weight", HIDDEN, around=1.0)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    for layer in range(num_layers):
        source, target = f"blk.{layer}.", f"model.layers.{layer}."
        for name, (module, rows, cols) in _NAMES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name, 0) if architecture == "llama" else 0
            add(f"{source}{name}.weight", f"{target}{module}.weight", rows, cols, heads=heads)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                add_vector(f"{source}{name}.bias", f"{target}{module}.bias", rows, around=0.0)
        if architecture == "qwen3":
            for letter in "qk":
                add_vector(
                    f"{source}attn_{letter}_norm.weight", f"{target}self_attn.{letter}_norm.weight", DIM, around=1.0
                )
        add_vector(f"{source}attn_norm.weight", f"{target}input_layernorm.weight", HIDDEN, around=1.0)
        add_vector(f"{source}ffn_norm.weight", f"{target}post_attention_layernorm.weight", HIDDEN, around=1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = transformers.AutoConfig.for_model(
        architecture,
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.load_state_dict(state)
    model.save_pretrained(reference)
    return path


def _write_metadata(writer: GGUFWriter, num_layers: int, metadata: dict[str, Any]) -> None:
    writer.add_block_count(num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        name = f"{writer.arch}.{key.replace('__', '.')}"
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
