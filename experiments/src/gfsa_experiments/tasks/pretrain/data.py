"""Text to model language on: corpora, known or own, as documents, as tokens, and as rows."""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset

from gfsa_experiments.data import own
from gfsa_experiments.data.files import check_count, source_of
from gfsa_experiments.data.pretrained import load_tokenizer, token_ids, train_tokenizer
from gfsa_experiments.data.tables import ENDINGS as TABLES
from gfsa_experiments.data.tables import column_of, instead_of_files, load_parts, open_table
from gfsa_experiments.engine.task import OwnData

META = "tokens.json"
END = "<|endoftext|>"
"""Begins every document, so that the end of one is predicted, and nothing from one to the next."""
_FORMAT = 1
# of the rule that splits text which names no parts
_SPLIT = 2
_DOCUMENTS_AT_ONCE = 2_000
# the share of the text that valid gets, and test
SHARE = 0.05
# how far a border may move towards the start to spare a document, a line or a word: a part keeps at
# least half of its share
_REACH = SHARE / 2
# of a line, of a word
_ENDS = (re.compile(r"\n"), re.compile(r"\s"))


def split_documents(documents: Sequence[str], root: str) -> dict[str, list[str]]:
    """The last 5 % of the text to test on, the 5 % before to validate on, the rest to train on.

    Where a document ends shortly before a border between two parts, the parts meet there. Otherwise
    the document that lies across the border is cut: at the end of a line if one is near, of a word,
    or between two characters. No other document is.
    """
    text, ends = "".join(documents), [0, *itertools.accumulate(map(len, documents))]
    size = len(text)
    borders = [_border(text, ends, int(share * size)) for share in (1 - 2 * SHARE, 1 - SHARE)]
    parts: dict[str, list[str]] = {}
    for name, first, last in zip(own.PARTS, [0, *borders], [*borders, size], strict=True):
        cuts = [first, *(end for end in ends if first < end < last), last]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        # blanks that a cut leaves alone are no document
        parts[name] = [piece for piece in pieces if piece.strip()]
    if not all(parts.values()):
        raise ValueError(
            f"{root} is too little text to be split into {', '.join(own.PARTS)}: it has {size:,} "
            f"characters in {len(documents):,} documents; give more, or a file for each part"
        )
    return parts


def _border(text: str, ends: Sequence[int], at: int) -> int:
    """Where to cut the text at about ``at``; ``ends`` are those of its documents."""
    # of the document that lies across
    start = ends[bisect.bisect(ends, at) - 1]
    earliest = at - int(_REACH * len(text))
    if 0 < start >= earliest:
        return start
    begin = max(start, earliest)
    found = [[match.end() for match in kind.finditer(text[begin:at])] for kind in _ENDS]
    return next((begin + places[-1] for places in found if places), at)


