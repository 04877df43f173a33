"""Drafting methods, and which of them the settings ask for."""

from __future__ import annotations

from engine.config import SpeculativeConfig
from engine.core.drafter import Drafter, NoDrafter
from engine.draft.adversarial import WrongDrafter
from engine.draft.first_of import ForcedDrafter, LookupFirst
from engine.draft.ngram import NgramDrafter
from engine.draft.remote import RemoteDrafter

__all__ = ["make_drafter"]


def make_drafter(config: SpeculativeConfig, remote: RemoteDrafter | None, *, vocab_size: int) -> Drafter:
    """Phase two of the step.

    Args:
        config: names the method.
        remote: the way to the model in another process; None where the method has none.
        vocab_size: of the target.
    """
    drafter = _method(config, remote)
    if config.wrong_drafts:
        drafter = WrongDrafter(drafter, vocab_size)
    return ForcedDrafter(drafter)


def _method(config: SpeculativeConfig, remote: RemoteDrafter | None) -> Drafter:
    if config.method == "none":
        return NoDrafter()
    lookup = NgramDrafter(min_size=config.ngram_min, max_size=config.ngram_max)
    if remote is None:
        return lookup
    return LookupFirst(lookup, remote) if config.lookup else remote
