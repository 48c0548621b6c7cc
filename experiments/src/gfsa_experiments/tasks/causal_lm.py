"""Language modelling: GPT-2-type models on WikiText, the Penn Treebank, or text of one's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.data.corpus import corpus_of
from gfsa_experiments.data.files import check_count, find_file, source_of
from gfsa_experiments.data.own import PARTS, digest_of, name_of, text_of
from gfsa_experiments.data.pretrained import load, load_model, load_tokenizer
from gfsa_experiments.data.tables import column_of, instead_of_files
from gfsa_experiments.data.tokenizers import token_ids, train_tokenizer
from gfsa_experiments.engine.config import Count, ShareBelowOne, TrainConfig, check_multiple
from gfsa_experiments.engine.next_token_loss import IGNORED, NextTokenLoss
from gfsa_experiments.engine.task import OwnData, Recipe, Split, Task, TensorRows, as_it_is

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout")


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(TrainConfig):
    """Fine-tuning as in the paper (15 epochs on PTB, 4 on WikiText-103), or ``model=scratch``."""

    in_label = ("dataset", "data", "model", "depth", "width")

    data: str = ""
    """Text of the caller's own instead of ``dataset``: a file or folder, or ``hub:ID``."""
    text: str = "text"
    """The key of the text in JSON lines, its column in tables and on the hub."""
    dataset: Literal["wikitext-2", "wikitext-103", "ptb"] = "wikitext-2"
    model: str = "gpt2"
    """A folder, a name on the hub, or ``scratch``: a new GPT-2 of the sizes below."""
    tokenizer: str = "own"
    """``own``: the model's; ``bpe``: one of ``vocab_size`` tokens that is learned from the training
    text; or that of another model (``gpt2``), a folder or a name on the hub."""
    vocab_size: Count = 8192
    block: int = 1024
    """The length of the model's input in tokens."""
    dropout: ShareBelowOne | None = 0.1
    """Everywhere in the model, attention included; None: the model's own."""
    depth: Count = 6
    width: Count = 384
    heads: Count = 6
    epochs: float = 10
    batch_size: int = 4

    def check(self) -> None:
        super().check()
        if self.block < 2:
            raise ValueError(f"a block of {self.block} tokens predicts nothing; set 2 or more")
        check_multiple(self, "width", "heads")
        if self.scratch and self.tokenizer == "own":
            raise ValueError("a new model has no tokenizer of its own; set tokenizer=gpt2 or bpe")
        if not self.scratch and self.tokenizer == "bpe":
            raise ValueError("a pretrained model cannot read another vocabulary than its own")

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        unused["group_by_length"] = "every block has the same length"
        if not self.scratch:
            own = f"{self.model} has its own; model=scratch takes it"
            unused |= dict.fromkeys(("depth", "width", "heads"), own)
        if self.tokenizer != "bpe":
            unused["vocab_size"] = f"tokenizer={self.tokenizer} has its own; bpe is learned"
        if self.data:
            unused["dataset"] = "data= names the text"
        else:
            unused["text"] = "it names a column of data= of your own"
        return unused

    @property
    def scratch(self) -> bool:
        return self.model == "scratch"

    def label(self) -> str:
        name = f"gpt2-d{self.depth}-w{self.width}" if self.scratch else Path(self.model).name
        return f"{f'data={name_of(self.data)}' if self.data else self.dataset} {name}"


def read_corpus(data_dir: Path, name: str, part: str) -> list[str]:
    """The lines of one part of a known corpus."""
    source = source_of(name)
    names = [f"wiki.{part}.tokens", f"wiki.{part}.raw", f"{part}.txt"]
    try:
        path = find_file(data_dir, [f"ptb.{part}.txt"] if name == "ptb" else names, source)
    except FileNotFoundError as missing:
        if name == "ptb":
            raise
        data = f"hub:Salesforce/wikitext:{name}-v1"
        (found,) = instead_of_files(missing, data_dir, data, [part.replace("valid", "validation")])
        # the hub's empty lines lack their line feed
        where, lines = data, [text.rstrip("\n") for text in column_of(data, found, "text", "")]
    else:
        where, lines = str(path), _lines(text_of(path))
    # the raw files contain the words that the others replace by <unk>: their counts differ
    if f"wiki.{part}.raw" not in where:
        check_count(where, count_words(lines), source.sizes[PARTS.index(part)], "words")
    return lines


