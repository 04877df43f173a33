"""Resolves the draft of the settings: its folder, its drafting method, and whether it fits the target.

Owns the names of the drafts that ship with Paceline, and the comparison of vocabularies. The check that a draft was
trained for its target is in `engine.checkpoint.draft_check`; it runs before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

from deployments.settings import AppSettings
from engine.adaptation.supported import check_adaptable
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "models"
"""Contains a folder for each draft that ships with Paceline."""


def resolve_draft(name: str, *, progress: bool = False) -> Path:
    """The folder of a draft.

    Args:
        name: a draft that ships, else a folder or a Hugging Face id as in `resolve_model`.
        progress: show the progress of a download.

    Raises:
        ConfigError: there is no such draft.
    """
    shipped = SHIPPED / name
    if Path(name).name == name and shipped.is_dir():
        return shipped
    return resolve_model(name, progress=progress)


def with_draft(settings: AppSettings, target_folder: Path) -> tuple[AppSettings, Path | None]:
    """The settings with `speculative.method` set from the draft, and the draft's folder.

    Returns:
        The settings unchanged, and None, if no draft is configured.

    Raises:
        ConfigError: the draft does not fit the target, contradicts `speculative.method`, or cannot learn although the
            settings ask for it.
    """
    speculative = settings.engine.speculative
    if speculative.draft is None:
        return settings, None
    folder = resolve_draft(speculative.draft)
    checked = check_draft(folder, target_folder)
    check_adaptable(settings.engine, checked)
    method = checked.architecture
    if speculative.method in ("eagle", "medusa") and method != speculative.method:
        raise ConfigError(
            f"speculative.method: {speculative.method} given, but {folder} holds a {method}; "
            "leave speculative.method out"
        )
    engine = settings.engine.model_dump()
    engine["speculative"] |= {"method": method}
    return settings.model_copy(update={"engine": EngineConfig.parse(engine)}), folder


def check_draft_vocabulary(target_folder: Path, draft_folder: Path) -> None:
    """Compare the ids and strings of all tokens of target and draft.

    Raises:
        ConfigError: the vocabularies differ; the message has both sizes and the first difference.
    """
    target_size = ModelConfig.load(target_folder).vocab_size
    draft_size = ModelConfig.load(draft_folder).vocab_size or target_size  # Medusa heads need not name it.
    if not (draft_folder / "tokenizer.json").exists():
        if draft_size != target_size:
            raise ConfigError(
                f"speculative.draft: vocabulary of {draft_size} tokens, the target's has {target_size}, and the draft "
                "folder has no tokenizer.json to compare; use a draft made for this target"
            )
        return
    target, draft = (_tokens_by_id(folder) for folder in (target_folder, draft_folder))
    for token_id in range(max(len(target), len(draft))):
        ours, theirs = target.get(token_id), draft.get(token_id)
        if ours != theirs and not (ours is None and token_id >= len(target)):
            raise ConfigError(
                f"speculative.draft: the vocabularies differ (target {len(target)} tokens, draft {len(draft)}): token "
                f"{token_id} is {ours!r} in the target and {theirs!r} in the draft; use a draft with equal tokens"
            )


def _tokens_by_id(folder: Path) -> dict[int, str]:
    from deployments.text.tokenizer import load_tokenizer  # the command needs none of what it imports

    return {token_id: token for token, token_id in load_tokenizer(folder).get_vocab().items()}
