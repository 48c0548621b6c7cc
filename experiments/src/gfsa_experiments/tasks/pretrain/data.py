"""Token files of a corpus, rows cut from them, and which tokens of a row belong together."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.utils.data import Dataset

from gfsa.filters import GraphFilter
from gfsa.operators import Visibility
from gfsa_experiments.data.corpus import Corpus, corpus_of, find_corpus
from gfsa_experiments.data.own import HUB, PARTS
from gfsa_experiments.data.tokenizers import token_ids, train_tokenizer

META = "tokens.json"
TOKENIZER = "tokenizer.json"
END = "<|endoftext|>"
"""Begins every document, so that the end of one is predicted, and nothing from one to the next."""
_FORMAT = 1
# of the rule that splits text which names no parts
_SPLIT = 2
_DOCUMENTS_AT_ONCE = 2_000


@dataclass(frozen=True)
class Part:
    """One part of a corpus in numbers."""

    tokens: int
    documents: int
    bytes: int
    sha256: str
    """Of its file of tokens."""


@dataclass(frozen=True)
class Meta:
    """What a folder of token files holds."""

    format: int
    name: str
    vocabulary: int
    end: int
    """The token that begins a document."""
    dtype: str
    tokenizer: str
    """``bpe 16384`` for one that was trained on the text, ``file`` and a hash for one given."""
    parts: dict[str, Part]


@dataclass(frozen=True)
class TokenFiles:
    """A prepared corpus: a folder with the tokens of each part, its tokenizer and numbers."""

    folder: Path
    meta: Meta
    split_by: str = "as it was prepared"
    """How its parts were made, as a sentence."""

    def tokens(self, part: str) -> np.ndarray:
        """The tokens of one part in a row, memory-mapped."""
        # copy on write: torch warns of arrays that cannot be written to
        return np.memmap(self.folder / f"{part}.bin", self.meta.dtype, mode="c")


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer file, or the size of one that is trained."""

    file: str
    vocab_size: int

    @property
    def description(self) -> str:
        if not self.file:
            return f"bpe {self.vocab_size}"
        path = Path(self.file).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"tokenizer={self.file}: there is no such file; expected a tokenizer.json of the "
                "library tokenizers, or bpe to train one"
            )
        return f"file {sha256(path.read_bytes()).hexdigest()[:16]}"


def token_files(
    data: str, data_dir: Path, choice: TokenizerChoice, cache: Path, column: str = "text"
) -> TokenFiles:
    """The token files of a corpus, prepared if they are not there.

    Args:
        data: a corpus (:func:`gfsa_experiments.data.corpus.corpus_of`), or a prepared folder.
        choice: the tokenizer.
        cache: where prepared corpora are kept.
        column: the key or column of the text, where documents have several.
    """
    if not data.startswith(HUB):
        path = find_corpus(data, data_dir)
        if (path / META).is_file():
            return _given(path, choice, cache)
    corpus = corpus_of(data, data_dir, column)
    folder = cache / f"tokens-{corpus.name}-{_key(corpus, choice)}"
    with _made_once(folder) as making:
        if making is not None:
            prepare(corpus, choice, making)
    return TokenFiles(folder, _checked(folder), corpus.split_by)


def prepare(corpus: Corpus, choice: TokenizerChoice, folder: Path) -> Meta:
    """Encode a corpus into ``folder``, which must be empty."""
    documents = corpus.documents()
    tokenizer = _tokenizer(choice, documents["train"])
    tokenizer.save(str(folder / TOKENIZER))
    # numbers may be left out, so that the largest is above their count
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    end = tokenizer.token_to_id(END)
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    parts = {
        name: _encode(tokenizer, documents[name], end, folder / f"{name}.bin", dtype)
        for name in PARTS
    }
    meta = Meta(_FORMAT, corpus.name, vocabulary, end, dtype, choice.description, parts)
    (folder / META).write_text(json.dumps(asdict(meta), indent=1) + "\n")
    return meta