# in a folder; a csv beside the text is no text
_IN_FOLDERS = (".txt", ".md", ".text", ".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True)
class Corpus:
    """Documents in parts; where the data names no parts, they are split off ``train``."""

    name: str
    root: str
    """Where it is, for messages."""
    column: str
    """The key of the text in JSON lines, its column in tables."""
    sources: dict[str, Any]
    """The files of each part that the data names, or its table of the hub."""
    unread: tuple[str, ...] = ()
    """Other files of the folder, by their path in it."""

    @property
    def split_by(self) -> str:
        """How the parts were made, as a sentence."""
        percent = f"{100 * SHARE:g} %"
        said = "the parts that it names"
        if len(self.sources) == 2:
            start = "" if "test" in self.sources else "its valid is reported as test; "
            said = f"{start}the last {percent} of its documents to train on are valid"
        elif len(self.sources) == 1:
            said = f"about the last {percent} of the text is test, the {percent} before it valid"
        more = f" and {len(self.unread) - 3} more" if len(self.unread) > 3 else ""
        return said + (f"; not read: {', '.join(self.unread[:3])}{more}" if self.unread else "")

    def documents(self) -> dict[str, list[str]]:
        """The documents of each part."""
        found = {part: list(self._read(part)) for part in self.sources}
        if len(self.sources) == 1:
            found = split_documents(found["train"], self.root)
        elif len(found) == 2:
            # a data set of the hub
            train = found.pop("train")
            held_out = max(1, round(SHARE * len(train)))
            (test,) = found.values()
            found = {"train": train[:-held_out], "valid": train[-held_out:], "test": test}
        for name, documents in found.items():
            if not any(documents):
                raise ValueError(f"the {name} part of {self.root} has no text in it")
        return {name: found[name] for name in own.PARTS}

    def _read(self, part: str) -> Iterator[str]:
        """The documents of one part; in a file of text a NUL separates them."""
        source = self.sources[part]
        if not isinstance(source, tuple):
            yield from self._texts(f"{self.root} {part}", source)
            return
        for path in source:
            if own.ending_of(path) in TABLES:
                yield from self._texts(str(path), open_table(path))
            else:
                yield from filter(str.strip, own.text_of(path).split("\0"))

    def _texts(self, where: str, table: Any) -> Iterator[str]:
        for number, text in enumerate(column_of(where, table, self.column, "text"), start=1):
            # NaN stands for a missing cell
            if isinstance(text, str) and text.strip():
                yield text
            elif not (text is None or text != text or isinstance(text, str)):
                raise ValueError(
                    f"{where}, row {number}: expected a text in {self.column}, got "
                    f"{type(text).__name__}; set text= to the column of the text"
                )

    def key(self, tokenizer: str) -> str:
        """The same as long as files, their sizes and dates, and the tokenizer are the same."""
        parts = len(self.sources) > 1 or f"split {_SPLIT}"
        lines = [f"{_FORMAT} {tokenizer} {parts}"]
        for part, source in self.sources.items():
            if isinstance(source, tuple):
                if self.column != "text" and part == next(iter(self.sources)):
                    lines.append(f"column {self.column}\n")
                for path in source:
                    stat = path.stat()
                    lines.append(f"{part} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n")
            else:
                texts = "\0".join(map(str, source.get(self.column, ())))
                digest = sha256(texts.encode("utf-8", "surrogatepass")).hexdigest()
                lines.append(f"{self.root} {self.column} {part} {digest}\n")
        return sha256("".join(lines).encode()).hexdigest()[:16]


def corpus_of(data: str, data_dir: Path, column: str = "text") -> Corpus:
    """The corpus that ``data`` names: a file or folder, or ``hub:ID``."""
    if data.startswith(own.HUB):
        sources, unused = load_parts(data)
        if "train" not in sources:
            raise ValueError(
                f"{data} has the parts {', '.join((*sources, *unused))}, but none to train on; "
                "export what you need to a file"
            )
        return Corpus(own.name_of(data), data, column, sources)
    path = own.find(data, data_dir, "a file or folder of text, or hub:ID")
    name = path.resolve().name.partition(".")[0]
    if path.is_file():
        # a file that is named is read, whatever its ending
        return Corpus(name, str(path), column, {"train": (path,)})
    files = own.files_in(path)
    texts = [p for p in files if own.ending_of(p) in _IN_FOLDERS]
    if not texts:
        raise ValueError(
            f"{path} has no text to read: expected files that end in {', '.join(_IN_FOLDERS)}, "
            f"packed ({', '.join(own.PACKED)}) or not, or data= to one file of any ending"
            f"{own.entries_of(path)}"
        )
    # a README beside the parts is about the text
    parts = {part: tuple(p for p in texts if own.part_of(p, path) == part) for part in own.PARTS}
    parts = {part: found for part, found in parts.items() if found}
    if parts and parts.keys() != set(own.PARTS):
        there = ", ".join(f"{p} ({found[0].relative_to(path)})" for p, found in parts.items())
        raise ValueError(
            f"{path} has files for {there}, but none for "
            f"{', '.join(part for part in own.PARTS if part not in parts)}: name files or folders "
            "after all three parts, or after none, to have them split"
        )
    parts = parts or {"train": tuple(texts)}
    read = {p for found in parts.values() for p in found}
    unread = tuple(str(p.relative_to(path)) for p in files if p not in read)
    return Corpus(name, str(path), column, parts, unread)


@dataclass(frozen=True)
class Text:
    """The tokens of each part of a corpus."""

    tokens: dict[str, np.ndarray]
    """Unsigned numbers of 16 or 32 bits."""
    units: dict[str, int]
    """The bytes, or words, that the tokens of each part stand for."""
    vocabulary: int
    end: int | None = None
    """The token that begins a document."""
    own: OwnData | None = None


def _described(tokenizer: str, vocab_size: int) -> str:
    """A tokenizer in words that stay the same: ``bpe 16384``, or ``file`` and a hash."""
    if tokenizer == "bpe":
        return f"bpe {vocab_size}"
    path = Path(tokenizer).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer={tokenizer}: there is no such file; expected a tokenizer.json of the "
            "library tokenizers, or bpe to train one"
        )
    return f"file {sha256(path.read_bytes()).hexdigest()[:16]}"


