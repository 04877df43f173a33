"""Conversion of GGUF: weights, config and tokenizer are those of the original model, and other models are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_gguf import write_gguf

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import convert_embedded, embedded_file, resolve_model
from engine.errors import ConfigError

CHARACTERS = st.characters(codec="utf-8", max_codepoint=0x1FFFF, categories=("L", "N", "P", "Z", "S"))
"""Without control characters and code points nobody uses: the model's vocabulary lacks a few of their bytes."""


def test_smollm2_weights_are_those_that_transformers_reads_from_the_gguf() -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = resolve_model("smollm2", progress=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(embedded_file()), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name


def test_smollm2_config() -> None:
    config = ModelConfig.load(resolve_model("smollm2", progress=False))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps) == (49152, 100000.0, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.max_model_len == 8192


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(resolve_model("smollm2", progress=False))


@settings(max_examples=200)
@given(text=st.text(alphabet=CHARACTERS, max_size=40))
def test_smollm2_tokenizer_round_trips(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_smollm2_tokenizer_details(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    pieces = [tokenizer.decode([token]) for token in tokenizer("It was 12345 km/h in 1969.")["input_ids"]]
    assert pieces == ["It", " was", " ", *"12345", " km", "/", "h", " in", " ", *"1969", "."]
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    theirs = transformers.AutoTokenizer.from_pretrained(embedded_file().parent, gguf_file=embedded_file().name)
    for text in ("Hello  world\n\tfoo_bar(42)", "naïve café — 日本語 🎉", "don't  stop", " 3.14159 "):
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]


def test_smollm2_chat_template(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "other.gguf", architecture="falcon")
    with pytest.raises(ConfigError, match=r"general\.architecture = 'falcon'; allowed: llama"):
        convert_embedded(source, tmp_path / "cache", progress=False)


def test_more_layers_than_tensors_are_refused(tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "tiny.gguf").read_bytes())
    where = content.index(b"llama.block_count") + len(b"llama.block_count") + 4  # behind the value's type
    content[where : where + 4] = struct.pack("<I", 2**31 - 1)
    source = tmp_path / "many.gguf"
    source.write_bytes(content)
    with pytest.raises(ConfigError, match=r"llama\.block_count = 2147483647"):
        convert_embedded(source, tmp_path / "cache", progress=False)
