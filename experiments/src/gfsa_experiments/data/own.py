"""The user's own data (``data=``): find it, name it, split it, and decide what its labels are."""

from __future__ import annotations

import gzip
import lzma
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

HUB = "hub:"
PACKED = (".xz", ".gz")
_NOT_UNPACKED = (".zst", ".bz2", ".zip", ".7z", ".tar", ".tgz")
_OPENERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
_UNREADABLE = (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile)
_SHOWN_ENTRIES = 8


def name_of(data: str) -> str:
    """The name of the data in rows: of ``reviews/my.csv.gz`` it is ``my``, of hub data its ID's."""
    if data.startswith(HUB):
        identity, _, configuration = data.removeprefix(HUB).partition(":")
        words = [identity.rstrip("/").rpartition("/")[2], configuration]
        name = "-".join(word for word in words if word)
    else:
        # symbolic links are not resolved; "." is a folder with a name too
        name = os.path.basename(os.path.abspath(os.path.expanduser(data)))
        for packed in PACKED:
            name = name.removesuffix(packed)
        name = re.sub(r"(?<=.)\.[A-Za-z]\w*$", "", name)
    # a blank would end the name in a table
    return re.sub(r"\s+", "_", name.strip())


def find_own(data: str, data_dir: Path, expected: str = "a file or folder") -> Path:
    """The file or folder that ``data`` names: below ``data_dir``, or a path of its own."""
    # not Path.expanduser, which raises for a user that the machine does not know
    own = Path(os.path.expanduser(data))
    for path in (data_dir / data, own):
        if path.exists():
            return path
    raise FileNotFoundError(
        f"there is no {data} in {data_dir.absolute()}, nor a file or folder of that path; "
        f"set data= to {expected}, or give --data-dir{entries_of(own.parent)}"
    )


def digest_of(pieces: Iterable[str | bytes]) -> str:
    """A hash of all pieces in their order, and of where one ends and the next begins."""
    digest = sha256()
    for piece in pieces:
        # JSON may have halves of surrogate pairs
        content = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()[:16]


def entries_of(folder: Path) -> str:
    """``. FOLDER has a, b, …``: a sentence to follow an error; empty if there is no such folder."""
    if not folder.is_dir():
        return ""
    names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir() if p.name[0] != ".")
    shown = ", ".join(names[:_SHOWN_ENTRIES]) + (", …" if len(names) > _SHOWN_ENTRIES else "")
    return f". {folder.absolute()} has {shown or 'nothing in it'}"


def text_of(path: Path) -> str:
    """The text of a file, packed or not; a byte order mark is left out."""
    try:
        data = _OPENERS.get(path.suffix.lower(), bytes)(path.read_bytes())
    except _UNREADABLE as error:
        raise ValueError(f"{path} is damaged, or not packed as its name says ({error})") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        todo = "Save it as UTF-8"
        if path.suffix.lower() in _NOT_UNPACKED:
            todo = f"Unpack it; {' and '.join(PACKED)} are read packed"
        raise ValueError(
            f"{path} is damaged, or no UTF-8 text ({error}); it begins with {data[:16]!r}. {todo}"
        ) from error


def ending_of(path: Path) -> str:
    """The ending that says what a file is: ``.csv`` of ``reviews.csv.gz``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a file, or a folder between it and ``root``, has a name that begins with a dot."""
    return any(word.startswith(".") for word in path.relative_to(root).parts)


PARTS = ("train", "valid", "test")
_SPELLINGS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
_TEST_SHARE = 0.1
_VALID_SHARE = 0.1
# a constant, not a setting: every run has the same parts
_SEED = 2024

Rows = dict[str, list[int]]


def part_named(word: str) -> str | None:
    """The part that a word is a name of: ``valid`` for ``val``."""
    return next((part for part, spelt in _SPELLINGS.items() if word.lower() in spelt), None)