def text_in_documents(
    data: str, data_dir: Path, column: str, tokenizer: str, vocab_size: int, *, is_known: bool
) -> Text:
    """A corpus whose documents each begin with ``END``, from token files that are made once.

    ``tokenizer`` is ``bpe``, which is trained on the text, or the path of a file; ``is_known``: the
    corpus is not the caller's own.
    """
    corpus = corpus_of(data, data_dir, column)
    cache = Path(os.environ.get("GFSA_CACHE") or "~/.cache/gfsa").expanduser()
    folder = cache / f"tokens-{corpus.name}-{corpus.key(_described(tokenizer, vocab_size))}"
    if not (folder / META).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        # other processes that want the same wait; one that is killed leaves nothing that counts
        with (
            FileLock(cache / f".{folder.name}.lock"),
            tempfile.TemporaryDirectory(dir=cache, prefix=f".{folder.name}-") as inside,
        ):
            if not (folder / META).is_file():
                making = Path(inside) / "tokens"
                making.mkdir()
                prepare(corpus, tokenizer, vocab_size, making)
                making.replace(folder)
    meta = _checked(folder)
    parts = meta["parts"]
    # copy on write: torch warns of arrays that cannot be written to
    tokens: dict[str, np.ndarray] = {
        part: np.memmap(folder / f"{part}.bin", meta["dtype"], mode="c") for part in own.PARTS
    }
    facts = None
    if not is_known:
        documents = ", ".join(f"{parts[part]['documents']:,} {part}" for part in own.PARTS)
        split_by = f"{corpus.split_by}; {documents} documents"
        hashes = [parts[part]["sha256"] for part in own.PARTS]
        named = {"name": corpus.name, "unit": "tokens"}
        facts = own.facts(data, data, tokens, split_by, hashes, **named)
    sizes = {part: parts[part]["bytes"] for part in own.PARTS}
    return Text(tokens, sizes, meta["vocabulary"], meta["end"], facts)


def prepare(corpus: Corpus, tokenizer: str, vocab_size: int, folder: Path) -> None:
    """Encode a corpus into ``folder``, which must be empty."""
    documents = corpus.documents()
    encoder = _tokenizer(tokenizer, vocab_size, documents["train"])
    encoder.save(str(folder / "tokenizer.json"))
    # numbers may be left out, so that the largest is above their count
    vocabulary = max(encoder.get_vocab().values()) + 1
    end, dtype = encoder.token_to_id(END), dtype_for(vocabulary)
    parts = {
        part: _encode(encoder, documents[part], end, folder / f"{part}.bin", dtype)
        for part in own.PARTS
    }
    meta = {"vocabulary": vocabulary, "end": end, "dtype": dtype, "parts": parts}
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")


