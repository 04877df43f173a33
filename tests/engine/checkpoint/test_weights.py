"""Reading weights: whole, cut and sharded files; missing, extra and misshaped tensors; and draft folders."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, TokenRange, forward_input_of, write_model

from engine.checkpoint.model_config import SHARED_EMBEDDING, ModelConfig
from engine.checkpoint.weights import ShardSpec, WeightFiles
from engine.errors import ConfigError
from engine.model.load import load_model
from engine.model.runner import ModelRunner, kv_bytes_per_token, num_kv_blocks

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama-biased")


def altered(original: Path, folder: Path, *, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A copy with tensors replaced (None drops one; `__` stands for a dot) and config keys changed."""
    shutil.copytree(original, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_parts_are_read_as_slices_of_the_whole(original: Path) -> None:
    files = WeightFiles(original)
    whole = files.read(Q, (48, 48))
    assert torch.equal(files.read(Q, (48, 48), rows=slice(5, 20)), whole[5:20])
    assert torch.equal(files.read(Q, (48, 48), cols=slice(7, 9)), whole[:, 7:9])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, r"lacks tensor model\.norm\.weight of shape \[48\]"),
        (
            {"model__layers__1__self_attn__q_proj__weight": torch.zeros(48, 40)},
            r"q_proj\.weight has shape \[48, 40\], but config\.json implies \[48, 48\]",
        ),
        (
            {"model__layers__0__self_attn__q_norm__weight": torch.zeros(8)},
            r"holds 1 tensors that config\.json does not imply: model\.layers\.0\.self_attn\.q_norm\.weight \[8\]",
        ),
        ({"model__norm__weight": torch.zeros(48, dtype=torch.int32)}, r"model\.norm\.weight is of type torch\.int32"),
        ({"model__layers__2__self_attn__o_proj__bias": None}, r"lacks tensor .*o_proj\.bias"),
    ],
)
def test_wrong_tensors_are_named(original: Path, tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(altered(original, tmp_path / "copy", **tensors))


def test_a_config_with_fewer_layers_than_the_weights_is_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.2\."):
        load_model(altered(original, tmp_path / "copy", config={"num_hidden_layers": 2}))


def test_buffers_of_old_checkpoints_are_ignored(original: Path, tmp_path: Path) -> None:
    load_model(altered(original, tmp_path / "copy", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4)))


