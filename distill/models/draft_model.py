"""The `draft_model` draft: a small, independent Llama over token ids.

Owns the architecture and its initialisation from layers of the target. It reads no features, so its chain steps are its
causal outputs. Knows nothing of data or losses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.data.shards import Batch
from distill.models.decoder import DecoderConfig, FrozenTarget, rms_norm, rope_tables
from distill.models.layers import Chains, DraftLayer, VocabularyMap, copy_layer


class SmallDraft(nn.Module):
    """A Llama with few layers and a reduced output vocabulary; `embed` is the frozen embedding of the target."""

    architecture = "draft_model"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: DecoderConfig, draft_vocab: Tensor, embed: Tensor, *, num_layers: int = 3) -> None:
        super().__init__()
        self.config = replace(config, num_hidden_layers=num_layers)
        self.vocabulary = VocabularyMap(draft_vocab, config.vocab_size)
        self.embed: Tensor
        self.register_buffer("embed", embed, persistent=False)
        self.layers = nn.ModuleList([DraftLayer(self.config) for _ in range(num_layers)])
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = nn.Linear(config.hidden_size, len(draft_vocab), bias=False)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, *, layers: tuple[int, ...] | None = None) -> None:
        """Copy the target's first layers and its last one, or `layers`, and its head and final norm."""
        count = len(self.layers)
        chosen = layers or (*range(count - 1), target.config.num_hidden_layers - 1)
        for layer, index in zip(self.layers, chosen, strict=True):
            assert isinstance(layer, DraftLayer)
            copy_layer(layer, target, index)
        self.final_norm.copy_(target.final_norm)
        self.head.weight.copy_(target.head_weight[self.vocabulary.draft_vocab])

    def unroll(self, batch: Batch, steps: int, first_root: int = 0, every: int = 1) -> Chains:
        """See `EagleDraft.unroll`. The chain of a model over tokens alone is its causal output."""
        length = batch.tokens.shape[1]
        dtype = self.head.weight.dtype
        cos, sin = rope_tables(self.config, length, batch.tokens.device)
        cos, sin = cos.to(dtype)[None, :, None], sin.to(dtype)[None, :, None]
        x = F.embedding(batch.tokens, self.embed).to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, [])
        x = rms_norm(x, self.final_norm, self.config.rms_norm_eps)
        steps = min(steps, length - 1 - first_root)
        firsts = [0 if every > 1 else first_root, *[first_root] * (steps - 1)]
        return Chains([x[:, s + 1 + first :: every if s else 1] for s, first in enumerate(firsts[:steps])], [])