def dtype_for(vocabulary: int) -> str:
    """The numbers that hold so many different tokens."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def _checked(folder: Path) -> dict[str, Any]:
    """What a folder holds, if it is whole: a disk that was full, or cleaned up, may have cut it."""
    path = folder / META
    try:
        meta: dict[str, Any] = json.loads(path.read_text())
        width = np.dtype(meta["dtype"]).itemsize
        sizes = {f"{part}.bin": width * meta["parts"][part]["tokens"] for part in own.PARTS}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged; delete {folder} and prepare the corpus again: {error!r}"
        ) from error
    for name, expected in sizes.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes where {META} says {expected}; delete {folder} and "
                "prepare the corpus again"
            )
    return meta


def _tokenizer(file: str, vocab_size: int, texts: Sequence[str]) -> Any:
    if file == "bpe":
        return train_tokenizer(texts, vocab_size, (END,))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(Path(file).expanduser()))
    except Exception as error:
        # the library has no class of errors of its own
        raise ValueError(
            f"tokenizer={file} is no tokenizer.json of the library tokenizers: {error}"
        ) from error
    # files that were saved for a model of so many tokens cut documents to that length, or fill them
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.token_to_id(END) is None:
        tokenizer.add_special_tokens([END])
    return tokenizer


def _encode(tokenizer: Any, documents: Sequence[str], end: int, path: Path, dtype: str) -> Any:
    """Write ``end`` and the tokens of each document, one after the other; returns their numbers.

    Where the text has the words of ``end`` themselves, another document begins, and is counted.
    """
    digest, count, begun, size = sha256(), 0, 0, 0
    start = np.array([end], dtype)
    with path.open("wb") as file:
        for at in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            some = documents[at : at + _DOCUMENTS_AT_ONCE]
            pieces = [p for ids in token_ids(tokenizer, some) for p in (start, ids.astype(dtype))]
            data = np.concatenate(pieces)
            file.write(data.tobytes())
            digest.update(data.tobytes())
            count += len(data)
            begun += int((data == end).sum())
            size += sum(len(document.encode()) for document in some)
    return {"tokens": count, "documents": begun, "bytes": size, "sha256": digest.hexdigest()}


def read_lines(data_dir: Path, name: str, part: str) -> list[str]:
    """The lines of one part of WikiText or the Penn Treebank."""
    source = source_of(name)
    names = [f"wiki.{part}.tokens", f"wiki.{part}.raw", f"{part}.txt"]
    names = [f"ptb.{part}.txt"] if name == "ptb" else names
    try:
        path = source.find(data_dir, *names)
    except FileNotFoundError as missing:
        if name == "ptb":
            raise
        data, split = f"hub:Salesforce/wikitext:{name}-v1", part.replace("valid", "validation")
        ((where, found),) = instead_of_files(missing, data_dir, data, [split])
        # the hub's empty lines lack their line feed
        lines = [text.rstrip("\n") for text in column_of(where, found, "text", "")]
    else:
        where, lines = str(path), _lines(own.text_of(path))
    # the raw files contain the words that the others replace by <unk>: their counts differ
    if f"wiki.{part}.raw" not in where:
        check_count(where, count_words(lines), source.sizes[own.PARTS.index(part)], "words")
    return lines


def _lines(text: str) -> list[str]:
    """Only line feeds separate lines."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def count_words(lines: Sequence[str]) -> int:
    """Words as these corpora count them: separated by blanks, plus one for each line end."""
    return sum(len(line.split()) + 1 for line in lines)


@lru_cache(maxsize=2)
def text_in_lines(data_dir: Path, data: str, column: str, tokenizer: str, vocab_size: int) -> Text:
    """A corpus line by line, without marks between documents; kept for later runs.

    ``data`` is WikiText or the Penn Treebank or, with a ``column``, a corpus of the caller's own.
    """
    if column:
        corpus = corpus_of(data, data_dir, column)
        read = {p: [x for d in ds for x in _lines(d)] for p, ds in corpus.documents().items()}
    else:
        read = {part: read_lines(data_dir, data, part) for part in own.PARTS}
    texts = {part: [f"{line}\n" for line in lines] for part, lines in read.items()}
    if tokenizer == "bpe":
        encoder = train_tokenizer(texts["train"], vocab_size)
        vocabulary = encoder.get_vocab_size()
    else:
        encoder = load_tokenizer(tokenizer)
        vocabulary = len(encoder)
    tokens = {
        part: np.concatenate(token_ids(encoder, lines)).astype(dtype_for(vocabulary))
        for part, lines in texts.items()
    }
    facts = None
    if column:
        pieces = (piece for part, lines in texts.items() for piece in (part, *lines))
        facts = own.facts(data, data, tokens, corpus.split_by, pieces, unit="tokens")
    words = {part: count_words(lines) for part, lines in texts.items()}
    return Text(tokens, words, vocabulary, own=facts)


