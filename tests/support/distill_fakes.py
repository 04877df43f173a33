"""A target small enough to distil in seconds, whose next token it is worth guessing, and shards made by it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from distill.data.generate import Generator, Job, Segment
from distill.data.shards import ShardWriter, shard_paths
from distill.models.decoder import FrozenTarget, fingerprint
from engine.model.load import Model, load_model

VOCAB = 96
STOP = 2


def write_target(folder: Path, *, vocab_size: int = VOCAB, seed: int = 0) -> Path:
    """Two random layers of width 32; the head is scaled so that the law is peaked, hence learnable."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    model.save_pretrained(folder)
    return folder


def open_target(folder: Path) -> FrozenTarget:
    """Float32, both layers tapped."""
    return FrozenTarget(folder, feature_layers=(0, 1), dtype=torch.float32, rows=8, max_len=256)


def open_model(folder: Path) -> Model:
    """The same as it serves."""
    return load_model(folder, dtype=torch.float32, feature_layers=(0, 1))


def jobs(
    count: int, *, seed: int = 0, prompt_len: int = 4, answer_len: int = 40, temperature: float = 1.0
) -> list[Job]:
    """Jobs with random prompts."""
    rng = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (count, prompt_len), generator=rng).tolist()
    return [Job("made", tuple(prompt), (Segment(temperature, answer_len),)) for prompt in prompts]


def write_shards(target: FrozenTarget, folder: Path, *, count: int, shard_tokens: int, seed: int = 0) -> list[Path]:
    """Shards of `count` answers."""
    writer = ShardWriter(folder, "made", fingerprint(target.folder), shard_tokens=shard_tokens)
    generator = Generator(open_model(target.folder), num_slots=16, max_len=64, stop_token=STOP, seed=seed, num_top=16)
    for document in generator.run(iter(jobs(count, seed=seed))):
        writer.add(document)
    writer.flush()
    return shard_paths([folder])
