"""Vocabularies: token 0 is CTC's blank and the padding, 1 the begin token, 2 the end token."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from gfsa_experiments.tasks.speech.data import LETTERS

BLANK, BEGIN, END = 0, 1, 2
_SPECIAL = 3

Tokens = Literal["char", "unigram", "bpe"]


class Characters:
    """Characters as tokens, A–Z, apostrophe and space; its length counts the special ones too."""

    def __init__(self, letters: str = LETTERS) -> None:
        self._letters = letters
        self._token = {letter: _SPECIAL + i for i, letter in enumerate(letters)}

    def __len__(self) -> int:
        return _SPECIAL + len(self._letters)

    def encode(self, text: str) -> list[int]:
        return [self._token[letter] for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text = "".join(self._letters[token - _SPECIAL] for token in tokens if token >= _SPECIAL)
        return " ".join(text.split())


class Pieces:
    """Parts of words as tokens, learned from the training transcripts by SentencePiece."""

    def __init__(self, texts: Sequence[str], kind: Literal["unigram", "bpe"], size: int) -> None:
        import sentencepiece

        written = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=written,
                model_type=kind,
                vocab_size=size,
                character_coverage=1.0,
                pad_id=BLANK,
                bos_id=BEGIN,
                eos_id=END,
                unk_id=_SPECIAL,
                # several threads may break ties differently
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(
                f"SentencePiece could not learn {size} {kind} pieces from {len(texts)} "
                f"transcripts; set vocabulary lower, or tokens=char ({error})"
            ) from error
        self._model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())

    def __len__(self) -> int:
        return int(self._model.get_piece_size())

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._model.decode([int(token) for token in tokens if token >= _SPECIAL]))


Vocabulary = Characters | Pieces
"""Converts transcripts to tokens and back."""


@lru_cache(maxsize=2)
def learn_vocabulary(
    texts: tuple[str, ...], tokens: Tokens, size: int, letters: str = LETTERS
) -> Vocabulary:
    """The vocabulary for these transcripts, which consist of ``letters``."""
    return Characters(letters) if tokens == "char" else Pieces(texts, tokens, size)
