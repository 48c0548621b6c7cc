"""Language modelling: one task, and three presets that say what is read and which decoder learns.

``causal_lm`` fine-tunes GPT-2 on WikiText or the Penn Treebank, or trains a new one; ``pretrain``
trains a Qwen3-type decoder from scratch on text; ``stdlib`` a small one on Python's own source.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pandas import Interval
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.data.own import name_of
from gfsa_experiments.engine.config import (
    Compile,
    Count,
    CountOrZero,
    Positive,
    Precision,
    Schedule,
    ShareBelowOne,
    TrainConfig,
    check_multiple,
)
from gfsa_experiments.engine.task import Split, Task, as_it_is
from gfsa_experiments.tasks.pretrain.data import (
    SOURCE,
    Text,
    TokenRows,
    read_source,
    text_in_documents,
    text_in_lines,
)
from gfsa_experiments.tasks.pretrain.model import (
    DROPOUTS,
    IGNORED,
    ByteDecoder,
    NextTokenLoss,
    build_decoder,
    causal_by_kernel,
    cross_entropy,
    pretrained_decoder,
    probe,
)

# depth, width, heads and width of the MLP; with 16,384 tokens and a tied head 5.4, 15.4, 46.9 and
# 111.7 million numbers
_SIZES = {
    "5m": (5, 192, 3, 512),
    "15m": (8, 320, 5, 896),
    "46m": (12, 512, 8, 1408),
    "110m": (12, 768, 12, 2560),
}


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TrainConfig):
    """What the presets have in common."""

    overlap: ClassVar[int] = 1
    """The overlap of rows (:class:`TokenRows`)."""
    metrics: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "bits_per_byte")
    """What is measured; the first is the row's."""
    examples: ClassVar[int] = 1
    """Rows of ``valid`` for the lens."""

    @abstractmethod
    def read(self, data_dir: Path) -> Text:
        """The tokens of each part."""

    @abstractmethod
    def decoder(self, vocabulary: int, end: int | None = None) -> Any:
        """The decoder for so many different tokens; ``end`` begins documents."""

    @abstractmethod
    def loss(self, task: LanguageTask, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean; ``model`` is the task's, or a wrapper, ``labels`` are what follows ``ids``."""

    @property
    def falling(self) -> str | None:
        """The metric that training lowers, if it is to (:attr:`Task.falling`)."""
        return "loss"

    def unused(self) -> dict[str, str]:
        unused = super().unused() | {"group_by_length": "every row has the same length"}
        if hasattr(self, "evaluations"):
            unused["eval_every"] = "evaluations says how often"
        return unused

    def steps_between_evaluations(self, per_epoch: int, total: int) -> int:
        often = getattr(self, "evaluations", None)
        if often is None:
            return super().steps_between_evaluations(per_epoch, total)
        return max(1, math.ceil(total / often))


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(LanguageConfig):
    """Fine-tuning as in the paper (15 epochs on PTB, 4 on WikiText-103), or ``model=scratch``."""

    in_label = ("dataset", "data", "model", "depth", "width")
    used_if = (
        ("model=scratch", "depth width heads"),
        ("tokenizer=bpe", "vocab_size"),
        ("!data", "dataset"),
        ("data", "text"),
    )
    overlap = 0
    metrics = ("perplexity", "word_perplexity", "loss")

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

    @property
    def scratch(self) -> bool:
        return self.model == "scratch"

    def label(self) -> str:
        name = f"gpt2-d{self.depth}-w{self.width}" if self.scratch else Path(self.model).name
        return f"{f'data={name_of(self.data)}' if self.data else self.dataset} {name}"

    @property
    def falling(self) -> str | None:
        # a pretrained model may well end above its start, when it is fitted too closely
        return "loss" if self.scratch else None

    def read(self, data_dir: Path) -> Text:
        column = self.text if self.data else ""
        tokenizer = self.model if self.tokenizer == "own" else self.tokenizer
        data = self.data or self.dataset
        return text_in_lines(data_dir, data, column, tokenizer, self.vocab_size)

    def decoder(self, vocabulary: int, end: int | None = None) -> Any:
        if self.scratch:
            from transformers import GPT2Config, GPT2LMHeadModel

            sizes = GPT2Config(
                vocab_size=_multiple_of_64(vocabulary),
                n_positions=self.block,
                n_embd=self.width,
                n_layer=self.depth,
                n_head=self.heads,
                bos_token_id=None,
                eos_token_id=None,
                **dict.fromkeys(DROPOUTS[:3], 0.1 if self.dropout is None else self.dropout),
            )
            return GPT2LMHeadModel(sizes)
        model = pretrained_decoder(self.model, self.block, self.dropout)
        if vocabulary > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {vocabulary} tokens, {self.model} knows "
                f"{model.config.vocab_size}; set tokenizer=own"
            )
        return model

    def loss(self, task: LanguageTask, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        with causal_by_kernel(task.model):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return NextTokenLoss(self.compile != "no")(logits, labels)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _multiple_of_64(vocabulary: int) -> int:
    """GPUs are fastest with so many rows in the embedding."""
    return -(-vocabulary // 64) * 64


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(LanguageConfig):
    """One epoch of techdocs, 65,536 tokens a step."""

    in_label = ("data", "size")
    used_if = (("tokenizer=bpe", "vocab_size"),)

    data: str = "techdocs"
    """A corpus below ``--data-dir``, the path of a file or folder of text, or ``hub:ID``."""
    text: str = "text"
    """The key of the text in JSON lines, its column in tables and on the hub."""
    tokenizer: str = "bpe"
    """``bpe``: trained on the text; or the path of a tokenizer.json."""
    vocab_size: Annotated[int, Interval(257, math.inf, "left")] = 16_384
    """With ``tokenizer=bpe``: every byte, the end, and more."""
    block: Count = 1024
    """Tokens of a row."""
    size: Literal["5m", "15m", "46m", "110m"] = "15m"
    """Millions of parameters; the numbers below override it."""
    depth: Count | None = None
    width: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    """Fewer than ``heads``: grouped queries; None: as many."""
    head_dim: Count = 64
    mlp: Count | None = None
    """Width inside the MLP."""
    qk_norm: Literal["learned", "none", "fixed", "temperature"] = "learned"
    """Queries and keys: normalised with ``learned`` gains (Qwen3), ``none`` (Llama), ``fixed``:
    normalised without gains, ``temperature``: that and one learned factor per head."""
    gate: bool = False
    """A factor for each head's output, computed from the layer's input (gated attention)."""
    tokenwise: bool = False
    """c0 and c1 of each head computed from the layer's input, by maps that start at zero."""
    shift_keys: bool = False
    """Add to each key the one before it, times a factor per head that starts at zero."""
    fast_gates: bool = False
    """Weights of ``gate`` or ``tokenwise`` learn at ``gain_lr``, without decay."""
    init_std: Positive = 0.02
    """Standard deviation of the random weights."""
    evaluations: Count = 10
    """How often ``valid`` is measured."""
    eval_rows: CountOrZero = 256
    """Rows of ``valid`` that are measured, evenly spaced; 0 for all."""
    probes: CountOrZero = 0
    """Rows and random sequences on which the trained model is probed (``probes.json``)."""

    epochs: float = 1
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.1
    beta2: float = 0.95
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    min_lr: float = 0.1
    precision: Precision = "bf16"
    compile: Compile = "auto"
    drop_last: bool = True

    def check(self) -> None:
        super().check()
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.gate and self.tokenwise:
            raise ValueError("gate and tokenwise both scale a head's output: choose one of them")
        sizes: Any = self.whole()
        if sizes.heads % sizes.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got {sizes.kv_heads} for {sizes.heads} heads"
            )

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        if None not in (self.depth, self.width, self.heads, self.mlp):
            unused["size"] = "depth, width, heads and mlp are all given"
        if not (self.gate or self.tokenwise):
            unused["fast_gates"] = "there are no gates without gate or tokenwise"
        return unused

    def advice(self, filter_lr: float | None) -> str:
        if filter_lr is None or self.gain_lr is not None:
            return ""
        return (
            f"filter_lr={filter_lr:g} without gain_lr: filters learn fast and the plain model's "
            "gains do not, so that filters seem to gain more than they do; --set gain_lr=0.1 for "
            "all methods"
        )

    def whole(self) -> PretrainConfig:
        """The same settings with a number for every size."""
        sizes = zip(("depth", "width", "heads", "mlp"), _SIZES[self.size], strict=True)
        chosen: dict[str, Any] = {name: getattr(self, name) or size for name, size in sizes}
        chosen["kv_heads"] = self.kv_heads or chosen["heads"]
        return replace(self, **chosen)

    def read(self, data_dir: Path) -> Text:
        given = self.data, data_dir, self.text, self.tokenizer, self.vocab_size
        return text_in_documents(*given, is_known=self.data == PretrainConfig.data)

    def decoder(self, vocabulary: int, end: int | None = None) -> Any:
        model = build_decoder(self.whole(), _multiple_of_64(vocabulary), end)
        model.loss_function = NextTokenLoss(self.compile != "no")
        return model

    def loss(self, task: LanguageTask, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        # without a mask, traced or not, attention is causal by its kernel
        given = {"attention_mask": {"full_attention": None}, "use_cache": False}
        loss: Tensor = model(input_ids=ids, labels=labels, **given).loss
        return loss

    def sketch(self) -> nn.Module | None:
        if find_spec("transformers") is None:
            return None
        with torch.device("meta"):
            model: nn.Module = self.decoder(self.vocab_size)
            return model

    def label(self) -> str:
        size = self.size if "size" not in self.unused() else f"d{self.depth}-w{self.width}"
        name = name_of(self.data)
        ours = PretrainConfig.data
        if name == ours and self.data != ours:
            # the caller's own text is not taken for ours
            name = f"data={name}"
        return f"{name} qwen3-{size}"


@dataclass(frozen=True, kw_only=True)
class StdlibConfig(LanguageConfig):
    """Settings that were chosen on ``valid`` for the plain model; no files are needed."""

    in_label = ("depth", "width")
    metrics = ("bits_per_byte", "loss", "perplexity")
    examples = 64

    depth: Count = 4
    width: Count = 64
    heads: Count = 4
    block: Count = 64
    """Bytes of a row."""
    init_std: Positive = 0.06
    """Standard deviation of the random weights."""
    evaluations: Count = 10
    """How often ``valid`` is measured."""
    eval_rows: CountOrZero = 256
    """Rows of ``valid`` that are measured, evenly spaced; 0 for all."""
    test_rows: CountOrZero = 1024
    """The same of ``test``."""

    max_steps: int = 500
    batch_size: int = 8
    eval_batch_size: int = 64
    lr: float = 4e-3
    gain_lr: float | None = 0.03
    weight_decay: float = 0.1
    beta2: float = 0.95
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    min_lr: float = 0.1
    drop_last: bool = True

    def check(self) -> None:
        super().check()
        check_multiple(self, "width", "heads")
        if (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width} and heads {self.heads} make heads of "
                f"{self.width // self.heads} numbers; RoPE needs an even size"
            )

    @property
    def falling(self) -> None:
        return None

    def read(self, data_dir: Path) -> Text:
        found = read_source(SOURCE)
        tokens = {p: np.frombuffer(text, np.uint8).astype(np.uint16) for p, text in found.items()}
        return Text(tokens, {part: len(text) for part, text in found.items()}, 256)

    def decoder(self, vocabulary: int = 256, end: int | None = None) -> ByteDecoder:
        return ByteDecoder(self.depth, self.width, self.heads, self.block, self.init_std)

    def loss(self, task: LanguageTask, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(ids), labels)

    def sketch(self) -> nn.Module:
        with torch.device("meta"):
            return self.decoder()

    def label(self) -> str:
        return f"stdlib decoder-d{self.depth}-w{self.width}"


class LanguageTask(Task):
    """Predict the next token: ``loss = mean of −log p(token | those before it)`` in nats.

    The text of a part is one sequence of tokens, cut into rows; a remainder shorter than a row is
    left out. ``perplexity`` is exp(loss). ``bits_per_byte`` and ``word_perplexity`` spread the loss
    over the bytes, or the words and line ends, of the text instead of its tokens, and can be
    compared between tokenizers. In the rows of ``pretrain`` and ``stdlib`` every token but the
    first is predicted once; in those of ``causal_lm``, as in the script of transformers that the
    paper builds on, the first token of a row never is.
    """

    higher_is_better = False

    def __init__(self, config: Any, data_dir: Path) -> None:
        self.config = config
        text = config.read(data_dir)
        self.own_data, self.end = text.own, text.end
        self.metric, self.falling = config.metrics[0], config.falling
        # of some parts, how many rows are measured
        most = {"valid": getattr(config, "eval_rows", 0), "test": getattr(config, "test_rows", 0)}
        self.rows = {
            part: TokenRows(tokens, config.block, part, most.get(part, 0), config.overlap)
            for part, tokens in text.tokens.items()
        }
        self.splits = {part: Split(rows, as_it_is) for part, rows in self.rows.items()}
        self._units = {part: text.units[part] / len(of) for part, of in text.tokens.items()}
        self.tokens = config.block
        self.model = config.decoder(text.vocabulary, text.end)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = self.config.loss(self, model, *self._given(batch))
        return mean

    def predict(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = self._given(batch)
        count = len(inputs) * (self.rows[batch["part"]].width - 1)
        lacking = (self.config.eval_batch_size or self.config.batch_size) - len(inputs)
        if lacking > 0:
            # another shape would be compiled for, for the sake of one batch
            inputs = torch.cat([inputs, inputs[:1].expand(lacking, -1)])
            labels = F.pad(labels, (0, 0, 0, lacking), value=IGNORED)
        total = self.config.loss(self, model, inputs, labels).double() * count
        return total, count, count * self._units[batch["part"]]

    def score(self, predictions: list[Any]) -> dict[str, float]:
        totals, counts, units = map(sum, zip(*predictions, strict=True))
        total = float(totals)
        found = {
            "loss": total / counts,
            "perplexity": _exp(total / counts),
            "word_perplexity": _exp(total / units),
            "bits_per_byte": total / math.log(2) / units,
        }
        return {name: found[name] for name in self.config.metrics}

    def example(self) -> Any:
        """The first rows of the validation text."""
        inputs, _ = self._given(self.first_examples(self.config.examples))
        return inputs if isinstance(self.model, ByteDecoder) else {"input_ids": inputs}

    def probes(self, model: nn.Module) -> dict[str, Any] | None:
        rows = getattr(self.config, "probes", 0)
        if not rows:
            return None
        precision = torch.bfloat16 if self.config.precision == "bf16" else None
        return probe(model, self.rows["valid"], precision, rows)

    def identity(self, split: str, index: int) -> Any:
        """The tokens themselves; those of ``train`` are never augmented, so they count too."""
        rows = self.rows[split]
        ids = rows.ids(rows.__getitems__([index]))
        if self.config.overlap:
            return ids
        # as rows that were recorded have it
        words = torch.tensor([self._units[split] * (rows.width - 1)], dtype=torch.float32)
        return None if split == "train" else {"input_ids": ids, "words": words}

    def _given(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """What the model reads, and what follows each of these tokens."""
        ids = self.rows[batch["part"]].ids(batch)
        if self.config.overlap:
            return ids[:, :-1], ids[:, 1:]
        # the last token of a row has no target: ignoring it is cheaper than slicing
        return ids, F.pad(ids[:, 1:], (0, 1), value=IGNORED)
