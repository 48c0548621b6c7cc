"""Code: Devign's defect detection and BigCloneBench's clone detection."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gfsa_experiments.data import hub
from gfsa_experiments.data.files import BadRows, find_file, read_lines, usable_rows
from gfsa_experiments.data.own import PARTS, name_of
from gfsa_experiments.data.pretrained import (
    load_model,
    load_tokenizer,
    refuse_decoder,
    refuse_longer,
)
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.data.tables import read_labelled, refuse_columns
from gfsa_experiments.data.token_batches import (
    LabelledTexts,
    TokenMatrix,
    hold_out,
    without_labels,
)
from gfsa_experiments.data.tokenizers import token_ids, train_tokenizer
from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    Fraction,
    ShareBelowOne,
    TrainConfig,
    check_multiple,
)
from gfsa_experiments.engine.task import Classification, OwnData, Recipe

_REPOSITORIES = {
    "devign": "google/code_x_glue_cc_defect_detection",
    "bigclonebench": "google/code_x_glue_cc_clone_detection_big_clone_bench",
}
# the hub's columns: the code of an example, and its label
_COLUMNS = {"devign": (["func"], "target"), "bigclonebench": (["func1", "func2"], "label")}
# of the balanced sample
_SAMPLED = (90_102, 4_000, 4_000)


@dataclass(frozen=True)
class CodePart:
    """Examples of one part: the functions of each, ``(examples, 1 or 2)``, and labels."""

    functions: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class CodeSet:
    """Functions, and the examples that refer to them."""

    code: list[str]
    parts: dict[str, CodePart]
    classes: int = 2
    own: OwnData | None = None
    """What was read, if the code is the caller's own."""


def own_code(data: str, data_dir: Path, text: tuple[str, ...], label: str) -> CodeSet:
    """Functions, or pairs of them, with classes, from a table of the caller's own."""
    rows = read_labelled(data, data_dir, text, label, only_classes=True)
    place: dict[str, int] = {}
    functions = np.array(
        [[place.setdefault(_one_line(code), len(place)) for code in texts] for texts in rows.texts]
    )
    labels = np.array(rows.labels.values, np.int64)
    parts = {part: CodePart(functions[at], labels[at]) for part, at in rows.parts.items()}
    return CodeSet(list(place), parts, len(rows.labels.classes), rows.own)


@lru_cache(maxsize=2)
def read_code_set(data_dir: Path, name: str) -> CodeSet:
    """``devign`` (one function per example) or ``bigclonebench`` (two)."""
    first = "function.json" if name == "devign" else "data.jsonl"
    try:
        _find(data_dir, name, first)
    except FileNotFoundError as missing:
        return _from_hub(data_dir, name, missing)
    return _read_devign(data_dir) if name == "devign" else _read_clones(data_dir)


def _read_devign(data_dir: Path) -> CodeSet:
    path = _find(data_dir, "devign", "function.json")
    try:
        entries = json.loads("\n".join(read_lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); get it again") from error
    bad = BadRows(path)
    targets: dict[int, int] = {}
    for number, entry in enumerate(entries):
        good = isinstance(entry, dict) and isinstance(entry.get("func"), str)
        if good and entry.get("target") in (0, 1):
            targets[number] = entry["target"]
        else:
            bad.add(number + 1, f"expected func and a target of 0 or 1, got {str(entry)[:60]!r}")
    bad.report(len(targets))

    def parse(line: str) -> tuple[int, int]:
        index = int(line) if line.strip().isdigit() else -1
        if index not in targets:
            raise ValueError(f"{line!r} is not a usable function of {len(entries)}")
        return index, targets[index]

    parts = {}
    for part, official in zip(PARTS, source_of("devign").sizes, strict=True):
        path = _find(data_dir, "devign", f"{part}.txt")
        parts[part] = _part(usable_rows(path, read_lines(path), parse, official))
    code = [_one_line(entry["func"]) if i in targets else "" for i, entry in enumerate(entries)]
    return CodeSet(code, parts)


def _read_clones(data_dir: Path) -> CodeSet:
    path = _find(data_dir, "bigclonebench", "data.jsonl")
    place: dict[str, int] = {}

    def function(line: str) -> str:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("func"), str):
            raise ValueError(f"expected idx and func, got {line[:60]!r}")
        if str(entry.get("idx")) in place:
            raise ValueError(f"idx {entry['idx']} occurs twice")
        place[str(entry.get("idx"))] = len(place)
        return _one_line(entry["func"])

    def pair(line: str) -> tuple[int, int, int]:
        fields = line.split()
        if len(fields) != 3 or fields[2] not in ("0", "1"):
            raise ValueError(f"expected two ids and a label of 0 or 1, got {line[:60]!r}")
        first, second, label = fields
        if first not in place or second not in place:
            raise ValueError(f"one of {first}, {second} is not a function of data.jsonl")
        return place[first], place[second], int(label)

    code = usable_rows(path, read_lines(path), function)
    parts = {}
    for at, part in enumerate(PARTS):
        path = _find(data_dir, "bigclonebench", f"{part}.txt", f"{part}_sampled.txt")
        official = _SAMPLED if "sampled" in path.name else source_of("bigclonebench").sizes
        parts[part] = _part(usable_rows(path, read_lines(path), pair, official[at]))
    return CodeSet(code, parts)


