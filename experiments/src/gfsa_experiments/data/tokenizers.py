"""Byte-level BPE tokenizers: GPT-2's from its files, or one learned from the training text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gfsa_experiments.data.files import find_file, read_lines
from gfsa_experiments.data.sources import source_of

_GPT2_SIZE = 50_257
_LINES_AT_ONCE = 20_000


def gpt2_tokenizer(data_dir: Path) -> Any:
    """The tokenizer of GPT-2 from its two files."""
    source = source_of("gpt2")
    vocabulary = find_file(data_dir, ("vocab.json", "encoder.json", "gpt2_encoder.json"), source)
    merges = find_file(data_dir, ("merges.txt", "vocab.bpe", "gpt2_vocab.bpe"), source)
    try:
        ids = json.loads("\n".join(read_lines(vocabulary)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{vocabulary} is damaged ({error}); get it again") from error
    if len(ids) != _GPT2_SIZE:
        raise ValueError(f"{vocabulary} has {len(ids)} tokens, GPT-2 has {_GPT2_SIZE}")
    pairs = [tuple(line.split(" ")) for line in read_lines(merges) if not line.startswith("#v")]
    # 256 bytes and <|endoftext|> are not results of merges
    if len(pairs) != _GPT2_SIZE - 257 or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"{merges} should have {_GPT2_SIZE - 257} lines of two parts; get it again"
        )
    return _byte_level(vocab=ids, merges=pairs)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> Any:
    """A tokenizer learned from ``texts``, deterministically."""
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = _byte_level()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level(**model: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = Tokenizer(BPE(**model))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return tokenizer


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text without special tokens, by a tokenizer of transformers or tokenizers."""
    found: list[np.ndarray] = []
    # in parts, since the libraries' objects take far more memory than the ids
    for at in range(0, len(texts), _LINES_AT_ONCE):
        part = list(texts[at : at + _LINES_AT_ONCE])
        if hasattr(tokenizer, "encode_batch_fast"):
            rows = [e.ids for e in tokenizer.encode_batch_fast(part, add_special_tokens=False)]
        else:
            rows = tokenizer(part, add_special_tokens=False, return_attention_mask=False)[
                "input_ids"
            ]
        found += [np.array(row, np.int32) for row in rows]
    return found