def part_of(path: Path, root: Path) -> str | None:
    """The part that a file's name, or that of its folder, says: ``techdocs.train.txt.xz``."""
    relative = path.relative_to(root)
    words = [
        *(word.lower() for word in relative.parts[:-1]),
        *path.name.lower().replace("-", ".").replace("_", ".").split("."),
    ]
    for part, spelt in _SPELLINGS.items():
        if any(word in spelt for word in words):
            return part
    return None


def three_parts(
    found: Mapping[str, Sequence[int]],
    where: str,
    classes: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    holdout: float = _VALID_SHARE,
) -> tuple[Rows, str]:
    """The rows to train, validate and test on, and a sentence on how they were chosen.

    Args:
        found: the rows of each part that the data names; ``{"train": all}`` if it names none.
        where: the data, for messages.
        classes: the class of each row, to have every class in each part.
        groups: the speaker of each row, to have no speaker in two parts.
        holdout: the share to validate on, of data that names no part for it; 0 for no ``valid``.
    """
    parts = {part: list(rows) for part, rows in found.items() if len(rows)}
    named = [part for part in PARTS if part in parts]
    if "train" not in parts:
        raise ValueError(
            f"{where} has a part for {', '.join(named) or 'nothing'}, but none to train on: name "
            "files or folders train, valid and test, or give one file without such a name, which "
            "is split for you"
        )
    if len(named) == len(PARTS):
        return {part: parts[part] for part in PARTS}, "the parts that it names"
    way = "by speaker, " if groups is not None else "at random, "
    way += "the same in every run"
    if groups is None and classes is not None:
        way += ", every class in the same share"
    shares = {"train": 1 - holdout, "valid": holdout}
    if len(named) == 1:
        shares = {"train": 1 - holdout - _TEST_SHARE, "valid": holdout, "test": _TEST_SHARE}
    shares = {part: share for part, share in shares.items() if share > 0}
    if "train" not in shares:
        raise ValueError(f"holdout={holdout} leaves nothing to train on")
    cut = _cut(parts["train"], shares, where, classes, groups)
    for part, rows in cut.items():
        if not rows:
            raise ValueError(
                f"{100 * shares[part]:g} % of {len(parts['train'])} examples of {where} leave "
                f"nothing for {part}; set another holdout"
            )
    percent = ", ".join(f"{100 * share:.3g} % {part}" for part, share in shares.items())
    if len(named) == 1:
        return cut, f"{percent}, {way}"
    if "test" in parts:
        return cut | {"test": parts["test"]}, f"its train is split: {percent}, {way}"
    return cut | {"test": parts["valid"]}, (
        f"there is no part test: its valid is reported as test, and its train is split: {percent}, "
        f"{way}"
    )


def _cut(
    rows: Sequence[int],
    shares: Mapping[str, float],
    where: str,
    classes: Sequence[Hashable] | None,
    groups: Sequence[Hashable] | None,
) -> Rows:
    if len(rows) < 10:
        raise ValueError(
            f"{where} has {len(rows)} examples to split, at least 10 are needed; give more, or a "
            "file for each of train, valid and test"
        )
    if groups is not None:
        chosen = [groups[row] for row in rows]
        part_of_group = _split_groups(chosen, shares, where)
        return {p: [row for row in rows if part_of_group[groups[row]] == p] for p in shares}
    kinds = None if classes is None else [classes[row] for row in rows]
    return {p: [rows[at] for at in places] for p, places in split(len(rows), shares, kinds).items()}


def split(
    count: int, shares: Mapping[str, float], classes: Sequence[Hashable] | None = None
) -> Rows:
    """Numbers below ``count`` in parts of the given shares, in increasing order.

    With classes, every class is spread over the parts in these shares, as far as its size allows.
    """
    order = np.random.default_rng(_SEED).permutation(count)
    # the place of each example among those of its class, from 0 to 1
    sizes = Counter(classes) if classes is not None else {None: count}
    seen: Counter[Hashable] = Counter()
    place = np.empty(count)
    for row in order.tolist():
        kind = classes[row] if classes is not None else None
        place[row] = (seen[kind] + 0.5) / sizes[kind]
        seen[kind] += 1
    ordered = order[np.argsort(place[order], kind="stable")]
    ends = np.round(np.cumsum(list(shares.values())) * count).astype(int)
    pieces = np.split(ordered, ends[:-1])
    return {part: sorted(piece.tolist()) for part, piece in zip(shares, pieces, strict=True)}


