"""The drafter that the settings ask for."""

from __future__ import annotations

from typing import Any

from engine.config import SpeculativeConfig
from engine.core.drafter import Drafter, NoDrafter
from engine.draft.adversarial import WrongDrafter
from engine.draft.first_of import FirstOf
from engine.draft.grammar import GrammarDrafter
from engine.draft.remote import RemoteDrafter
from engine.lookup.ngram import Lookup, NgramDrafter
from engine.lookup.shared_text import SharedText
from engine.proposals.drafter import MergedDrafter

__all__ = ["make_drafter"]


def make_drafter(
    config: SpeculativeConfig, remote: RemoteDrafter | None, *, vocab_size: int, branches: bool = False
) -> Drafter:
    """The drafter of one engine: grammar-forced tokens first, then the configured method.

    With branches, prompt lookup and the model are merged into one tree per request. Without, lookup is asked first.

    Args:
        config: names the method.
        remote: drafts with the model in another process; None where the method has no model.
        vocab_size: vocabulary size of the target.
        branches: whether drafts may branch.
    """
    drafter = _method(config, remote, branches=branches)
    if config.wrong_drafts:
        drafter = WrongDrafter(drafter, vocab_size)
    return FirstOf(GrammarDrafter(), drafter, source="grammar")


def _method(config: SpeculativeConfig, remote: RemoteDrafter | None, *, branches: bool) -> Drafter:
    if config.method == "none":
        return NoDrafter()
    if remote is not None and not config.lookup:
        return remote
    options: dict[str, Any] = {
        "min_size": config.ngram_min,
        "max_size": config.ngram_max,
        "shared": SharedText(config.shared_lookup_mib << 20) if config.shared_lookup != "off" else None,
        "per_client": config.shared_lookup == "client",
    }
    if branches:
        return MergedDrafter(Lookup(**options), remote)
    lookup = NgramDrafter(**options)
    return lookup if remote is None else FirstOf(lookup, remote, source="lookup")
