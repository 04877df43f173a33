"""The input projections of an EAGLE draft: vectors that replace token embeddings as the decoder's input.

Owns three projections with their norms, after EAGLE-3 (Li et al. 2025). At a committed token the input combines the
token's embedding and the target's hidden states at the position before. At a drafted token the draft's own output at
the position before (`previous_hidden`) replaces the target's hidden states. Knows nothing of layers or caches.

    f[p] target features, e(x) token embedding, a[p] output of the draft's last layer, norm = RMSNorm

    committed   fuse(norm f[p-1]) + token(norm e(x[p]))   -> layers -> a[p]   -> logits of x[p+1]
    drafted     carry(norm a[p-1]) + token(norm e(x[p]))  -> layers -> a[p]   -> logits of x[p+1]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model.layers import Linear, RmsNorm


@dataclass(frozen=True, slots=True)
class EagleHead:
    """Weights of the projections, for F feature layers and hidden size H."""

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