def _split_groups(
    groups: Sequence[Hashable], shares: Mapping[str, float], where: str
) -> dict[Hashable, str]:
    """The part of each group: the smaller parts are filled up first, in a fixed random order.

    Groups that are larger than such a part come last, the largest at the very end: a speaker of
    most utterances is trained on.
    """
    sizes = Counter(groups)
    if len(sizes) < len(shares):
        raise ValueError(f"{where} has {len(sizes)} groups, too few for {', '.join(shares)}")
    names = sorted(sizes, key=str)
    waiting = [names[at] for at in np.random.default_rng(_SEED).permutation(len(names)).tolist()]
    small = [part for part in shares if part != "train"]
    fitting = max((shares[part] for part in small), default=0.0) * len(groups)
    # taken from the end
    waiting.sort(key=lambda group: -max(sizes[group], fitting))
    found: dict[Hashable, str] = {}
    for number, part in enumerate(small):
        filled = 0
        # a group must be left for each part after this one
        while filled < shares[part] * len(groups) and len(waiting) > len(small) - number:
            group = waiting.pop()
            found[group] = part
            filled += sizes[group]
    return found | dict.fromkeys(waiting, "train")


Kind = Literal["classes", "numbers"]
Wanted = Literal["auto", "classes", "numbers"]

# more different whole numbers than this are a quantity
_MOST_NUMBERED_CLASSES = 20
_SHOWN = 6


@dataclass(frozen=True)
class Labels:
    """The label of each example as a number: of its class, or itself."""

    kind: Kind
    classes: tuple[str, ...]
    """In order; empty for numbers."""
    values: list[float]
    why: str
    """A sentence for the caller."""


def decide(
    texts: Sequence[str],
    column: str,
    wanted: Wanted = "auto",
    *,
    only_classes: bool = False,
    advice: str = "set label= to another column",
) -> Labels:
    """What the labels are.

    Words are classes; so are whole numbers of which at most 20 different ones occur. Other numbers
    are numbers, which a model is trained to predict.

    Args:
        texts: the labels as text.
        column: where they come from, for messages.
        wanted: the caller's own decision, if there is one.
        only_classes: the recipe predicts classes alone, and has no setting ``labels``.
        advice: what to do if they are no labels.
    """
    read = _Column(texts, column, [_number(text) for text in texts])
    _refuse_not_finite(read)
    if wanted == "numbers" or (wanted == "auto" and read.is_quantity):
        return _as_numbers(read, only_classes, advice)
    override = "" if only_classes else ", or labels=classes if each of them is a class"
    if wanted == "auto":
        _refuse_many_classes(read, advice + override)
    labels = _as_classes(read, advice)
    if wanted == "auto" and read.is_whole and not only_classes:
        hint = f"at most {_MOST_NUMBERED_CLASSES} different whole numbers; labels=numbers would"
        return replace(labels, why=f"{labels.why} ({hint} make them a quantity)")
    return labels


