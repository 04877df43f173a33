"""A tiny SmolLM-like model in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = list("abcdefgh0123456789Ġ")
TOKENS = [*SPECIALS, *LETTERS, "ab", "Ġa"]


def write_gguf(path: Path, *, architecture: str = "llama", layers: int = 1) -> Path:
    """A tiny SmolLM-like GGUF file in float32."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), 8), "output_norm": (8,)}
    for index in range(layers):
        for name, shape in (
            ("attn_norm", (8,)), ("attn_q", (8, 8)), ("attn_k", (4, 8)), ("attn_v", (4, 8)), ("attn_output", (8, 8)),
            ("ffn_norm", (8,)), ("ffn_gate", (12, 8)), ("ffn_up", (12, 8)), ("ffn_down", (8, 12)),
        ):  # fmt: skip
            shapes[f"blk.{index}.{name}"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
