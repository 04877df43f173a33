"""Which draft a name means, and what its folder says of itself: a user gives the name and nothing else.

Owns the names of drafts that ship with Paceline, and the drafting method that follows from a folder. Whether a draft
belongs to its target is `engine.checkpoint.draft_check`'s question, asked here before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

from deployments.settings import AppSettings
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "models"
"""A folder for each draft that ships."""


def resolve_draft(name: str, *, progress: bool = False) -> Path:
    """The folder of a draft: one that ships, a folder, or a Hugging Face id, as `resolve_model`.

    Raises:
        ConfigError: there is no such draft.
    """
    shipped = SHIPPED / name
    if Path(name).name == name and shipped.is_dir():
        return shipped
    return resolve_model(name, progress=progress)


def with_draft(settings: AppSettings, target_folder: Path) -> tuple[AppSettings, Path | None]:
    """The settings with the draft's own method, and its folder; unchanged and None without a draft.

    Raises:
        ConfigError: it does not belong to the target, or is not what `speculative.method` says.
    """
    speculative = settings.engine.speculative
    if speculative.draft is None:
        return settings, None
    folder = resolve_draft(speculative.draft)
    method = check_draft(folder, target_folder).architecture
    if speculative.method == "eagle" and method != "eagle":
        raise ConfigError(
            f"speculative.method: eagle given, but {folder} holds a {method}; leave speculative.method out"
        )
    engine = settings.engine.model_dump()
    engine["speculative"] |= {"method": method}
    return settings.model_copy(update={"engine": EngineConfig.parse(engine)}), folder


def check_draft_vocabulary(target_folder: Path, draft_folder: Path) -> None:
    """Compare ids and strings of both tokenizers.

    Raises:
        ConfigError: with both sizes and the first token that differs.
    """
    target_size = ModelConfig.load(target_folder).vocab_size
    draft_size = ModelConfig.load(draft_folder).vocab_size
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
    from transformers import AutoTokenizer  # takes seconds and imports torch; the command needs neither

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