def read_meta(folder: Path) -> Meta:
    path = folder / META
    try:
        written = json.loads(path.read_text())
        parts = {name: Part(**part) for name, part in written.pop("parts").items()}
        meta = Meta(parts=parts, **written)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, prepare the corpus again: {error!r}") from error
    if meta.format != _FORMAT or set(parts) != set(PARTS):
        raise ValueError(f"{path} is of another version of gfsa; prepare the corpus again")
    return meta


def _given(path: Path, choice: TokenizerChoice, cache: Path) -> TokenFiles:
    """A prepared folder as it is, or unpacked into the cache."""
    meta = read_meta(path)
    own, wanted = path / TOKENIZER, choice.description
    # a file that was given has been written anew
    same = own.is_file() and wanted == TokenizerChoice(str(own), 0).description
    if meta.tokenizer != wanted and not same:
        kind, _, size = meta.tokenizer.partition(" ")
        hint = f"vocab_size={size}" if kind == "bpe" else f"tokenizer={own}"
        raise ValueError(
            f"{path} was prepared with the tokenizer {meta.tokenizer}, the settings ask for "
            f"{wanted}; set {hint}, or data= to the text itself"
        )
    if all((path / f"{part}.bin").is_file() for part in PARTS):
        return TokenFiles(path, _checked(path))
    digest = sha256("".join(meta.parts[part].sha256 for part in PARTS).encode()).hexdigest()[:16]
    folder = cache / f"tokens-{meta.name}-{digest}"
    with _made_once(folder) as making:
        if making is not None:
            _unpack(path, meta, making)
    return TokenFiles(folder, _checked(folder))


def _unpack(path: Path, meta: Meta, folder: Path) -> None:
    for part in PARTS:
        packed = path / f"{part}.bin.xz"
        if not packed.is_file():
            raise FileNotFoundError(f"{path} has neither {part}.bin nor {part}.bin.xz")
        try:
            data = lzma.decompress(packed.read_bytes())
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{packed} is damaged ({error}); prepare it again") from error
        if sha256(data).hexdigest() != meta.parts[part].sha256:
            raise ValueError(f"{packed} has other tokens than {META} says; prepare it again")
        (folder / f"{part}.bin").write_bytes(data)
    for name in (META, TOKENIZER):
        shutil.copyfile(path / name, folder / name)


def _checked(folder: Path) -> Meta:
    """What a folder holds; a disk that was full, or cleaned up, may have cut it."""
    meta = read_meta(folder)
    for part, numbers in meta.parts.items():
        path = folder / f"{part}.bin"
        size = path.stat().st_size if path.is_file() else 0
        expected = numbers.tokens * np.dtype(meta.dtype).itemsize
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes where {META} says {expected}; delete {folder} and "
                "prepare the corpus again"
            )
    return meta


def _key(corpus: Corpus, choice: TokenizerChoice) -> str:
    """The same as long as files, their sizes and dates, and the tokenizer are the same."""
    parts = corpus.has_parts or f"split {_SPLIT}"
    digest = sha256(f"{_FORMAT} {choice.description} {parts}".encode())
    for line in corpus.identity():
        digest.update(line.encode())
    return digest.hexdigest()[:16]


@contextmanager
def _made_once(folder: Path) -> Iterator[Path | None]:
    """An empty folder that becomes ``folder`` at the end; None if that is there already.

    Other processes that want the same wait; one that is killed leaves nothing that counts.
    """
    if (folder / META).is_file():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if (folder / META).is_file():
            yield None
            return
        making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        # mkdtemp keeps others out; they may read what is prepared
        making.chmod(0o755)
        try:
            yield making
            os.replace(making, folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise


def _tokenizer(choice: TokenizerChoice, texts: Sequence[str]) -> Any:
    if not choice.file:
        return train_tokenizer(texts, choice.vocab_size, (END,))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(Path(choice.file).expanduser()))
    except Exception as error:
        # the library has no class of errors of its own
        raise ValueError(
            f"tokenizer={choice.file} is no tokenizer.json of the library tokenizers: {error}"
        ) from error
    # files that were saved for a model of so many tokens cut documents to that length, or fill them
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.token_to_id(END) is None:
        tokenizer.add_special_tokens([END])
    return tokenizer


