"""What an `eagle` draft adds to a decoder: vectors that enter its layers in place of token embeddings.

Owns the three projections and their norms, after EAGLE-3 (Li et al. 2025). A row of a committed token is made from its
embedding and the target's hidden states at the position before; for a drafted token the head's own output at the
position before, `previous_hidden`, stands in for those. Knows nothing of layers, caches or sequences.

    committed   fuse(norm f[p-1]) + token(norm e(x[p]))   -> layers -> a[p]   -> head: law of x[p+1]
    drafted     carry(norm a[p-1]) + token(norm e(x[p]))  -> layers -> a[p]   -> head: law of x[p+1]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model.layers import Linear, RmsNorm


@dataclass(frozen=True, slots=True)
class EagleHead:
    """The weights; F feature layers, H hidden size."""

    feature_norm: torch.Tensor
    """[F, H]: each feature is normed to root mean square 1, then scaled by its row."""
    fuse: Linear
    """F * H -> H."""
    token_norm: RmsNorm
    token: Linear
    carry_norm: RmsNorm
    carry: Linear
    eps: float

    @property
    def feature_width(self) -> int:
        """Numbers per position that it reads of the target: F * H."""
        return self.feature_norm.numel()

    def tokens(self, embedded: torch.Tensor) -> torch.Tensor:
        """What a token brings into its row, whatever is before it.

        Args:
            embedded: [N, H] embeddings of the tokens.
        """
        return self.token(self.token_norm(embedded))

    def committed(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Rows of committed tokens.

        Args:
            tokens: [N, H] from `tokens`.
            features: [N, F * H] of the target at the position before each.
        """
        count, hidden = self.feature_norm.shape
        normed = F.rms_norm(features.view(-1, count, hidden), (hidden,), eps=self.eps) * self.feature_norm
        return self.fuse.plus(normed.flatten(1), tokens)

    def drafted(self, tokens: torch.Tensor, previous_hidden: torch.Tensor) -> torch.Tensor:
        """Rows of drafted tokens.

        Args:
            tokens: [N, H] from `tokens`.
            carried: [N, H] output of the last layer at the position before each.
        """
        return self.carry.plus(self.carry_norm(previous_hidden), tokens)