def _lines(text: str) -> list[str]:
    """Only line feeds separate lines."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def count_words(lines: Sequence[str]) -> int:
    """Words as these corpora count them: separated by blanks, plus one for each line end."""
    return sum(len(line.split()) + 1 for line in lines)


@dataclass(frozen=True)
class EncodedText:
    """One part of a corpus: its tokens, and the number of words they represent."""

    tokens: np.ndarray
    words: int


@dataclass(frozen=True)
class EncodedCorpus:
    vocabulary: int
    parts: dict[str, EncodedText]
    split_by: str
    digest: str
    """A hash of the text, if it is the caller's own."""


@lru_cache(maxsize=2)
def encode_corpus(
    data_dir: Path, data: str, column: str, tokenizer: str, vocab_size: int
) -> EncodedCorpus:
    """A corpus as token ids, cached for later runs of this process.

    Args:
        data: one of the data sets; or, with a ``column``, a corpus of the caller's own.
        tokenizer: of a model, or ``bpe``.
    """
    lines: Mapping[str, list[str]]
    if column:
        corpus = corpus_of(data, data_dir, column)
        lines = {p: [x for d in ds for x in _lines(d)] for p, ds in corpus.documents().items()}
        split_by = corpus.split_by
    else:
        lines, split_by = {part: read_corpus(data_dir, data, part) for part in PARTS}, "official"
    texts = {part: [f"{line}\n" for line in of_part] for part, of_part in lines.items()}
    if tokenizer == "bpe":
        encoder = train_tokenizer(texts["train"], vocab_size)
        size = encoder.get_vocab_size()
    else:
        encoder = load_tokenizer(tokenizer)
        size = len(encoder)
    parts = {
        part: EncodedText(np.concatenate(token_ids(encoder, of_part)), count_words(of_part))
        for part, of_part in texts.items()
    }
    pieces = (piece for part, of_part in texts.items() for piece in (part, *of_part))
    return EncodedCorpus(size, parts, split_by, digest_of(pieces) if column else "")


def blocks(text: EncodedText, block: int, name: str) -> TensorRows:
    """A text cut into blocks of equal length, with the number of words of each on average."""
    count = len(text.tokens) // block
    if not count:
        raise ValueError(
            f"the {name} text has {len(text.tokens)} tokens, less than a block of {block}; "
            "set a smaller block"
        )
    ids = torch.from_numpy(text.tokens[: count * block].reshape(count, block))
    # tokens that are not predicted do not count
    words = text.words / len(text.tokens) * (block - 1)
    return TensorRows(input_ids=ids, words=torch.full((count,), words))


