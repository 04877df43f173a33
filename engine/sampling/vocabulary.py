"""The text of each token of a model, for grammars. The only module of the engine that reads a tokenizer.

Special tokens have no text here, so a grammar never allows them.
"""

from __future__ import annotations

import json
from pathlib import Path

import xgrammar

from engine.errors import InvalidRequest


def load_tokenizer_info(folder: Path, vocab_size: int) -> xgrammar.TokenizerInfo:
    """Read tokenizer.json and the EOS ids of a model folder.

    Args:
        folder: the model folder.
        vocab_size: number of logit columns of the model.

    Raises:
        InvalidRequest: the folder has no tokenizer.json or names no EOS id, so grammars are not available.
    """
    from transformers import PreTrainedTokenizerFast  # Slow to import; only grammars need it.

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidRequest(f"grammar: grammars need a tokenizer.json, and the model folder {folder.name} has none")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    stop_token_ids = _eos_token_ids(folder)
    from_tokenizer = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids
    )
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    encoded = [""] * vocab_size
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size and index not in special:
            encoded[index] = token
    return xgrammar.TokenizerInfo(
        encoded,
        from_tokenizer.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=stop_token_ids,
        add_prefix_space=from_tokenizer.add_prefix_space,
    )


def _eos_token_ids(folder: Path) -> list[int]:
    """EOS ids from generation_config.json, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if given is not None:
                return [int(token) for token in (given if isinstance(given, list) else [given])]
    raise InvalidRequest(f"grammar: the model folder {folder.name} names no eos_token_id, so no text could end")
