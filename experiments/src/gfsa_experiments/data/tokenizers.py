"""Byte-level BPE learned from the training text, and the ids of many texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_TEXTS_AT_ONCE = 20_000


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> Any:
    """A tokenizer learned from ``texts``, deterministically."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text without special tokens, by a tokenizer of transformers or tokenizers."""
    found: list[np.ndarray] = []
    # in parts, since the libraries' objects take far more memory than the ids
    for at in range(0, len(texts), _TEXTS_AT_ONCE):
        part = list(texts[at : at + _TEXTS_AT_ONCE])
        if hasattr(tokenizer, "encode_batch_fast"):
            rows = [e.ids for e in tokenizer.encode_batch_fast(part, add_special_tokens=False)]
        else:
            given = {"add_special_tokens": False, "return_attention_mask": False}
            rows = tokenizer(part, **given)["input_ids"]
        found += [np.array(row, np.int32) for row in rows]
    return found