@dataclass(frozen=True)
class _Column:
    """The labels as they were read."""

    texts: Sequence[str]
    name: str
    values: list[float | None]
    """As numbers, None for what is no finite number."""

    @cached_property
    def numbers(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @cached_property
    def words(self) -> list[str]:
        """What is no finite number."""
        pairs = zip(self.texts, self.values, strict=True)
        return [text for text, value in pairs if value is None]

    @cached_property
    def is_whole(self) -> bool:
        """Whether all are whole numbers."""
        return not self.words and all(value.is_integer() for value in self.numbers)

    @cached_property
    def is_quantity(self) -> bool:
        """Whether all are numbers, and not a few different whole ones."""
        few = len(set(self.values)) <= _MOST_NUMBERED_CLASSES
        return not self.words and not (self.is_whole and few)

    @cached_property
    def names(self) -> list[str]:
        """The class of each label; 1 and 1.0 are one class if all are whole numbers."""
        return [str(int(value)) for value in self.numbers] if self.is_whole else list(self.texts)

    @cached_property
    def classes(self) -> list[str]:
        """The different classes, in order."""
        order = (lambda name: (int(name), name)) if self.is_whole else None
        return sorted(set(self.names), key=order)


def _refuse_not_finite(column: _Column) -> None:
    """Raise ValueError for NaN or infinity among numbers: missing, and no class of its own."""
    if column.numbers and column.words and all(_is_number(word) for word in column.words):
        raise ValueError(
            f"the column {column.name} has {len(column.numbers)} finite numbers and "
            f"{len(column.words)} other labels, such as {_some(sorted(set(column.words)))}: "
            "correct or delete these rows"
        )


def _as_numbers(column: _Column, only_classes: bool, advice: str) -> Labels:
    """Labels to predict as numbers; raises ValueError if they are none, or the recipe cannot."""
    if column.words:
        raise ValueError(
            f"labels=numbers, but the column {column.name} has {column.words[0]!r}; set "
            "labels=classes"
        )
    ends = f"numbers from {min(column.numbers):g} to {max(column.numbers):g}"
    if only_classes:
        raise ValueError(
            f"this recipe predicts classes, and the column {column.name} has {ends}; {advice}, or "
            "use the recipe text, which predicts numbers too"
        )
    why = f"regression, {ends} (labels=classes would make them classes)"
    return Labels("numbers", (), column.numbers, why)


def _as_classes(column: _Column, advice: str) -> Labels:
    """Labels to predict as classes; raises ValueError if there is only one."""
    classes = column.classes
    if len(classes) < 2:
        raise ValueError(
            f"every label in the column {column.name} is {classes[0]!r}: there is nothing to "
            f"learn; {advice}"
        )
    place = {name: float(number) for number, name in enumerate(classes)}
    why = f"classification, {len(classes)} classes: {_some(classes)}"
    return Labels("classes", tuple(classes), [place[name] for name in column.names], why)


def _refuse_many_classes(column: _Column, advice: str) -> None:
    """Raise ValueError for so many classes that they are no labels."""
    classes, words, rows = column.classes, column.words, len(column.texts)
    if len(classes) <= max(2, rows / 2):
        return
    if 0 < len(words) <= rows / 10:
        raise ValueError(
            f"the column {column.name} has {rows - len(words)} finite numbers and "
            f"{len(words)} other labels, such as {_some(words)}: correct or delete these rows"
        )
    raise ValueError(
        f"the column {column.name} has {len(classes)} different values in {rows} rows, such "
        f"as {_some(classes)}: it does not look like labels; {advice}"
    )


def refuse_unseen(labels: Labels, parts: dict[str, list[int]], where: str) -> None:
    """Raise ValueError if a part has a class that is not trained on."""
    if labels.kind == "numbers":
        return
    trained = {labels.values[row] for row in parts["train"]}
    for part, rows in parts.items():
        unseen = sorted({labels.values[row] for row in rows} - trained)
        if unseen:
            raise ValueError(
                f"{where}: {part} has labels that train lacks: "
                f"{_some([labels.classes[int(number)] for number in unseen])}"
            )


def _number(text: str) -> float | None:
    """The finite number that a text is, if it is one."""
    return float(text) if _is_number(text) and math.isfinite(float(text)) else None


def _is_number(text: str) -> bool:
    """Whether a text is a number, NaN and infinity included."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _some(values: Sequence[str]) -> str:
    return ", ".join(values[:_SHOWN]) + (", …" if len(values) > _SHOWN else "")
