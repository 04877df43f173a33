"""Trainable decoder layers and the vocabulary map that both draft architectures use.

Owns a Llama layer whose attention can follow many chains at once: every row position is the root of its own chain.
Knows the names of the target's weights, and nothing of losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.models.decoder import DecoderConfig, FrozenTarget, rms_norm, rotate

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values [R, T, kv_heads, d]: the first entry of the roots, each further one of a chain step."""


@dataclass(frozen=True)
class Chains:
    """Result of unrolling a draft from every root: lists by chain step s = 0, 1, ..."""

    hidden: list[Tensor]
    """Entry s [R, roots, H] holds the final state of root t, which predicts token t + 2 + s."""
    feature_errors: list[Tensor]
    """Entry s [R, roots] float32 holds the mean squared distance between the input of step s + 1 and the target's fused
    feature that it replaces, relative to the size of that feature. Empty for drafts without features."""


class DraftLayer(nn.Module):
    """One Llama decoder layer.

    With an empty cache it is ordinary causal attention over the row. With s entries it is step s of many chains at
    once: position t sees the first entry's positions up to t (the committed past) and its own chain's s - 1 later
    keys. Where there are fewer queries than roots, they are the last ones.

        root keys    k0 k1 k2 .. kt            shared, causal
        chain of t                 c1 c2 .. cs  only position t's own
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c, self.config = config, config
        heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q = nn.Linear(c.hidden_size, heads, bias=False)
        self.k = nn.Linear(c.hidden_size, kv, bias=False)
        self.v = nn.Linear(c.hidden_size, kv, bias=False)
        self.o = nn.Linear(heads, c.hidden_size, bias=False)
        self.gate = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: KeysValues, roots: Tensor | None = None) -> Tensor:
        """x [R, T, H], cos and sin [1, T, 1, d] -> [R, T, H]; this step's keys and values are appended to `past`.

        `roots` [T] int64 holds the roots of the queries of a later step; by default the last ones.
        """
        return self.from_normed(x, rms_norm(x, self.input_norm, self.config.rms_norm_eps), cos, sin, past, roots)

    def from_normed(
        self, x: Tensor, h: Tensor, cos: Tensor, sin: Tensor, past: KeysValues, roots: Tensor | None = None
    ) -> Tensor:
        """As `forward`, from the residual x and the normed input h of q, k and v."""
        q, k, v = self.project(h, cos, sin)
        past.append((k, v))
        return self.finish(x, chain_attention(q, past, roots))

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed input [R, T, H] -> rotated q [R, T, heads, d], rotated k and v [R, T, kv_heads, d]."""
        size = (-1, self.config.head_dim)
        q, k, v = (torch.unflatten(linear(h), -1, size) for linear in (self.q, self.k, self.v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual [R, T, H] and attention output [R, T, heads, d] -> output of the layer, [R, T, H]."""
        x = x + self.o(attended.flatten(2))
        h = rms_norm(x, self.post_norm, self.config.rms_norm_eps)
        down: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + down


class PairLayer(DraftLayer):
    """The first layer of an EAGLE-3 head: q, k and v read the normed token beside the normed residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Linear(2 * config.hidden_size, getattr(self, name).out_features, bias=False))
        self.token_norm = nn.Parameter(torch.ones(config.hidden_size))

    def pair(
        self, x: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor, past: KeysValues, roots: Tensor | None = None
    ) -> Tensor:
        """As `forward`; `tokens` [R, T, H] are the embeddings, not normed."""
        eps = self.config.rms_norm_eps
        h = torch.cat((rms_norm(tokens, self.token_norm, eps), rms_norm(x, self.input_norm, eps)), -1)
        return self.from_normed(x, h, cos, sin, past, roots)


def chain_attention(q: Tensor, past: KeysValues, roots: Tensor | None = None) -> Tensor:
    """q [R, T, heads, d] over `past` -> [R, T, heads, d]; `DraftLayer` shows the mask and describes `roots`."""
    (root_k, root_v), chain = past[0], past[1:]
    groups = q.shape[2] // root_k.shape[2]
    if not chain:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            root_k.transpose(1, 2).repeat_interleave(groups, 1),
            root_v.transpose(1, 2).repeat_interleave(groups, 1),
            is_causal=True,
        )
        return out.transpose(1, 2)
    q = torch.unflatten(q.transpose(1, 2), 1, (-1, groups)) * q.shape[-1] ** -0.5  # [R, kv, G, T, d]
    keys, values = (value.transpose(1, 2).unsqueeze(2) for value in (root_k, root_v))  # [R, kv, 1, T, d]
    rows, length = q.shape[-2], keys.shape[-2]
    scores = q @ keys.transpose(-1, -2)
    positions = torch.arange(length, device=q.device)
    hidden = positions > (positions[length - rows :] if roots is None else roots)[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    own = [(q * k.transpose(1, 2).unsqueeze(2)).sum(-1, keepdim=True) for k, _ in chain]
    weights = torch.cat((scores, *own), dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
    out = weights[..., :length] @ values
    for step, (_, v) in enumerate(chain):
        out = out + weights[..., length + step, None] * v.transpose(1, 2).unsqueeze(2)
    return out.flatten(1, 2).transpose(1, 2)


@torch.no_grad()
def copy_layer(layer: DraftLayer, target: FrozenTarget, index: int) -> None:
    """Copy the target's layer `index`, without projection biases and head norms."""
    c, source = target.config, target.layers[index]
    sizes = [n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
    for linear, weight in zip((layer.q, layer.k, layer.v), torch.split(source.qkv.weight, sizes), strict=True):
        # Two normed inputs that each count half have together the size of one.
        linear.weight.copy_(torch.cat((weight, weight), 1) / 2**0.5 if isinstance(layer, PairLayer) else weight)
    gate, up = source.gate_up.weight.chunk(2)
    layer.gate.weight.copy_(gate)
    layer.up.weight.copy_(up)
    layer.o.weight.copy_(source.output.weight)
    layer.down.weight.copy_(source.down.weight)
    layer.input_norm.copy_(source.input_norm)
    if isinstance(layer, PairLayer):
        layer.token_norm.copy_(source.input_norm)
    layer.post_norm.copy_(source.post_norm)


class VocabularyMap(nn.Module):
    """The output vocabulary of a draft: buffers only.

    `draft_vocab` [N] int64 maps a draft row to its token; `to_draft` [V] int64 maps a token to its row or -1.
    """

    draft_vocab: Tensor
    to_draft: Tensor

    def __init__(self, draft_vocab: Tensor, vocab_size: int) -> None:
        super().__init__()
        if (
            len(set(draft_vocab.tolist())) != len(draft_vocab)
            or not 0 <= int(draft_vocab.min()) <= int(draft_vocab.max()) < vocab_size
        ):
            raise ValueError(
                f"draft_vocab: needs distinct tokens in 0..{vocab_size - 1}, given {tuple(draft_vocab.shape)}"
            )
        to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
        to_draft[draft_vocab] = torch.arange(len(draft_vocab))
        self.register_buffer("draft_vocab", draft_vocab)
        self.register_buffer("to_draft", to_draft)
