"""The text of each token of a model, for grammars. The only module of the engine that reads a tokenizer.

Special tokens have no text here, so a grammar never allows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar

from engine.errors import InvalidRequest


def load_tokenizer_info(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """Read tokenizer.json.

    Args:
        folder: the model folder.
        vocab_size: number of logit columns of the model.
        eos_token_ids: ids of the tokens that end a text.

    Raises:
        InvalidRequest: the folder has no tokenizer.json or there is no EOS id, so grammars are not available.
    """
    from transformers import PreTrainedTokenizerFast  # Slow to import; only grammars need it.

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidRequest(f"grammar: grammars need a tokenizer.json, and the model folder {folder.name} has none")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    stop_token_ids = list(eos_token_ids)
    if not stop_token_ids:
        raise InvalidRequest(f"grammar: the model folder {folder.name} names no eos_token_id, so no text could end")
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
