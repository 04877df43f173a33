"""The `eagle` draft: one decoder layer over the next token's embedding and the target's hidden features.

Owns the head's architecture, its initialisation from the target and the training-time unrolling that all drafts on
features share, after EAGLE-3 (Li et al. 2025): features of low, middle and high layers are fused for committed tokens,
and the head's last output replaces them for drafted tokens. Knows nothing of data or losses.

    committed  x_t, features f_t ->  fuse(norm f_t) + token(norm e(x_t+1))  -> layer(s) -> a_t  -> head: p(x_t+2)
    drafted    x_t+2             ->  carry(norm a_t) + token(norm e(x_t+2)) -> layer(s) -> a'_t -> head: p(x_t+3)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.data.shards import Batch
from distill.models.decoder import DecoderConfig, FrozenTarget, rms_norm, rope_tables
from distill.models.layers import Chains, DraftLayer, KeysValues, VocabularyMap, copy_layer

Rotary = tuple[Tensor, Tensor]
"""cos and sin [1, T, 1, d]."""


class FeatureDraft(nn.Module, ABC):
    """A draft on the target's features; `embed` is the frozen embedding of the target.

    Subclasses own the parameters of the input. Shapes: R rows, T positions, F feature layers, H hidden size.
    """

    architecture: str

    def __init__(
        self,
        config: DecoderConfig,
        feature_layers: tuple[int, ...],
        draft_vocab: Tensor,
        embed: Tensor,
        *,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.config = replace(config, num_hidden_layers=num_layers)
        self.feature_layers = feature_layers
        self.vocabulary = VocabularyMap(draft_vocab, config.vocab_size)
        self.embed: Tensor
        self.register_buffer("embed", embed, persistent=False)
        self.layers = nn.ModuleList(self.make_layers())
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = nn.Linear(config.hidden_size, len(draft_vocab), bias=False)

    def make_layers(self) -> list[DraftLayer]:
        """The decoder layers."""
        return [DraftLayer(self.config) for _ in range(self.config.num_hidden_layers)]

    @abstractmethod
    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens [R, T] -> what the input has of each token, [R, T, H]."""

    @abstractmethod
    def fused(self, features: Tensor) -> Tensor:
        """Features [R, T, F, H] -> the source of committed tokens, [R, T, H]."""

    @abstractmethod
    def decode(self, source: Tensor, tokens: Tensor, rotary: Rotary, pasts: list[KeysValues], roots: Tensor) -> Tensor:
        """Source and `embedded` tokens [R, T, H] -> output of the last layer; see `DraftLayer.forward`."""

    @abstractmethod
    def carried(self, x: Tensor) -> Tensor:
        """Output of the last layer [R, T, H] -> the source of the next drafted token."""

    @torch.no_grad()
    def copy_from(self, target: FrozenTarget, layers: tuple[int, ...] | None, residual_size: float) -> None:
        """Copy layers (by default the target's last ones), final norm and head from the target.

        `residual_size` is the root mean square of the target's hidden state at the copied layers.
        """
        last, count = target.config.num_hidden_layers, len(self.layers)
        for layer, index in zip(self.layers, layers or tuple(range(last - count, last)), strict=True):
            assert isinstance(layer, DraftLayer)
            copy_layer(layer, target, index)
            # The residual stream of the target's last layers is far from unit size; this one starts at unit size.
            layer.o.weight /= residual_size
            layer.down.weight /= residual_size
        self.final_norm.copy_(target.final_norm)
        self.head.weight.copy_(target.head_weight[self.vocabulary.draft_vocab])

    def unroll(self, batch: Batch, steps: int, first_root: int = 0, every: int = 1) -> Chains:
        """Chain steps 0..steps-1, rooted at every position from `first_root` on.

        The state of root t at step s has seen the target's features up to t and the true tokens up to t + 1 + s.
        With `every` > 1 the first step covers all positions, and the chain continues from roots `first_root`,
        `first_root + every`, ... only: later steps teach little more, so a sample of them saves half of the work.
        """
        eps = self.config.rms_norm_eps
        length = batch.tokens.shape[1]
        cos, sin = rope_tables(self.config, length + 1, batch.tokens.device)
        dtype = self.head.weight.dtype
        cos, sin = cos.to(dtype)[None, :, None], sin.to(dtype)[None, :, None]
        tokens, fused = self.embedded(batch.tokens), self.fused(batch.features.to(dtype))
        source = fused
        pasts: list[KeysValues] = [[] for _ in self.layers]
        found, errors = [], []
        for step in range(steps):
            width = length - 1 - step
            roots = torch.arange(first_root if step else 0, width, every if step else 1, device=cos.device)
            if width <= (first_root if step or every == 1 else 0):
                break
            # Roots whose chain would run past the row's end are dropped, here and from the keys kept so far.
            pasts = [_shortened(past, width, len(roots)) for past in pasts]
            rotary = (cos[:, roots + step + 1], sin[:, roots + step + 1])
            x = self.decode(source[:, : len(roots)], tokens[:, roots + step + 1], rotary, pasts, roots)
            if step == 0:
                found.append(rms_norm(x if every > 1 else x[:, first_root:], self.final_norm, eps))
                x, roots = x[:, first_root::every], roots[first_root::every]
            else:
                found.append(rms_norm(x, self.final_norm, eps))
            source = self.carried(x)
            expected = fused[:, roots + step + 1].detach().float()
            distance = (source.float() - expected).square().mean(-1)
            errors.append(distance / expected.square().mean(-1).clamp(min=1e-6))
        return Chains(found, errors)


