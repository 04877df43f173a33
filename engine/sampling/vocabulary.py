"""How a model folder's tokens are spelt, for grammars: the one place in the engine that reads a tokenizer.

Owns which tokens can spell text at all: special ones never do, whatever their names look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar

from engine.errors import InvalidRequest


def load_tokenizer_info(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """Read tokenizer.json.

    Args:
        folder: of the model.
        vocab_size: columns of the model's logits.
        eos_token_ids: ids of the tokens that end a text.

    Raises:
        InvalidRequest: there is no such tokenizer or no such token, so that no request can have a grammar.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import, and needed only once a grammar is asked for

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidRequest(f"grammar: the model has no tokenizer.json, which grammars need ({folder.name})")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    stop_token_ids = list(eos_token_ids)
    if not stop_token_ids:
        raise InvalidRequest(f"grammar: the model names no eos_token_id, so no text could end ({folder.name})")
    spelt = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    encoded = [""] * vocab_size
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size and index not in special:
            encoded[index] = token
    return xgrammar.TokenizerInfo(
        encoded,
        spelt.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=stop_token_ids,
        add_prefix_space=spelt.add_prefix_space,
    )
