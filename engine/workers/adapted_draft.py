"""What connects a draft to its adaptation: the weights to start with, those to swap in, and the trainer's setup.

Owns how adapted weights are loaded: as those of a draft that starts, over the KV cache that is there. Knows neither
when weights change nor how they are trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.adaptation.adaptation import Adaptation
from engine.adaptation.messages import Setup
from engine.adaptation.trainer_process import TrainerProcess
from engine.adaptation.versions import Versions, versions_folder
from engine.checkpoint.store import cache_folder
from engine.config import EngineConfig
from engine.draft.architectures import EagleArchitecture
from engine.draft.proposer import Proposer
from engine.errors import ConfigError
from engine.model.eagle_head import EagleHead
from engine.model.load import LoadedDraft

_log = logging.getLogger(__name__)

LoadDraft = Callable[[Path], LoadedDraft]


class AdaptedDraft:
    """The weights of a draft that is adapted.

    Args:
        config: of the engine.
        shipped: the draft's folder as it was configured.
        target_folder: the target's model folder.
        load: loads the weights of a folder.
        trainer: command of the trainer.
    """

    def __init__(
        self, config: EngineConfig, shipped: Path, target_folder: Path, *, load: LoadDraft, trainer: Sequence[str]
    ) -> None:
        self._config = config
        self._shipped = shipped
        self._target_folder = target_folder
        self._load = load
        self._trainer = trainer
        self._versions = Versions(versions_folder(cache_folder(), target_folder, shipped))
        self._serving = shipped

    def first(self) -> LoadedDraft:
        """The newest adapted weights that can be loaded, or those of the shipped draft.

        Raises:
            ConfigError: the shipped draft cannot be loaded.
        """
        newest = self._versions.newest()
        if newest is not None:
            try:
                draft = self._load(newest)
                self._serving = newest
                return draft
            except ConfigError as error:
                _log.warning("adapted draft %s is refused: %s", newest, error)
        return self._load(self._shipped)

    def adaptation(self, proposer: Proposer, idle_s: Callable[[], float]) -> Adaptation[EagleArchitecture]:
        """The adaptation of a loaded draft, not started.

        Args:
            proposer: drafts.
            idle_s: seconds since the target's latest step.
        """
        config = self._config.speculative.adaptation
        whose = f"the keys {', '.join(config.keys)}" if config.keys else "a server without keys, all of them"
        _log.warning(
            "online adaptation is on: the draft learns from the requests of %s, and keeps weights in %s; it serves %s",
            *(whose, self._versions.root, self._serving),
        )
        first = proposer.architecture
        if not isinstance(first, EagleArchitecture):
            raise ConfigError("speculative.adaptation.enabled: true given, but the draft is no eagle chain")
        setup = Setup(
            draft_folder=str(self._serving),
            target_folder=str(self._target_folder),
            versions_folder=str(self._versions.root),
            buffer_bytes=config.buffer_mib << 20,
            k=max(1, self._config.speculative.k),
        )
        return Adaptation(
            config,
            versions=self._versions,
            shipped=self._shipped,
            serving=self._serving,
            load=lambda folder: self._next(first, folder),
            idle_s=idle_s,
            start_trainer=lambda on_message: TrainerProcess(
                setup, on_message=on_message, max_pending_bytes=config.buffer_mib << 20, command=self._trainer
            ),
        )

    @torch.inference_mode()
    def _next(self, first: EagleArchitecture, folder: Path) -> EagleArchitecture:
        draft = self._load(folder)
        if not isinstance(draft.head, EagleHead):
            raise ConfigError(f"draft: {folder} holds no eagle chain")
        return first.with_weights(draft.head, draft.decoder)