def _from_hub(data_dir: Path, name: str, missing: FileNotFoundError) -> CodeSet:
    functions, label = _COLUMNS[name]
    place: dict[str, int] = {}

    def parse(row: tuple[Any, ...]) -> tuple[int, ...]:
        *texts, target = row
        if target not in (0, 1) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected code and a {label} of 0 or 1, got {target!r}")
        # pairs repeat their functions: each is stored once
        return *(place.setdefault(_one_line(text), len(place)) for text in texts), int(target)

    found = hub.fetch(
        data_dir, _REPOSITORIES[name], None, [hub.PARTS[part] for part in PARTS], missing
    )
    parts = {}
    for part, (where, table), official in zip(PARTS, found, source_of(name).sizes, strict=True):
        rows = zip(*hub.columns_of(where, table, *functions, label), strict=True)
        parts[part] = _part(usable_rows(where, rows, parse, official))
    return CodeSet(list(place), parts)


def _part(rows: list[tuple[int, ...]]) -> CodePart:
    """Rows of functions and, last, the label."""
    table = np.array(rows, np.int64)
    return CodePart(table[:, :-1], table[:, -1])


def _find(data_dir: Path, name: str, *files: str) -> Path:
    return find_file(data_dir, files, source_of(name))


def _one_line(code: str) -> str:
    """Code with all white space as single blanks, as in CodeXGLUE's and CodeT5's scripts."""
    return " ".join(code.split())


# RoBERTa's numbers of the special tokens
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_START, _PAD, _END = 0, 1, 2
_EXAMPLES = 4

Columns = tuple[tuple[str, ...], str]
"""The columns of the functions, and that of the label."""


@dataclass(frozen=True, kw_only=True)
class CodeConfig(TrainConfig):
    """Devign as in the paper; for clone detection set dataset, epochs=1 and lr=5e-5."""

    in_label = ("data", "dataset", "model", "depth", "width")
    short_names = (("label", "label_column"),)

    data: str = ""
    """Code of the caller's own instead of ``dataset``: a file or folder of tables, ``hub:ID``."""
    text: tuple[str, ...] = ("func",)
    """Its column of code; two columns for pairs of functions."""
    label_column: str = "target"
    """Its column of the class; ``label=`` for short."""
    dataset: Literal["devign", "bigclonebench"] = "devign"
    model: str = "microsoft/codebert-base"
    """A folder or a name on the hub of a RoBERTa-, BART- or T5-type model, or ``scratch``: a new
    RoBERTa of the sizes below, with a tokenizer that is learned from the training functions."""
    epochs: float = 10
    batch_size: int = 16
    lr: float = 2e-5
    patience: int = 2
    max_length: CountOrZero = 0
    """Tokens of a function; 0: 512, or 400 for pairs of functions."""
    pad_to_multiple: Count = 64
    """Batches are padded to a multiple of this."""
    fraction: Fraction = 1.0
    """Share of the training examples that is used, the same in every run."""
    depth: Count = 4
    width: Count = 256
    heads: Count = 4
    vocab_size: Count = 8192
    dropout: ShareBelowOne = 0.1
    """Of a model from scratch; a pretrained one keeps its own."""

    def check(self) -> None:
        super().check()
        check_multiple(self, "width", "heads")
        refuse_columns(self.text, self.label_column)
        if self.max_length and self.max_length < 3:
            raise ValueError(f"{self.max_length} tokens hold no code between start and end")

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        if not self.scratch:
            own = f"{self.model} has its own; model=scratch takes it"
            unused |= dict.fromkeys(("depth", "width", "heads", "vocab_size", "dropout"), own)
        if self.data:
            unused["dataset"] = "data= names the code"
        else:
            names = "it names a column of data= of your own"
            unused |= dict.fromkeys(("text", "label_column"), names)
        return unused

    @property
    def longest(self) -> int:
        pairs = len(self.text) == 2 if self.data else self.dataset == "bigclonebench"
        return self.max_length or (400 if pairs else 512)

    @property
    def scratch(self) -> bool:
        return self.model == "scratch"

    def label(self) -> str:
        name = f"roberta-d{self.depth}-w{self.width}" if self.scratch else Path(self.model).name
        return f"{f'data={name_of(self.data)}' if self.data else self.dataset} {name}"

    def columns(self) -> Columns | None:
        """The columns of the caller's own code; None for a data set of ours."""
        return (self.text, self.label_column) if self.data else None


