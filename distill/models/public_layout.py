"""The speculators layout of EAGLE-3 heads: the names and keys under which `eagle3` drafts are stored.

Owns the translation of parameters and config in both directions. The layout has bfloat16 matrices, no embedding (it is
the target's), `d2t` (target id minus draft id) and `t2d` (whether a target id is in the draft's vocabulary).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from distill.models.decoder import DecoderConfig
from distill.models.eagle3 import Eagle3Draft
from distill.models.layers import VocabularyMap

LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
FIRST_NAMES = LAYER_NAMES | {"input_norm": "hidden_norm", "token_norm": "input_layernorm"}
"""In the first layer the two norms are those of the residual and of the token."""
TOP_NAMES = {"fuse.weight": "fc.weight", "final_norm": "norm.weight", "head.weight": "lm_head.weight"}


def public_name(name: str) -> str:
    """The name in the layout of a parameter of `Eagle3Draft`."""
    if not name.startswith("layers."):
        return TOP_NAMES[name]
    _, index, rest = name.split(".", 2)
    names = FIRST_NAMES if index == "0" else LAYER_NAMES
    return f"layers.{index}.{names[rest.removesuffix('.weight')]}.weight"


def public_tensors(draft: Eagle3Draft) -> dict[str, Tensor]:
    """All tensors of the layout."""
    tensors = {
        public_name(name): value.detach().cpu().to(torch.bfloat16).contiguous()
        for name, value in draft.named_parameters()
    }
    return tensors | vocabulary_tensors(draft.vocabulary)


def vocabulary_tensors(vocabulary: VocabularyMap) -> dict[str, Tensor]:
    """`d2t` [N] and `t2d` [V] of a reduced vocabulary."""
    ids = vocabulary.draft_vocab.cpu()
    return {"d2t": ids - torch.arange(len(ids)), "t2d": vocabulary.to_draft.cpu() >= 0}


def public_config(draft: Eagle3Draft, *, verifier: dict[str, Any], max_len: int, k: int) -> dict[str, Any]:
    """The `config.json` of the layout.

    Args:
        draft: gives sizes and feature layers.
        verifier: `name_or_path` and `architectures` of the target.
        max_len: longest text of the target, in tokens.
        k: default number of tokens to draft.
    """
    return head_config(
        draft.config,
        num_columns=len(draft.vocabulary.draft_vocab),
        feature_layers=draft.feature_layers,
        verifier=verifier,
        max_len=max_len,
        k=k,
    )


def head_config(
    config: DecoderConfig,
    *,
    num_columns: int,
    feature_layers: tuple[int, ...],
    verifier: dict[str, Any],
    max_len: int,
    k: int,
    attention_bias: bool = False,
) -> dict[str, Any]:
    """The `config.json` of the layout for a head of any sizes.

    Args:
        config: sizes of its layers.
        num_columns: size of its vocabulary.
        feature_layers: layers of the target whose outputs it reads.
        verifier, max_len, k: see `public_config`.
        attention_bias: whether q, k, v and o have biases.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": verifier,
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **asdict(config),
            "max_position_embeddings": max_len,
            "hidden_act": "silu",
            "attention_bias": attention_bias,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "draft_vocab_size": num_columns,
        # The layout numbers the input of a layer: j is the output of layer j - 1.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in feature_layers],
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def own_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `distill.models.export` from a `config.json` of the layout; another config is returned unchanged."""
    if config.get("speculators_model_type") != "eagle3":
        return config
    ids = config.get("eagle_aux_hidden_state_layer_ids") or []
    return {
        **config["transformer_layer_config"],
        "architecture": Eagle3Draft.architecture,
        "feature_layers": [index - 1 for index in ids],
        "target": config.get("target", {}),
    }
