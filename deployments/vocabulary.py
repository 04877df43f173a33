"""Whether a draft speaks its target's language: token for token the same, but for padding at the end.

Owns the comparison at start. A draft without a tokenizer of its own was made from the target and shares its ids.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from engine.errors import ConfigError
from engine.model_config import ModelConfig


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
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
