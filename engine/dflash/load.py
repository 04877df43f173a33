"""Loading a DFlash draft: a folder of weights, with what it leaves to its target.

Owns the names of the tensors that other drafts do not have. The layers are read as those of every model
(`engine.model.shard_weights`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.public_draft import tensor_name
from engine.checkpoint.weights import WHOLE, WeightFiles
from engine.dflash.decoder import DFlashDecoder
from engine.errors import ConfigError
from engine.model.attention import make_attention
from engine.model.device import Compute, KernelKind
from engine.model.layers import Linear, RmsNorm
from engine.model.shard_weights import EMBEDDING, HEAD, Loader
from engine.quantization.weight import Weight


def load_dflash(
    folder: Path,
    target_folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    kernel: KernelKind = "auto",
    max_model_len: int | None = None,
) -> DFlashDecoder:
    """Load a DFlash draft for a target, in either public layout.

    Args:
        folder: model folder of the draft.
        target_folder: model folder of the target; its embedding and its head are taken where the draft has none.
        dtype: of weights and activations.
        device: cpu or cuda.
        kernel: `reference` computes with plain operators, every other one with the fastest layers of the device.
        max_model_len: longest prompt and output that will be served; None means the model's limit.

    Raises:
        ConfigError: the folder holds no DFlash draft, it does not fit the target, a tensor is missing, unknown or
            misshaped, or `kernel` is `native`.
    """
    config = check_draft(folder, target_folder).for_context(max_model_len)
    if config.dflash is None:
        raise ConfigError(f"draft: {folder} holds no DFlash draft")
    if kernel == "native":
        raise ConfigError("kernel: native given, but it does not compute the blocks of a DFlash draft")
    if ModelConfig.load(target_folder).embedding_scale != 1.0:
        raise ConfigError("draft: a DFlash draft of a target that scales its embeddings is not supported")
    compute = Compute(dtype, torch.device(device), kernel)
    files = WeightFiles(folder, config.quantization, rename=tensor_name)
    config = replace(config, shares_embedding=EMBEDDING not in files)
    with torch.inference_mode():
        loader = _DFlashLoader(config, files, compute, shard=WHOLE, linear=compute.layers)
        fuse, feature_norm = loader.fusion()
        loader.target_folder = target_folder
        weights = loader.decoder(target_folder)
        loader.check_all_read()
    # Paged flash attention has no masks, and a block is a tree whose nodes all see each other.
    attention = make_attention(
        "padded" if compute.layers == "auto" else "reference",
        group_size=config.num_heads // config.num_kv_heads,
        dtype=dtype,
        device=compute.device,
    )
    return DFlashDecoder(config, weights, compute, attention={0: attention}, fuse=fuse, feature_norm=feature_norm)


class _DFlashLoader(Loader):
    """Reads what is not in the layers. See `Loader`."""

    target_folder: Path | None = None

    def fusion(self) -> tuple[Linear, RmsNorm]:
        """Read the projection of the target's hidden states, and its norm."""
        config = self._config
        fuse, _ = self._part("fc", (config.hidden_size, len(config.feature_layers) * config.hidden_size), bias=False)
        return self._make(fuse, None), self._norm("hidden_norm.weight", config.hidden_size)

    def _head(self, embedding: Weight) -> Linear:
        """The draft's head, or else the target's."""
        config = self._config
        if HEAD in self._files or config.draft_vocab_size is not None or self.target_folder is None:
            return super()._head(embedding)
        target = ModelConfig.load(self.target_folder)
        files = WeightFiles(self.target_folder, target.quantization)
        name = EMBEDDING if target.tie_word_embeddings else HEAD
        return self._make(self._weight(name, (config.vocab_size, config.hidden_size), files=files), None)
