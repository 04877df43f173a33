"""The parts of a target that its draft is trained with: the embedding, and the head that gives the target's choices.

Owns reading them from the target's folder, also of a quantised one, and the target's distribution at a position. Where
the draft reads the output of the target's last layer, the head computes the distribution from it. Elsewhere the
committed token stands for it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WeightFiles

NUM_TOP = 16
"""Most likely tokens that are kept of a distribution."""
_ROWS = 64
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class TargetHead:
    """Embedding and head of a target.

    Args:
        folder: the target's model folder.
        feature_layers: layers that the draft reads.

    Raises:
        ConfigError: a tensor is missing or has another shape than the config implies.
    """

    def __init__(self, folder: Path, feature_layers: tuple[int, ...]) -> None:
        config = ModelConfig.load(folder)
        files = WeightFiles(folder, config.quantization)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = files.read_float(_EMBEDDING, shape, dtype=torch.bfloat16).to(torch.bfloat16)
        """[vocab, H] bfloat16."""
        self._eps = config.rms_norm_eps
        self._norm: Tensor | None = None
        self._last = feature_layers.index(config.num_layers - 1) if config.num_layers - 1 in feature_layers else None
        if self._last is not None and config.beyond_llama is None:
            self._norm = files.read_float(_NORM, shape[1:], dtype=torch.bfloat16).to(torch.bfloat16)
            has_own = _HEAD in files
            self._head = (
                files.read_float(_HEAD, shape, dtype=torch.bfloat16).to(torch.bfloat16) if has_own else self.embed
            )

    @torch.inference_mode()
    def choices(self, tokens: Tensor, features: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The target's most likely tokens for the next position.

        Args:
            tokens: [n] int64.
            features: [n, F, H] bfloat16 after each position.
            first: first position whose choices are needed; those before are not computed.

        Returns:
            Ids [n, M] int64, best first, and log-probabilities [n, M] float32. M is 1 where the head is not used.
        """
        n = len(tokens)
        if self._norm is None or self._last is None:
            return torch.cat((tokens[1:], tokens[-1:]))[:, None], torch.zeros(n, 1)
        ids, logprobs = torch.zeros(n, NUM_TOP, dtype=torch.int64), torch.full((n, NUM_TOP), -30.0)
        for start in range(first, n - 1, _ROWS):
            part = slice(start, min(start + _ROWS, n - 1))
            hidden = F.rms_norm(features[part, self._last], (features.shape[-1],), self._norm, self._eps)
            found = F.linear(hidden, self._head).float().log_softmax(-1).topk(NUM_TOP)
            ids[part], logprobs[part] = found.indices, found.values
        return ids, logprobs