class CausalLMTask(Task):
    """Predict the next token: ``perplexity = exp(mean of −log p(token | those before it))``.

    A *token* is one of the tokenizer's, GPT-2's BPE in the paper. As in the script of transformers
    that the paper builds on, the text of a split is one sequence of tokens, cut into blocks that do
    not overlap; the first token of a block is not predicted, and a remainder shorter than a block
    is left out. ``word_perplexity`` divides the same loss by the number of words and line ends of
    the text instead of its tokens, and can be compared between tokenizers.
    """

    metric = "perplexity"
    higher_is_better = False

    def __init__(self, config: CausalLMConfig, data_dir: Path) -> None:
        corpus = encode_corpus(
            data_dir,
            config.data or config.dataset,
            config.text if config.data else "",
            config.model if config.tokenizer == "own" else config.tokenizer,
            config.vocab_size,
        )
        if config.data:
            self.own_data = OwnData(
                name=name_of(config.data),
                source=config.data,
                splits={name: len(text.tokens) for name, text in corpus.parts.items()},
                split_by=corpus.split_by,
                unit="tokens",
                digest=corpus.digest,
            )
        if config.scratch:
            # a pretrained model may well end above its start, when it is fitted too closely
            self.falling = "loss"
        self.splits = {
            name: Split(blocks(text, config.block, name), as_it_is)
            for name, text in corpus.parts.items()
        }
        model = new_model(config, corpus.vocabulary) if config.scratch else _pretrained(config)
        if corpus.vocabulary > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {corpus.vocabulary} tokens, {config.model} knows "
                f"{model.config.vocab_size}; set tokenizer=own"
            )
        self.model = model
        self._mean = NextTokenLoss(config.compile != "no")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._mean(*self._logits(model, batch["input_ids"].long()))

    def predict(self, model: nn.Module, batch: Any) -> Any:
        ids = batch["input_ids"].long()
        logits, targets = self._logits(model, ids)
        total = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total.double(), ids.numel() - len(ids), batch["words"].double().sum()

    def score(self, predictions: list[Any]) -> dict[str, float]:
        totals, tokens, words = zip(*predictions, strict=True)
        total = float(sum(totals))
        return {
            "perplexity": _exp(total / sum(tokens)),
            "word_perplexity": _exp(total / float(sum(words))),
            "loss": total / sum(tokens),
        }

    def example(self) -> Any:
        """The first block of the validation text."""
        return {"input_ids": self.first_examples(1)["input_ids"].long()}

    def _logits(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What every position predicts, and the token that follows it."""
        with causal_by_kernel(self.model):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
        # the last token of a block has no target: ignoring it is cheaper than slicing
        return logits, F.pad(ids[:, 1:], (0, 1), value=IGNORED)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@contextmanager
def causal_by_kernel(model: Any) -> Iterator[None]:
    """Leave causality to the attention kernel, where transformers would build a mask for GPT-2.

    transformers inspects values on the device to decide whether a mask can be left out; while a
    CUDA graph is captured it cannot, and builds the whole N×N mask. It builds none for a body whose
    config names an unknown attention implementation. The attention layers keep the real config and
    are causal by themselves.
    """
    body = getattr(model, "transformer", None)
    config = model.config
    if body is None or config.model_type != "gpt2" or config._attn_implementation != "sdpa":
        yield
        return
    unmasked = copy.copy(config)
    unmasked._attn_implementation_internal = "causal by kernel"
    body.config = unmasked
    try:
        yield
    finally:
        body.config = config


def new_model(config: CausalLMConfig, vocabulary: int) -> Any:
    """A GPT-2 of the sizes that the settings name."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = 0.1 if config.dropout is None else config.dropout
    sizes = GPT2Config(
        # GPUs are fastest with a multiple of 64 rows in the embedding
        vocab_size=-(-vocabulary // 64) * 64,
        n_positions=config.block,
        n_embd=config.width,
        n_layer=config.depth,
        n_head=config.heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(sizes)


def _pretrained(config: CausalLMConfig) -> Any:
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    sizes = load(AutoConfig, config.model)
    is_causal = getattr(sizes, "is_decoder", False) or sizes.is_encoder_decoder
    if type(sizes) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal:
        raise ValueError(
            f"{config.model} is an encoder, which sees the tokens that it would predict; set "
            "model= to a decoder such as gpt2"
        )
    most = getattr(sizes, "max_position_embeddings", config.block)
    if config.block > most:
        raise ValueError(f"block {config.block} is longer than the {most} tokens of {config.model}")
    if config.dropout is not None:
        names = [name for name in _DROPOUTS if hasattr(sizes, name)]
        if not names:
            raise ValueError(f"{config.model} has no dropout to be set; set dropout=none")
        for name in names:
            setattr(sizes, name, config.dropout)
    return load_model(AutoModelForCausalLM, config.model, config=sizes)


RECIPE = Recipe(
    name="causal_lm",
    title="Language modelling: fine-tune GPT-2, or train one from scratch",
    config=CausalLMConfig,
    build=CausalLMTask,
)
