"""EAGLE-3 heads in public layouts: the engine computes what the format defines; other drafts are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from eagle3_reference import PublicHead, make_head, reference_logits, write_head
from eagle_requests import NUM_DRAFTED, features_of, make_proposer, request_row
from fakes import FixedPacer, RandomPacer
from local_engine import LocalEngine
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, write_model

from engine.checkpoint.draft_check import check_draft
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit
from engine.model.load import load_draft

NUM_LAYERS = 8
REDUCED = torch.arange(2, VOCAB, 2)
WHOLE = torch.arange(VOCAB)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {name: write_model(folder / name, name, num_hidden_layers=NUM_LAYERS) for name in ("llama", "qwen3")}


def embedding_of(target: Path) -> torch.Tensor:
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole vocabulary": {"draft_vocab": WHOLE},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each feature, output normed": {"fc_norm": True, "norm_output": True},
    "own embedding, biased": {"own_embedding": True, "layer": {"attention_bias": True}},
    "two layers": {"layer": {"num_hidden_layers": 2}},
    "other size": {"own_embedding": True, "layer": {"hidden_size": 32}, "target_hidden_size": 48},
    "qwen3 layer": {"layer": {"model_type": "qwen3", "head_dim": 16}, "norm_before_residual": True},
    "named layers": {"num_features": 2, "eagle_aux_hidden_state_layer_ids": [NUM_LAYERS, 1]},
}


def head_for(target: Path, variant: str) -> PublicHead:
    return make_head(target, **({"draft_vocab": REDUCED} | VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("layout", "family"), [("authors", "llama"), ("speculators", "qwen3")])
def test_drafts_have_the_distributions_of_the_format(
    targets: dict[str, Path], tmp_path: Path, variant: str, layout: str, family: str
) -> None:
    target = targets[family]
    head = head_for(target, variant)
    folder = write_head(head, tmp_path / "head", layout)
    seeded = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB, (length,), generator=seeded).tolist() for length in (21, 38, 2)]
    features = [features_of(target, folder, text) for text in texts]
    firsts = (0, 21, 59)
    rows = [
        request_row(key, 0, text, [-1, *range(first, first + len(text) - 1)], temperature=1.0)
        for key, (text, first) in enumerate(zip(texts, firsts, strict=True))
    ]
    probs = torch.zeros(len(texts), NUM_DRAFTED, len(head.draft_vocab))
    response = make_proposer(folder, target).propose(rows, (), probs, torch.cat(features))
    for index, (text, row) in enumerate(zip(texts, response, strict=True)):
        assert len(row.token_ids) == NUM_DRAFTED
        assert set(row.token_ids) <= set(head.draft_vocab.tolist())
        tokens = text + list(row.token_ids)
        logits = reference_logits(head, embedding_of(target), tokens, len(text), features[index][: len(text) - 1])
        expected = torch.stack(logits[:-1]).softmax(-1)
        torch.testing.assert_close(probs[index], expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "inputs"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, NUM_LAYERS]}, (1, 4, NUM_LAYERS)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}, (1, 4, NUM_LAYERS)),
    ],
)
def test_features_are_the_hidden_states_that_the_format_names(
    targets: dict[str, Path], tmp_path: Path, changes: dict[str, Any], inputs: tuple[int, ...]
) -> None:
    """`hidden_states[j]` of `transformers` is the input of layer j; its last one is normed, hence left out."""
    target = targets["llama"]
    folder = write_head(head_for(target, "plain"), tmp_path / "head", "authors", **changes)
    assert check_draft(folder, target).feature_layers == tuple(layer - 1 for layer in inputs)
    tokens = list(range(3, 20))
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    found = features_of(target, folder, tokens).chunk(3, dim=1)
    for feature, layer in zip(found, inputs, strict=True):
        if layer < NUM_LAYERS:
            torch.testing.assert_close(feature, states[layer][0], rtol=1e-4, atol=1e-5)


def test_a_sequence_may_be_as_long_as_the_targets(targets: dict[str, Path], tmp_path: Path) -> None:
    folder = write_head(head_for(targets["llama"], "plain"), tmp_path / "head", "authors")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64
    assert check_draft(folder, targets["llama"]).max_model_len == 512


@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_output_is_the_same_as_without_a_draft(targets: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """Greedy and seeded, fp32, K random per step."""
    target = targets["qwen3"]
    folder = write_head(head_for(target, "plain"), tmp_path / "head", layout)
    submits = [
        Submit(
            request_id=str(i),
            prompt=tuple(range(3 + i, 12 + 2 * i)),
            sampling=SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=30),
        )
        for i in range(5)
    ]
    with LocalEngine(target) as engine:
        plain = engine.generate(submits)
    with LocalEngine(target, draft_folder=folder, pacer=RandomPacer(4, max_k=5), speculative={"k": 5}) as engine:
        assert engine.generate(submits) == plain
        assert sum(stats.num_drafted for stats in engine.stats) > 100


def test_as_many_tokens_are_accepted_as_the_format_gives(tmp_path: Path) -> None:
    """Greedy decoding at a fixed K, repeated with the reference: the accepted tokens of the engine are counted."""
    k, num_tokens, prompt = 3, 48, [3, 9, 1, 4]
    target = write_model(tmp_path / "target", "llama", num_hidden_layers=NUM_LAYERS, vocab_size=12)
    head = make_head(target, draft_vocab=torch.arange(12), seed=11)  # a head that is sometimes right
    folder = write_head(head, tmp_path / "head", "authors")
    submit = Submit(
        request_id="r", prompt=tuple(prompt), sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens)
    )
    with LocalEngine(target, draft_folder=folder, pacer=FixedPacer(k), speculative={"k": k}) as engine:
        (output,) = engine.generate([submit]).values()
        found = [stats.num_accepted for stats in engine.stats if stats.num_drafted > 0]
    text = prompt + output
    features = features_of(target, folder, text)
    known, expected = len(prompt) + 1, []
    while known + k < len(text):
        drafted: list[int] = []
        for _ in range(k):
            tokens = text[:known] + drafted
            logits = reference_logits(head, embedding_of(target), tokens, known, features[: known - 1])[-1]
            drafted.append(int(logits.argmax()))
        expected.append(next((i for i, token in enumerate(drafted) if text[known + i] != token), k))
        known += expected[-1] + 1
    assert set(expected) == {0, 1, 3}
    assert found[: len(expected)] == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "dspark"}, "speculators_model_type: 'dspark' is not supported; supported are EAGLE-3"),
    ({"speculators_model_type": "eagle"}, "speculators_model_type: 'eagle' is not supported"),
    ({"architectures": ["DSparkDraftModel"]}, "names a DSpark draft, which is not supported"),
    ({"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": ...}, "names EAGLE-1 or EAGLE-2"),
    ({"ptd_token_id": 4}, "lacks tensor mask_hidden"),
    ({"ptd_token_id": VOCAB}, "ptd_token_id: 97 is not a token id below vocab_size, which is 97"),
    ({"speculators_model_type": "peagle"}, "mask_token_id: missing from the config.json of a P-EAGLE head"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state: False is not supported"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, r"\[0, 2, 3\] given, allowed is a list of different layer"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, r"\[2, 2, 3\] given"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"reads layers \[1, 3, 8\], the target has 0 to 7"),
    ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc, fc_norm: both are true"),
    ({"norm_output": "yes"}, "norm_output: 'yes' is neither true nor false"),
    ({"layer_types": ["sliding_attention"]}, "layer_types: sliding_attention is not supported"),
    ({"target_hidden_size": 64}, "target_hidden_size: the draft was made for 64, the target has 48"),
    ({"vocab_size": 100}, "vocab_size: the draft was made for 100, the target has 97"),
    ({"norm_before_fc": True}, "lacks tensor input_norm.weight"),
    ({"draft_vocab_size": VOCAB}, "lm_head.weight has shape"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_other_drafts_are_refused_by_name(
    targets: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_head(head_for(targets["llama"], "plain"), tmp_path / "head", "authors")
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_draft(folder, targets["llama"], dtype=torch.float32)


@pytest.mark.parametrize(
    ("dropped", "added", "message"),
    [
        ("midlayer.hidden_norm.weight", None, "lacks tensor model.layers.0.hidden_norm.weight"),
        ("d2t", None, "lacks tensor d2t"),
        ("t2d", "mask_hidden", "has the tensor mask_hidden of a P-EAGLE head, but its config.json names no ptd_token"),
        ("t2d", "fc.bias", r"holds 1 tensors that config.json does not imply: fc.bias"),
    ],
)
def test_missing_and_unknown_tensors_are_named(
    targets: dict[str, Path], tmp_path: Path, dropped: str, added: str | None, message: str
) -> None:
    folder = write_head(head_for(targets["llama"], "plain"), tmp_path / "head", "authors")
    tensors = load_file(folder / "model.safetensors")
    del tensors[dropped]
    save_file(tensors | ({added: torch.zeros(3)} if added else {}), folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_draft(folder, targets["llama"], dtype=torch.float32)


def test_an_eagle_2_head_is_refused_though_its_config_is_that_of_a_model(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_head(head_for(targets["llama"], "plain"), tmp_path / "head", "authors")
    config = json.loads((folder / "config.json").read_text())
    del config["draft_vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="are of EAGLE-1 or EAGLE-2, which is not supported"):
        load_draft(folder, targets["llama"], dtype=torch.float32)


def test_a_short_target_needs_named_layers(targets: dict[str, Path], tmp_path: Path) -> None:
    short = write_model(tmp_path / "short", "llama", num_hidden_layers=6)
    folder = write_head(head_for(short, "plain"), tmp_path / "head", "authors")
    with pytest.raises(ConfigError, match="the target's 6 layers are too few for the default"):
        check_draft(folder, short)


def test_native_kernels_are_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    folder = write_head(head_for(targets["llama"], "plain"), tmp_path / "head", "authors")
    with pytest.raises(ConfigError, match="native given, but it does not compute the first layer of an EAGLE-3 head"):
        load_draft(folder, targets["llama"], kernel="native")
