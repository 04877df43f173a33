"""The `medusa` draft: one head per drafted position, all of them on the target's last hidden state.

Owns the heads, their training and the layout in which they are stored, after Medusa (Cai et al. 2024). A head is a
residual block or several; the heads share one trained output layer, so that drafting all positions reads it once. They
see no token after the hidden state, and none of the drafted ones. Knows nothing of data on disk or losses.

    target    x_t -> ... -> last layer -> final norm -> h_t
    head j    z = h_t;  z += silu(W_j z + b_j) per block;  output z: p(x_t+2+j)        j = 0, 1, ...

The layout is that of vLLM: `blocks.j.layers.i`, `lm_heads.0` for the shared output layer (`original_lm_head`), and
`token_map` for the token of each of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.data.shards import Batch, Shard
from distill.models.decoder import DecoderConfig, FrozenTarget, rms_norm
from distill.models.layers import Chains, VocabularyMap
from engine.errors import ConfigError

TOKEN_MAP, OUTPUT = "token_map", "lm_heads.0.weight"


class MedusaDraft(nn.Module):
    """Medusa heads of H x H residual blocks, over a reduced vocabulary.

    Args:
        config: of the target.
        draft_vocab: [N] int64 token of each row of the output layer.
        final_norm: [H] weight of the target's final norm, which stays as it is.
        num_heads: number of tokens that one forward drafts, at least 2.
        num_layers: residual blocks of each head.
    """

    architecture = "medusa"

    def __init__(
        self, config: DecoderConfig, draft_vocab: Tensor, final_norm: Tensor, *, num_heads: int, num_layers: int = 1
    ) -> None:
        super().__init__()
        if num_heads < 2:
            raise ValueError(f"heads: {num_heads} given, Medusa has at least 2")
        self.config, self.num_blocks = config, num_layers
        self.feature_layers = (config.num_hidden_layers - 1,)
        self.vocabulary = VocabularyMap(draft_vocab, config.vocab_size)
        self.target_norm: Tensor
        self.register_buffer("target_norm", final_norm, persistent=False)
        size = config.hidden_size
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers)) for _ in range(num_heads)
        )
        self.head = nn.Linear(size, len(draft_vocab), bias=False)

    @property
    def positions(self) -> int:
        """Number of heads."""
        return len(self.layers)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, *, layers: tuple[int, ...] | None = None) -> None:
        """Blocks that change nothing, and the target's output layer: each head begins as the target's prediction.

        Raises:
            ConfigError: `layers`, since there is no layer of the target to begin from.
        """
        if layers is not None:
            raise ConfigError("from_layers: Medusa heads have no decoder layers; leave --from-layers out")
        for name, value in self.layers.named_parameters():
            value.zero_() if name.endswith(".bias") else nn.init.normal_(value, std=1e-3)
        self.head.weight.copy_(target.head_weight[self.vocabulary.draft_vocab])

    def state(self, hidden: Tensor, head: int) -> Tensor:
        """Normed hidden states [..., H] -> what the output layer reads for a head, [..., H]."""
        blocks = self.layers[head]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden

    def unroll(self, batch: Batch, steps: int, first_root: int = 0, every: int = 1) -> Chains:
        """As `FeatureDraft.unroll`: step s is head s. Of the features, only those of the last layer are read."""
        num_roots = batch.tokens.shape[1] - 1
        features = batch.features[:, :-1, -1].to(self.head.weight.dtype)
        hidden = rms_norm(features, self.target_norm.to(features.dtype), self.config.rms_norm_eps)
        found = []
        for step in range(min(steps, self.positions, num_roots)):
            # Roots whose token would lie past the row's end are dropped.
            roots = slice(0 if step == 0 and every > 1 else first_root, num_roots - step, every if step else 1)
            if hidden[:, roots].shape[1] == 0:
                break
            found.append(self.state(hidden[:, roots], step))
        return Chains(found, [])


def stored_name(name: str) -> str:
    """The name in the layout of a parameter of `MedusaDraft`."""
    if name == "head.weight":
        return OUTPUT
    _, head, block, rest = name.split(".")
    return f"blocks.{head}.layers.{block}.{rest}"


def stored_tensors(draft: MedusaDraft) -> dict[str, Tensor]:
    """All tensors of the layout."""
    tensors = {
        stored_name(name): value.detach().cpu().to(torch.bfloat16).contiguous()
        for name, value in draft.named_parameters()
    }
    return tensors | {TOKEN_MAP: draft.vocabulary.draft_vocab.cpu()}


def stored_config(draft: MedusaDraft) -> dict[str, Any]:
    """The `config.json` of the layout. Another engine takes any key with `num` and `heads` for the number of heads."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": draft.config.hidden_size,
        "vocab_size": draft.config.vocab_size,
        "medusa_num_heads": draft.positions,
        "medusa_num_layers": draft.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "truncated_vocab_size": len(draft.vocabulary.draft_vocab),
        "torch_dtype": "bfloat16",
    }


def is_stored_medusa(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is of Medusa heads."""
    return config.get("model_type") == "medusa"


def from_stored(config: dict[str, Any], tensors: dict[str, Tensor], target: FrozenTarget) -> MedusaDraft:
    """Heads that `stored_config` and `stored_tensors` describe.

    Raises:
        ConfigError: the heads have output layers of their own, or no biases.
    """
    if not (config.get("original_lm_head") and config.get("medusa_fc_bias") and TOKEN_MAP in tensors):
        raise ConfigError(
            "draft: only Medusa heads of `paceline distill` are measured here, which share their output layer"
        )
    draft = MedusaDraft(
        target.config,
        tensors[TOKEN_MAP],
        target.final_norm,
        num_heads=int(config["medusa_num_heads"]),
        num_layers=int(config["medusa_num_layers"]),
    )
    with torch.no_grad():
        for name, value in draft.named_parameters():
            value.copy_(tensors[stored_name(name)])
    return draft


def check_last_layer(target: FrozenTarget, shards: Sequence[Path]) -> None:
    """Check that the last of the stored features is the output of the target's last layer.

    Raises:
        ConfigError: the heads could not be trained on these data; names the layers.
    """
    last = target.config.num_hidden_layers - 1
    stored = [target.feature_layers, *(tuple(Shard.open(path).meta.get("feature_layers", (last,))) for path in shards)]
    for layers in stored:
        if layers[-1] != last:
            raise ConfigError(f"feature_layers: {layers} given; Medusa heads read layer {last}, the target's last one")


def tapped_layers(configs: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The different sets of layers that drafts of these configs read. Medusa heads read the last one of a set."""
    layers = {tuple(config.get("feature_layers", ())) for config in configs if not is_stored_medusa(config)} - {()}
    of_heads = {tuple(config["feature_layers"]) for config in configs if is_stored_medusa(config)}
    return sorted(layers | {last for last in of_heads if not any(other[-1:] == last for other in layers)})