SOURCE = Path(sysconfig.get_path("stdlib"))
"""The standard library of the running Python."""


def part_of(module: str) -> str:
    """The part that a module belongs to, by its name: the same for every version of Python."""
    # of ten shares, one to validate on and one to test on
    share = int(sha256(module.encode()).hexdigest(), 16) % 10
    return {0: "valid", 1: "test"}.get(share, "train")


@lru_cache(maxsize=2)
def read_source(folder: Path) -> dict[str, bytes]:
    """The modules of each part (files, not packages), sorted by name, a zero byte between two."""
    found: dict[str, list[bytes]] = {name: [] for name in own.PARTS}
    for path in sorted(folder.glob("*.py")):
        found[part_of(path.stem)].append(path.read_bytes())
    if not all(found.values()):
        counts = ", ".join(f"{len(modules)} in {name}" for name, modules in found.items())
        raise FileNotFoundError(
            f"expected the source of Python's standard library in {folder}, found {counts}; this "
            "Python came without it: use another one, or gfsa train pretrain --set data=FOLDER"
        )
    return {name: b"\0".join(modules) for name, modules in found.items()}


_SIGNED = {"uint16": torch.int16, "uint32": torch.int32}


# beyond, tokens stay on the host and rows are sent one batch at a time
_MOST_ON_DEVICE = 4 * 2**30


class TokenRows(Dataset[Any]):
    """Tokens in rows; a row begins ``block`` tokens after the one before it.

    An item is the number of its row; :meth:`ids` has the tokens. All of them lie on the device, so
    that a batch is a handful of numbers and nothing waits for the host.

    Args:
        name: of the part.
        most: take so many rows, evenly spaced; 0 for all.
        overlap: 1: rows of ``block + 1``, what one predicts last is what the next one begins with;
            0: rows of ``block``, whose first token is not predicted.
    """

    def __init__(
        self, tokens: np.ndarray, block: int, name: str, most: int = 0, overlap: int = 1
    ) -> None:
        self.block, self.name, self.width = block, name, block + overlap
        count = (len(tokens) - overlap) // block
        if count < 1:
            raise ValueError(
                f"the {name} text has {len(tokens)} tokens, not enough for a row of {self.width}; "
                "set a smaller block"
            )
        # torch knows few operations of unsigned numbers; the bits are the same
        self._host = torch.from_numpy(tokens).view(_SIGNED[tokens.dtype.name])
        self._mask = 0xFFFF if tokens.dtype == np.uint16 else 0xFFFFFFFF
        self._on_device: dict[torch.device, Tensor] = {}
        self._by_host = tokens.nbytes > _MOST_ON_DEVICE
        taken = min(count, most) if most else count
        self.rows = torch.arange(taken, dtype=torch.int64) * count // taken

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        rows = self.rows[torch.tensor(indices)]
        if self._by_host:
            return {"part": self.name, "ids": self._cut(self._host, rows)}
        return {"part": self.name, "rows": rows}

    def ids(self, batch: dict[str, Any]) -> Tensor:
        """The tokens of a batch, ``(rows, width)``, where the batch is."""
        if "ids" in batch:
            found: Tensor = batch["ids"]
            return found
        rows = batch["rows"]
        if rows.device not in self._on_device:
            self._on_device[rows.device] = self._host.to(rows.device)
        return self._cut(self._on_device[rows.device], rows)

    def _cut(self, tokens: Tensor, rows: Tensor) -> Tensor:
        every = tokens.unfold(0, self.width, self.block)
        return every[rows].long() & self._mask
