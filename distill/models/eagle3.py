"""The `eagle3` draft: an EAGLE-3 head in the public layout, which other engines load.

Owns the parameters of the head as EAGLE-3 defines them (Li et al. 2025), and their initialisation from the target.
Knows nothing of files. `distill.models.eagle` unrolls it in training.

    committed  x_t, features f_t ->  fuse(f_t),  norm e(x_t+1) beside norm of it in q, k, v  -> layers -> a_t
    drafted    x_t+2             ->  a_t,        norm e(x_t+2) beside norm of it in q, k, v  -> layers -> a'_t
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.models.decoder import DecoderConfig, FrozenTarget
from distill.models.eagle import FeatureDraft, Rotary
from distill.models.layers import DraftLayer, KeysValues, PairLayer


class Eagle3Draft(FeatureDraft):
    """An EAGLE-3 head: the token reaches the residual stream through attention only, and the last output carries over.

    It has no place for the `token` and `carry` projections of Paceline's `eagle`; see `distill.models.widened`.
    """

    architecture = "eagle3"

    def __init__(
        self,
        config: DecoderConfig,
        feature_layers: tuple[int, ...],
        draft_vocab: Tensor,
        embed: Tensor,
        *,
        num_layers: int = 1,
    ) -> None:
        super().__init__(config, feature_layers, draft_vocab, embed, num_layers=num_layers)
        self.fuse = nn.Linear(len(feature_layers) * config.hidden_size, config.hidden_size, bias=False)

    def make_layers(self) -> list[DraftLayer]:
        return [PairLayer(self.config), *[DraftLayer(self.config) for _ in range(self.config.num_hidden_layers - 1)]]

    @torch.no_grad()
    def initialise(
        self, target: FrozenTarget, *, layers: tuple[int, ...] | None = None, residual_size: float = 26.0
    ) -> None:
        """Pass the last feature through at unit size, and copy layers and head from the target.

        `residual_size` is the root mean square of the target's hidden state at the copied layers.
        """
        hidden = self.config.hidden_size
        nn.init.normal_(self.fuse.weight, std=0.01 / residual_size)
        self.fuse.weight[:, -hidden:] += torch.eye(hidden) / residual_size
        self.copy_from(target, layers, residual_size)

    def embedded(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed).to(self.head.weight.dtype)

    def fused(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fuse(features.flatten(2))
        return fused

    def decode(self, source: Tensor, tokens: Tensor, rotary: Rotary, pasts: list[KeysValues], roots: Tensor) -> Tensor:
        first = self.layers[0]
        assert isinstance(first, PairLayer)
        x = first.pair(source, tokens, *rotary, pasts[0], roots)
        for layer, past in zip(self.layers[1:], pasts[1:], strict=True):
            x = layer(x, *rotary, past, roots)
        return x

    def carried(self, x: Tensor) -> Tensor:
        return x