class CodeClassifier(nn.Module):
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
        vectors = self._vectors(input_ids, attention_mask).unflatten(0, (-1, self.functions))
        vectors = vectors.flatten(1)
        if self.between is not None:
            vectors = torch.tanh(self.between(vectors))
        logits: Tensor = self.out(vectors)
        return logits

    def _vectors(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
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


class CodeTask(Classification):
    """Cross-entropy; accuracy for defects and own code, F1 of the clones for clones, ×100."""

    def __init__(self, config: CodeConfig, data_dir: Path) -> None:
        encoded = encode_code(
            Path(data_dir).absolute(),
            config.data or config.dataset,
            config.columns(),
            "" if config.scratch else config.model,
            config.vocab_size if config.scratch else 0,
            config.longest,
        )
        self.own_data = encoded.own
        self.classes = encoded.classes
        clones = not config.data and config.dataset == "bigclonebench"
        self.metric = "f1" if clones else "accuracy"
        functions = encoded.parts["train"].functions.shape[1]
        if config.scratch:
            body = _new_body(config, encoded.vocabulary)
        else:
            from transformers import AutoModel

            body = load_model(AutoModel, config.model, new=("pooler",))
            refuse_decoder(body, config.model)
        self.model = CodeClassifier(body, functions, encoded.classes)
        train = encoded.parts["train"]
        rows, _ = hold_out(len(train.labels), 0.0, config.fraction)
        parts = encoded.parts | {"train": CodePart(train.functions[rows], train.labels[rows])}
        padding = config.pad_to_multiple, config.longest
        batched = {
            name: LabelledTexts(encoded.texts, part.labels, *padding, part.functions)
            for name, part in parts.items()
        }
        refuse_longer(body, config.model, batched["train"].longest)
        self.splits = {name: of_part.split() for name, of_part in batched.items()}

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model(**without_labels(batch))
        return logits

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return self.logits(model, batch).argmax(-1), batch["labels"]

    def score(self, predictions: list[Any]) -> dict[str, float]:
        from sklearn.metrics import f1_score

        found, labels = (torch.cat(part).numpy() for part in zip(*predictions, strict=True))
        scores = {"accuracy": 100 * float((found == labels).mean())}
        if self.classes == 2:
            scores["f1"] = 100 * float(f1_score(labels, found, zero_division=0.0))
        macro = f1_score(labels, found, average="macro", zero_division=0.0)
        return scores | {"macro_f1": 100 * float(macro)}

    def example(self) -> Any:
        """Some validation functions."""
        return without_labels(self.first_examples(_EXAMPLES))


def _new_body(config: CodeConfig, vocabulary: int) -> Any:
    from transformers import RobertaConfig, RobertaModel

    sizes = RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        # RoBERTa's positions begin after the padding id
        max_position_embeddings=config.longest + _PAD + 1,
        type_vocab_size=1,
        bos_token_id=_START,
        pad_token_id=_PAD,
        eos_token_id=_END,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
    )
    return RobertaModel(sizes, add_pooling_layer=False)


@dataclass(frozen=True)
class EncodedCode:
    """Functions as token ids, and the examples that refer to them."""

    vocabulary: int
    texts: TokenMatrix
    parts: dict[str, CodePart]
    classes: int = 2
    own: OwnData | None = None


@lru_cache(maxsize=2)
def encode_code(
    data_dir: Path, name: str, columns: Columns | None, model: str, vocab_size: int, longest: int
) -> EncodedCode:
    """Every function encoded once, cached for later runs of this process.

    Args:
        name: one of the data sets; or, with ``columns``, a table of the caller's own.
    """
    found = read_code_set(data_dir, name) if columns is None else own_code(name, data_dir, *columns)
    about = found.parts, found.classes, found.own
    if model:
        tokenizer = load_tokenizer(model)
        rows = tokenizer(
            found.code, truncation=True, max_length=longest, return_attention_mask=False
        )["input_ids"]
        return EncodedCode(len(tokenizer), TokenMatrix(rows, tokenizer.pad_token_id), *about)
    training = [found.code[row] for row in np.unique(found.parts["train"].functions)]
    tokenizer = train_tokenizer(training, vocab_size, _SPECIAL)
    rows = [[_START, *ids[: longest - 2], _END] for ids in token_ids(tokenizer, found.code)]
    return EncodedCode(tokenizer.get_vocab_size(), TokenMatrix(rows, _PAD), *about)


RECIPE = Recipe(
    name="code",
    title="Code: find defects (Devign) or clones (BigCloneBench), or classify your own",
    config=CodeConfig,
    build=CodeTask,
)
