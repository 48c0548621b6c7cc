"""WikiText and PTB files, and byte-level BPE."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gfsa_experiments.data.tokenizers import gpt2_tokenizer, token_ids, train_tokenizer
from gfsa_experiments.tasks.causal_lm.recipe import count_words, read_corpus
from support.hub import HubPart, fake_hub
from support.tiny_texts import corpus, sentence, write

unofficial = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@unofficial
@pytest.mark.parametrize(
    ("name", "file", "compressed"),
    [
        ("wikitext-2", "wiki.valid.tokens", False),
        ("wikitext-2", "wikitext-2/wiki.valid.tokens", False),
        ("wikitext-2", "wikitext-2/valid.txt", True),
        ("wikitext-103", "wikitext-103/wiki.valid.tokens", False),
        ("wikitext-103", "wikitext-103-raw/wiki.valid.raw", False),
        ("ptb", "ptb.valid.txt", False),
        ("ptb", "simple-examples/data/ptb.valid.txt", False),
    ],
)
def test_where_files_are_found(name: str, file: str, compressed: bool, tmp_path: Path) -> None:
    write(tmp_path / file, corpus(3), compressed)
    lines = read_corpus(tmp_path, name, "valid")
    assert "".join(lines) == corpus(3)
    assert count_words(lines) == len(corpus(3).replace("\n", "<eos>").split())


def test_words_are_counted_as_officially(tmp_path: Path) -> None:
    write(tmp_path / "wiki.test.tokens", corpus(3))
    message = r"has 36 words, the official file 245,569"
    with pytest.warns(UserWarning, match=message):
        read_corpus(tmp_path, "wikitext-2", "test")


@unofficial
@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_without_files_the_hub_is_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [" = Title = \n", "", " No it was n't Black Monday \n"]
    asked = fake_hub(monkeypatch, lambda *which: HubPart(text=texts))
    with pytest.warns(UserWarning, match="Using Salesforce/wikitext from the hub"):
        lines = read_corpus(tmp_path, name, "valid")
    assert asked == [("Salesforce/wikitext", f"{name}-v1", "validation")]
    assert lines == (" = Title = \n", "\n", " No it was n't Black Monday \n")
    # three, none and six words, and the ends of three lines
    assert count_words(lines) == 12
    fake_hub(monkeypatch, lambda *which: HubPart(sentence=texts))
    with pytest.raises(ValueError, match="should have the columns text, it has sentence"):
        read_corpus(tmp_path, name, "test")


def test_a_learned_tokenizer_is_the_same_each_time() -> None:
    texts = [sentence(i) + "\n" for i in range(50)]
    first, second = (train_tokenizer(texts, 300, ("<s>",)) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 300
    assert first.token_to_id("<s>") == 0
    # any text is made of bytes
    (ids,) = token_ids(first, ["naïve ☃"])
    assert ids.dtype == np.int32
    assert len(ids) == len("naïve ☃".encode())


def write_gpt2(folder: Path, names: tuple[str, str], compressed: bool = False) -> None:
    """Files of GPT-2's form and size: the bytes, merges of two letters, made-up ones."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    two = [(a, b) for a in letters for b in letters][:49_999]
    pairs = [("Ġ", "a"), *(pair for pair in two if pair != ("Ġ", "a"))]
    tokens = [*letters, *("".join(pair) for pair in pairs)]
    vocabulary = {token: i for i, token in enumerate([*tokens, "<|endoftext|>"])}
    write(folder / names[0], json.dumps(vocabulary), compressed)
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in pairs)])
    write(folder / names[1], merges + "\n", compressed)


@pytest.mark.parametrize(
    ("folder", "names", "compressed"),
    [
        ("gpt2", ("vocab.json", "merges.txt"), False),
        ("tokenizers", ("gpt2_encoder.json", "gpt2_vocab.bpe"), True),
    ],
)
def test_the_tokenizer_of_gpt2(
    folder: str, names: tuple[str, str], compressed: bool, tmp_path: Path
) -> None:
    write_gpt2(tmp_path / folder, names, compressed)
    tokenizer = gpt2_tokenizer(tmp_path)
    assert tokenizer.encode(" a").tokens == ["Ġa"]
    # also from a data set's folder beside it
    (tmp_path / "wikitext-2").mkdir()
    assert gpt2_tokenizer(tmp_path / "wikitext-2").get_vocab_size() == 50_257
