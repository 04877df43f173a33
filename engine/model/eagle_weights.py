"""Building the input projections of an EAGLE draft from its folder.

Owns the names of their tensors, in Paceline's own layout and in that of public EAGLE-3 heads. The draft's decoder is
read as every other one (`engine.model.shard_weights`).
"""

from __future__ import annotations

from engine.checkpoint.public_draft import MASK_HIDDEN
from engine.errors import ConfigError
from engine.model.eagle_head import Eagle3Head, EagleHead
from engine.model.layers import RmsNorm
from engine.model.shard_weights import Loader


class EagleLoader(Loader):
    """Reads the head of a draft, and then its decoder. See `Loader`."""

    def eagle_head(self) -> EagleHead:
        """Read the input projections of an EAGLE draft. Must be called before `decoder`.

        Raises:
            ConfigError: a tensor is missing, or has another shape than the config implies.
        """
        config = self._config
        hidden, num_layers = config.hidden_size, len(config.feature_layers)
        fuse, _ = self._part("eagle.fuse", (hidden, num_layers * hidden), bias=False)
        token, _ = self._part("eagle.token", (hidden, hidden), bias=False)
        carry, _ = self._part("eagle.carry", (hidden, hidden), bias=False)
        token_norm, project = self._norm("eagle.token_norm.weight", hidden), self._make(token, None)
        mask = None
        if config.positions_per_pass > 1:
            embedding, state = (self._read(f"eagle.mask_{name}", (hidden,)) for name in ("embedding", "state"))
            mask = project.plus(token_norm(embedding[None]), state[None])[0]
        return EagleHead(
            feature_norm=self._read("eagle.feature_norm.weight", (num_layers, hidden)),
            fuse=self._make(fuse, None),
            token_norm=token_norm,
            token=project,
            carry_norm=self._norm("eagle.carry_norm.weight", hidden),
            carry=self._make(carry, None),
            eps=config.rms_norm_eps,
            mask=mask,
        )

    def eagle3_head(self) -> Eagle3Head:
        """Read the input of a public EAGLE-3 head. Must be called before `decoder`.

        Raises:
            ConfigError: a tensor is missing, or has another shape than the config implies.
        """
        config, variant = self._config, self._config.eagle3
        if variant is None:
            raise ConfigError(f"draft: {self._files.folder} is not an EAGLE-3 head in a public layout")
        hidden, width = config.hidden_size, variant.num_features * variant.feature_size
        fuse, _ = self._part("fc", (hidden, width), bias=False)
        feature_norms: tuple[RmsNorm, ...] = ()
        if variant.norm_before_fc:
            feature_norms = (self._norm("input_norm.weight", width),)
        elif variant.fc_norm:
            names = (f"fc_norm.{index}.weight" for index in range(variant.num_features))
            feature_norms = tuple(self._norm(name, variant.feature_size) for name in names)
        mask_features = None
        if variant.mask_token_id is not None:
            shape = (1, width) if self._files.has_shape(MASK_HIDDEN, (1, width)) else (1, 1, width)
            mask_features = self._read(MASK_HIDDEN, shape).view(width)
        return Eagle3Head(
            feature_norms=feature_norms,
            fuse=self._make(fuse, None),
            token_norm=self._norm("model.layers.0.input_layernorm.weight", hidden),
            output_norm=self._norm("model.norm.weight", hidden) if variant.norm_output else None,
            feature_width=width,
            mask_features=mask_features,
        )
