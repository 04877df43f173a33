"""The parallel `eagle` draft: one forward yields the distributions of several tokens.

Owns the masked positions that follow the committed ones, and their training in one forward, after P-EAGLE (Hui et al.
2026). A masked position stands for a token that is not drafted yet: a learnt embedding replaces the token's, and a
learnt state shared by all masked positions is added to the carried input of the last committed position. Knows nothing
of data or losses.

    committed  x_t, features f_t  ->  u_t = fuse(norm f_t) + token(norm e(x_t+1))   -> layer(s) -> head: p(x_t+2)
    masked 1   after root t       ->  m_t = carry(norm u_t) + state + token(norm e) -> layer(s) -> head: p(x_t+3)
    masked 2   after root t       ->  m_t                                           -> layer(s) -> head: p(x_t+4)

P-EAGLE gives the shared state alone. One layer with few KV heads then passes less of the last position on than its
hidden size, so here its input comes along. The positions differ by their rotation only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.data.shards import Batch
from distill.models.decoder import DecoderConfig, rms_norm, rope_tables
from distill.models.eagle import EagleDraft
from distill.models.layers import Chains, DraftLayer


class ParallelDraft(EagleDraft):
    """An `eagle` draft whose forward yields `positions` distributions.

    Args:
        config, feature_layers, draft_vocab, embed, num_layers: see `EagleDraft`.
        positions: number of tokens that one forward drafts, at least 2.
    """

    def __init__(
        self,
        config: DecoderConfig,
        feature_layers: tuple[int, ...],
        draft_vocab: Tensor,
        embed: Tensor,
        *,
        num_layers: int = 1,
        positions: int,
    ) -> None:
        super().__init__(config, feature_layers, draft_vocab, embed, num_layers=num_layers)
        if positions < 2:
            raise ValueError(f"parallel: {positions} positions given, a parallel draft has at least 2")
        self.positions = positions
        self.mask_state = nn.Parameter(torch.zeros(config.hidden_size))
        self.mask_embedding = nn.Parameter(embed[draft_vocab].float().mean(0))

    def freeze_shared(self) -> None:
        """Train only what the masked positions use alone, so that the first position stays what it is."""
        own = ("mask_state", "mask_embedding", "carry.weight", "carry_norm")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in own)

    def masked(self, inputs: Tensor) -> Tensor:
        """Layer inputs of last committed positions [..., H] -> those of the masked positions after them, [..., H]."""
        eps = self.config.rms_norm_eps
        constant = self.mask_state + self.token(rms_norm(self.mask_embedding, self.token_norm, eps))
        carried: Tensor = self.carry(rms_norm(inputs, self.carry_norm, eps))
        masked: Tensor = carried + constant
        return masked

    def unroll(self, batch: Batch, steps: int, first_root: int = 0, every: int = 1) -> Chains:
        """As `FeatureDraft.unroll`, in one forward: step s > 0 is the masked position s after each root.

        The state of root t has seen the target's features up to t and the true tokens up to t + 1, at every step.
        """
        eps, num_roots = self.config.rms_norm_eps, batch.tokens.shape[1] - 1
        num_masked, device = min(steps, self.positions) - 1, batch.tokens.device
        dtype = self.head.weight.dtype
        roots = torch.arange(first_root, num_roots, every, device=device)
        x = self.fused(batch.features.to(dtype))[:, :-1] + self.token(self.embedded(batch.tokens))[:, 1:]
        masked = self.masked(x[:, roots])[:, :, None].expand(-1, -1, num_masked, -1)
        x = torch.cat((x, masked.flatten(1, 2)), dim=1)
        after = roots[:, None] + 2 + torch.arange(num_masked, device=device)
        positions = torch.cat((1 + torch.arange(num_roots, device=device), after.flatten()))
        tables = rope_tables(self.config, num_roots + num_masked + 1, device)
        cos, sin = (table.to(dtype)[positions][None, :, None] for table in tables)
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            q, k, v = layer.project(rms_norm(x, layer.input_norm, eps), cos, sin)
            x = layer.finish(x, masked_attention(q, k, v, roots, num_masked))
        x = rms_norm(x, self.final_norm, eps)
        first = x[:, :num_roots] if every > 1 else x[:, first_root:num_roots]
        later = torch.unflatten(x[:, num_roots:], 1, (len(roots), num_masked))
        found = [first]
        for step in range(1, num_masked + 1):
            count = int((roots < num_roots - step).sum())  # Roots whose token would lie past the row's end are dropped.
            if count == 0:
                break
            found.append(later[:, :count, step - 1])
        return Chains(found, [])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, roots: Tensor, num_masked: int) -> Tensor:
    """Attention over committed positions, and over the masked positions after some of them.

        committed t        k0 k1 .. kt
        masked j after t   k0 k1 .. kt  m1 .. mj     m only those after the same t

    Args:
        q: [R, T + A * M, heads, d] queries of T committed positions, then of the M masked ones after each of A roots.
        k, v: likewise, [R, T + A * M, kv_heads, d].
        roots: [A] int64 committed positions, ascending.
        num_masked: M, may be 0.

    Returns:
        [R, T + A * M, heads, d].
    """
    length = q.shape[1] - len(roots) * num_masked
    groups = q.shape[2] // k.shape[2]
    out = F.scaled_dot_product_attention(
        q[:, :length].transpose(1, 2),
        k[:, :length].transpose(1, 2).repeat_interleave(groups, 1),
        v[:, :length].transpose(1, 2).repeat_interleave(groups, 1),
        is_causal=True,
    ).transpose(1, 2)
    if num_masked == 0:
        return out
    shape = (len(roots), num_masked)
    q = torch.unflatten(q[:, length:].transpose(1, 2), 1, (-1, groups)) * q.shape[-1] ** -0.5  # [R, kv, G, A * M, d]
    keys, values = (part[:, :length].transpose(1, 2).unsqueeze(2) for part in (k, v))  # [R, kv, 1, T, d]
    own_keys, own_values = (torch.unflatten(part[:, length:].transpose(1, 2).unsqueeze(2), 3, shape) for part in (k, v))
    scores = torch.unflatten(q @ keys.transpose(-1, -2), 3, shape)  # [R, kv, G, A, M, T]
    own = torch.unflatten(q, 3, shape) @ own_keys.transpose(-1, -2)  # [R, kv, G, A, M, M]
    later = torch.arange(length, device=q.device) > roots[:, None, None]
    upper = torch.ones(num_masked, num_masked, dtype=torch.bool, device=q.device).triu(1)
    scores = torch.cat((scores.masked_fill(later, float("-inf")), own.masked_fill(upper, float("-inf"))), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    mixed = weights[..., :length].flatten(3, 4) @ values + (weights[..., length:] @ own_values).flatten(3, 4)
    return torch.cat((out, mixed.flatten(1, 2).transpose(1, 2)), dim=1)