class EagleDraft(FeatureDraft):
    """Paceline's own head: one residual stream takes both the fused features and the token."""

    architecture = "eagle"

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
        hidden, count = config.hidden_size, len(feature_layers)
        self.feature_norm = nn.Parameter(torch.ones(count, hidden))
        self.fuse = nn.Linear(count * hidden, hidden, bias=False)
        self.token_norm = nn.Parameter(torch.ones(hidden))
        self.token = nn.Linear(hidden, hidden, bias=False)
        self.carry_norm = nn.Parameter(torch.ones(hidden))
        self.carry = nn.Linear(hidden, hidden, bias=False)

    @torch.no_grad()
    def initialise(
        self, target: FrozenTarget, *, layers: tuple[int, ...] | None = None, residual_size: float = 26.0
    ) -> None:
        """Pass the last feature through, add the token embedding, and copy layers and head from the target."""
        hidden = self.config.hidden_size
        eye = torch.eye(hidden)
        nn.init.normal_(self.fuse.weight, std=0.01)
        self.fuse.weight[:, -hidden:] += eye
        self.token.weight.copy_(eye)
        self.carry.weight.copy_(eye)
        self.copy_from(target, layers, residual_size)

    def embedded(self, tokens: Tensor) -> Tensor:
        dtype = self.fuse.weight.dtype
        return rms_norm(F.embedding(tokens, self.embed).to(dtype), self.token_norm, self.config.rms_norm_eps)

    def fused(self, features: Tensor) -> Tensor:
        normed = F.rms_norm(features, (features.shape[-1],), eps=self.config.rms_norm_eps) * self.feature_norm
        fused: Tensor = self.fuse(normed.flatten(2))
        return fused

    def decode(self, source: Tensor, tokens: Tensor, rotary: Rotary, pasts: list[KeysValues], roots: Tensor) -> Tensor:
        x: Tensor = source + self.token(tokens)
        for layer, past in zip(self.layers, pasts, strict=True):
            x = layer(x, *rotary, past, roots)
        return x

    def carried(self, x: Tensor) -> Tensor:
        source: Tensor = self.carry(rms_norm(x, self.carry_norm, self.config.rms_norm_eps))
        return source


def _shortened(past: KeysValues, width: int, num_roots: int) -> KeysValues:
    """Drop surplus positions: the keys of roots cover all positions, those of later steps only the chains."""
    ends = [width] + [num_roots] * (len(past) - 1)
    return [(k[:, :end], v[:, :end]) for end, (k, v) in zip(ends, past, strict=False)]
