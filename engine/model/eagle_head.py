"""The input of an EAGLE draft's decoder, and the decoder of EAGLE-3 heads, whose first layer reads two vectors per row.

Owns the projections of both kinds of draft with their norms, after EAGLE-3 (Li et al. 2025). At a committed token the
input combines the token's embedding and the target's hidden states at the position before. At a drafted token the
draft's own output at the position before (`previous_hidden`) replaces the target's hidden states. Knows nothing of
files or caches.

    f[p] target features, e(x) token embedding, a[p] output of the draft's last layer, norm = RMSNorm

    Paceline's   committed   fuse(norm f[p-1]) + token(norm e(x[p]))   -> layers -> a[p]   -> logits of x[p+1]
                 drafted     carry(norm a[p-1]) + token(norm e(x[p]))  -> layers -> a[p]   -> logits of x[p+1]
                 masked      carry(norm of the last committed input) + mask, in a parallel draft
    public       committed   norm e(x[p]) beside fc(f[p-1])            -> layers -> a[p]   -> logits of x[p+1]
                 drafted     norm e(x[p]) beside a[p-1]                -> layers -> a[p]   -> logits of x[p+1]
                 masked      norm e(mask) beside fc(mask features), in a P-EAGLE head (Hui et al. 2026)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.core.step import ForwardResult
from engine.model.decoder import Decoder, Inputs, LayerCache
from engine.model.layers import Linear, RmsNorm


@dataclass(frozen=True, slots=True)
class EagleHead:
    """Projections of Paceline's own drafts, for F feature layers and hidden size H."""

    feature_norm: torch.Tensor
    """[F, H] scale of each feature layer, applied after its root mean square is normalised to 1."""
    fuse: Linear
    """F * H -> H, of the target's features."""
    token_norm: RmsNorm
    token: Linear
    """H -> H, of the token embedding."""
    carry_norm: RmsNorm
    carry: Linear
    """H -> H, of the previous hidden state."""
    eps: float
    """Added to the mean square in the norm of the features."""
    mask: torch.Tensor | None = None
    """[H] what a parallel draft adds to the carried input at masked positions: the state that they share, and the
    projected embedding of the mask. None for a chain."""

    @property
    def feature_width(self) -> int:
        """Numbers per position of the target's features: F * H."""
        return self.feature_norm.numel()

    def project_tokens(self, embedded: torch.Tensor) -> torch.Tensor:
        """The part of the input that depends on the token only.

        Args:
            embedded: [N, H] token embeddings.

        Returns:
            [N, H].
        """
        return self.token(self.token_norm(embedded))

    def committed_inputs(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The decoder's input at committed tokens.

        Args:
            tokens: [N, H] from `project_tokens`.
            features: [N, F * H] of the target at the position before each token.

        Returns:
            [N, H].
        """
        num_layers, hidden = self.feature_norm.shape
        normed = F.rms_norm(features.view(-1, num_layers, hidden), (hidden,), eps=self.eps) * self.feature_norm
        return self.fuse.plus(normed.flatten(1), tokens)

    def drafted_inputs(self, tokens: torch.Tensor, previous_hidden: torch.Tensor) -> torch.Tensor:
        """The decoder's input at drafted tokens.

        Args:
            tokens: [N, H] from `project_tokens`.
            previous_hidden: [N, H] output of the last layer at the position before each token.

        Returns:
            [N, H].
        """
        return self.carry.plus(self.carry_norm(previous_hidden), tokens)

    def masked_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """The decoder's input at the masked positions after a committed token. It is the same at all of them.

        Args:
            inputs: [N, H] of the committed tokens, from `committed_inputs`.

        Returns:
            [N, H].

        Raises:
            ValueError: the draft is a chain.
        """
        if self.mask is None:
            raise ValueError("mask: an eagle draft that is a chain has no masked positions")
        return self.carry.plus(self.carry_norm(inputs), self.mask.repeat(len(inputs), 1))


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """The input of a public EAGLE-3 head of hidden size H, for F feature layers of a target of hidden size T."""

    feature_norms: tuple[RmsNorm, ...]
    """Norms over equal parts of the features: none, one over all F * T numbers, or one per feature layer."""
    fuse: Linear
    """`fc`: F * T -> H, of the target's features."""
    token_norm: RmsNorm
    output_norm: RmsNorm | None
    """Norm of the previous hidden state; None where the next position reads it as it is."""
    feature_width: int
    """Numbers per position of the target's features: F * T."""
    mask_features: torch.Tensor | None = None
    """[F * T] what replaces the target's features at the masked positions of a P-EAGLE head; None for a chain."""
    mask: torch.Tensor | None = None
    """[2 H] the decoder's input at masked positions, from `with_mask`."""

    def with_mask(self, embedded: torch.Tensor) -> Eagle3Head:
        """This head with the input of its masked positions, which is the same at all of them.

        Args:
            embedded: [H] embedding of the mask token.
        """
        if self.mask_features is None:
            return self
        mask = self.committed_inputs(self.project_tokens(embedded[None]), self.mask_features[None])
        return replace(self, mask=mask[0])

    def masked_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """The decoder's input at the masked positions after committed tokens: [N, 2 H], for N of them.

        Raises:
            ValueError: the head is a chain.
        """
        if self.mask is None:
            raise ValueError("mask: an EAGLE-3 head that is a chain has no masked positions")
        return self.mask.expand(len(inputs), -1)

    def project_tokens(self, embedded: torch.Tensor) -> torch.Tensor:
        """The part of the input that depends on the token only. [N, H] -> [N, H]."""
        return self.token_norm(embedded)

    def committed_inputs(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The decoder's input at committed tokens.

        Args:
            tokens: [N, H] from `project_tokens`.
            features: [N, F * T] of the target at the position before each token.

        Returns:
            [N, 2 H].
        """
        if self.feature_norms:
            parts = features.chunk(len(self.feature_norms), dim=1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.feature_norms, parts, strict=True)]
            features = torch.cat(normed, dim=1)
        return torch.cat((tokens, self.fuse(features)), dim=1)

    def drafted_inputs(self, tokens: torch.Tensor, previous_hidden: torch.Tensor) -> torch.Tensor:
        """The decoder's input at drafted tokens.

        Args:
            tokens: [N, H] from `project_tokens`.
            previous_hidden: [N, H] output of the last layer at the position before each token.

        Returns:
            [N, 2 H].
        """
        previous = previous_hidden if self.output_norm is None else self.output_norm(previous_hidden)
        return torch.cat((tokens, previous), dim=1)


class Eagle3Decoder(Decoder):
    """The decoder of an EAGLE-3 head. Arguments of the constructor are those of `Decoder`.

    The first layer's `input_norm` is the head's `hidden_norm`, and its `qkv` reads 2 H numbers per row.
    """

    def compute(self, inputs: Inputs, caches: list[LayerCache], embedded: torch.Tensor | None = None) -> ForwardResult:
        """As `Decoder.compute`.

        Args:
            inputs: N rows.
            caches: KV cache of each layer.
            embedded: [N, 2 H], the normed token beside the hidden state.

        Raises:
            ValueError: `embedded` is missing.
        """
        if embedded is None:
            raise ValueError("embedded: an EAGLE-3 head has no input without it")
        rotation = self._rope.at(inputs.positions)
        tokens, hidden = embedded.chunk(2, dim=1)
        features = []
        for index, (layer, cache) in enumerate(zip(self._weights.layers, caches, strict=True)):
            normed = layer.input_norm(hidden)
            if index == 0:
                variant = self.config.eagle3
                hidden = normed if variant is not None and variant.norm_before_residual else hidden
                normed = torch.cat((tokens, normed), dim=1)
            hidden = self._attend(layer, normed, hidden, rotation, cache, inputs)
            hidden = self._residual(layer.mlp, layer.mlp_norm(hidden), hidden, layer.output_norm)
            if index in self.feature_layers:
                features.append(hidden)
        return self._result(hidden, features, inputs)