@pytest.mark.parametrize("damage", [b"", b"junk", b"\xff" * 400])
def test_damaged_files_are_named(original: Path, tmp_path: Path, damage: bytes) -> None:
    folder = altered(original, tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load_model(folder)


def test_a_file_cut_short_is_named(original: Path, tmp_path: Path) -> None:
    folder = altered(original, tmp_path / "copy")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load_model(folder)


def test_weights_in_several_files_are_read_and_counted_as_one(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    scaled = {"b.weight": torch.tensor([[1], [2]], dtype=torch.int8), "b.weight.int8_scale": torch.tensor([0.5, 4.0])}
    save_file(scaled | {f"c{n}": torch.zeros(n) for n in range(1, 7)}, tmp_path / "two.safetensors")
    weight_map = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = WeightFiles(tmp_path)
    assert files.num_elements() == 6 + 2 + 2 + 21
    assert files.stored_bytes() == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert files.read_bytes == 0
    assert torch.equal(files.read_float("a.weight", (2, 3), rows=slice(1, 2)), torch.ones(1, 3))
    assert files.read_bytes == 3 * 4
    assert files.read_float("b.weight", (2, 1)).tolist() == [[0.5], [8.0]]
    assert files.read_float("b.weight", (2, 1), rows=slice(1, 2)).tolist() == [[8.0]]
    assert (files.dequantised_bytes, files.packing) == (0, None)
    with pytest.raises(ConfigError) as caught:
        files.check_all_read()
    assert str(caught.value).endswith(
        "holds 6 tensors that config.json does not imply: c1 [1], c2 [2], c3 [3], c4 [4], c5 [5]"
    )
    with pytest.raises(ConfigError, match=r"holds 1 tensors that config\.json does not imply: c6 \[6\]"):
        files.check_all_read(ignore=("1", "2", "3", "4", "5"))
    files.check_all_read(ignore=tuple("123456"))


def test_int8_rows_without_scales_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    message = r"tensor a is of type torch\.int8; allowed: float32, bfloat16, float16, int8 with a\.int8_scale"
    with pytest.raises(ConfigError, match=message):
        WeightFiles(tmp_path).read_float("a", (2,))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"is not a safetensors index"),
        ('{"weight_map": 3}', r"is not a safetensors index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"names '\.\./x\.safetensors'"),
        ('{"weight_map": {"a": "x.bin"}}', r"names 'x\.bin'"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"cannot read .*gone\.safetensors"),
    ],
)
def test_bad_indices_are_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=message):
        WeightFiles(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only safetensors weights are loaded"):
        WeightFiles(tmp_path)


def draft_of(original: Path, folder: Path, vocab: torch.Tensor, head: torch.Tensor) -> Path:
    """A draft folder with a head over some tokens and the target's embedding."""
    return altered(
        original,
        folder,
        config={"draft_vocab_size": len(vocab), "embed_tokens": SHARED_EMBEDDING},
        model__embed_tokens__weight=None,
        lm_head__weight=head,
        draft_vocab=vocab,
    )


def test_a_draft_shares_the_embedding_and_scores_some_tokens(original: Path, tmp_path: Path) -> None:
    vocab = torch.tensor([50, 3, 96, 10])
    head = load_file(original / "model.safetensors")["lm_head.weight"][vocab].contiguous()
    folder = draft_of(original, tmp_path / "draft", vocab, head)
    forward_input = forward_input_of([TokenRange([1, 2, 3, 4, 5], 0, 5, [1, 0])], block_size=4)
    draft = load_model(folder, target_folder=original, dtype=torch.float32)
    target = load_model(original, dtype=torch.float32)
    assert draft.draft_vocab is not None
    assert target.draft_vocab is None
    assert torch.equal(draft.draft_vocab, vocab)
    runners = [ModelRunner(model, num_blocks=2, block_size=4) for model in (draft, target)]
    ours, theirs = (runner.forward(forward_input).require_logits() for runner in runners)
    assert torch.allclose(ours, theirs[:, vocab], atol=1e-5)
    with pytest.raises(ConfigError, match="no target folder was given"):
        load_model(folder)


@pytest.mark.parametrize("vocab", [[1, 2, 2], [1, 2, VOCAB], [-1, 2, 3]])
def test_bad_draft_vocabularies_are_refused(original: Path, tmp_path: Path, vocab: list[int]) -> None:
    folder = draft_of(original, tmp_path / "draft", torch.tensor(vocab), torch.zeros(3, 48))
    with pytest.raises(ConfigError, match=rf"distinct token ids within \[0, {VOCAB}\)"):
        load_model(folder, target_folder=original)


def test_kv_sizes(original: Path) -> None:
    config = load_model(original).config
    assert kv_bytes_per_token(config, dtype=torch.float32) == 2 * 3 * 3 * 8 * 4
    assert kv_bytes_per_token(config, ShardSpec(0, 2)) == 2 * kv_bytes_per_token(config, ShardSpec(1, 2))
    sizes = {"block_size": 16, "dtype": torch.bfloat16, "device": "cpu"}
    assert num_kv_blocks(config, kv_cache_tokens=100, **sizes) == 7
    assert num_kv_blocks(config, memory_bytes=16 * 2 * 3 * 3 * 8 * 2 * 5 + 1, **sizes) == 5
    assert num_kv_blocks(config, **sizes) > 100
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        num_kv_blocks(config, memory_bytes=10, **sizes)


def heads(num_heads: int, num_kv_heads: int) -> ModelConfig:
    values = {"model_type": "llama", "vocab_size": 90, "intermediate_size": 20, "num_hidden_layers": 1}
    return ModelConfig.parse(
        values | {"hidden_size": 48, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    )


def bounds(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def test_units_are_divided_with_the_larger_parts_first() -> None:
    shards = [ShardSpec(rank, 3) for rank in range(3)]
    for total, parts in ((8, (3, 3, 2)), (7, (3, 2, 2)), (6, (2, 2, 2)), (2, (1, 1, 0))):
        assert {shard.parts(total) for shard in shards} == {parts}
        edges = [0, parts[0], parts[0] + parts[1], total]
        assert [bounds(shard.part(total)) for shard in shards] == list(pairwise(edges))
    for rank in (-1, 3):
        with pytest.raises(ConfigError, match=rf"rank: {rank} is not within \[0, 3\)"):
            ShardSpec(rank, 3)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "expected"),
    [
        (8, 2, [((0, 2), (0, 8))]),
        (8, 2, [((0, 1), (0, 4)), ((1, 2), (4, 8))]),
        (6, 3, [((0, 2), (0, 4)), ((2, 3), (4, 6))]),
        (8, 2, [((0, 1), (0, 2)), ((0, 1), (2, 4)), ((1, 2), (4, 6)), ((1, 2), (6, 8))]),
    ],
)
def test_query_heads_stay_with_their_kv_heads(
    num_heads: int, num_kv_heads: int, expected: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    config = heads(num_heads, num_kv_heads)
    shards = [ShardSpec(rank, len(expected)) for rank in range(len(expected))]
    assert [(bounds(each.kv_heads(config)), bounds(each.query_heads(config))) for each in shards] == expected


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(8, 2, 3), (8, 2, 6), (6, 2, 4)])
def test_more_shards_than_kv_heads_must_divide_evenly(num_heads: int, num_kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: {size} is above the model's {num_kv_heads} KV heads"):
        ShardSpec(0, size).query_heads(heads(num_heads, num_kv_heads))