def _encode(tokenizer: Any, documents: Sequence[str], end: int, path: Path, dtype: str) -> Part:
    """Write ``end`` and the tokens of each document, one document after the other.

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
    return Part(count, begun, size, digest.hexdigest())


# beyond, tokens stay on the host and rows are sent one batch at a time
_MOST_ON_DEVICE = 4 * 2**30
_SIGNED = {"uint16": torch.int16, "uint32": torch.int32}


class TokenRows(Dataset[Any]):
    """Tokens in rows of ``block + 1``: what a row predicts last is what the next one begins with.

    An item is the number of its row; :meth:`ids` has the tokens. All of them lie on the device, so
    that a batch is a handful of numbers and nothing waits for the host.

    Args:
        tokens: all of them, in a row.
        block: how many each row predicts.
        name: of the part.
        most: take so many rows, evenly spaced; 0 for all.
    """

    def __init__(self, tokens: np.ndarray, block: int, name: str, most: int = 0) -> None:
        count = (len(tokens) - 1) // block
        if count < 1:
            raise ValueError(
                f"the {name} text has {len(tokens)} tokens, not enough for a row of {block} and "
                "the token after it; set a smaller block"
            )
        self.block, self.name = block, name
        # torch knows few operations of unsigned numbers; the bits are the same
        self._host = torch.from_numpy(tokens).view(_SIGNED[tokens.dtype.name])
        self._unsigned = tokens.dtype
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
        """The tokens of a batch, ``(rows, block + 1)``, where the batch is."""
        if "ids" in batch:
            found: Tensor = batch["ids"]
            return found
        rows = batch["rows"]
        if rows.device not in self._on_device:
            self._on_device[rows.device] = self._host.to(rows.device)
        return self._cut(self._on_device[rows.device], rows)

    def counts(self, vocabulary: int) -> Tensor:
        """How often each token is in the text, ``(vocabulary,)``."""
        counts = np.bincount(self._host.numpy().view(self._unsigned), minlength=vocabulary)
        return torch.from_numpy(counts)

    def _cut(self, tokens: Tensor, rows: Tensor) -> Tensor:
        every = tokens.unfold(0, self.block + 1, self.block)
        return every[rows].long() & self._mask


def positions_in_documents(ids: Tensor, end: int) -> Tensor:
    """How far each token of ``(rows, tokens)`` is from the start of its document in the row."""
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.where(ids == end, place, 0)
    return place - starts.cummax(1).values


def mask_for(model: nn.Module, ids: Tensor, end: int) -> Any:
    """Where tokens may look, as ``model`` takes it.

    Plugged layers take a description of N numbers, and kernels for packed rows with it; their
    model's other layers get it written out. A plain model takes a tensor of N×N. Transformers would
    make the same one of the positions, but looks at them first: each step would wait for the GPU.
    """
    if any(isinstance(module, GraphFilter) for module in model.modules()):
        return describe_documents(ids, end)
    return within_documents(ids, end)


def within_documents(ids: Tensor, end: int) -> Tensor:
    """``(rows, 1, tokens, tokens)``, True where a token may look: back, in its own document."""
    document = _numbers(ids, end)
    same = document[:, :, :, None] == document[:, :, None, :]
    return same.tril()


def describe_documents(ids: Tensor, end: int) -> Any:
    """What :func:`within_documents` says, described: of one shape whatever the documents are."""
    from gfsa.adapters.transformers.masks import DescribedMask

    visible = Visibility(causal=True, documents=_numbers(ids, end), in_order=True)
    rows, tokens = ids.shape
    return DescribedMask(visible, rows, tokens, ids.device)


def _numbers(ids: Tensor, end: int) -> Tensor:
    """``(rows, 1, tokens)``, the number of each token's document in its row."""
    return (ids == end).cumsum(1)[:, None]
