"""The user's own data (``data=``): find it, name it, split it, and decide what its labels are."""

from __future__ import annotations

import gzip
import lzma
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gfsa_experiments.engine.task import OwnData

HUB = "hub:"
OPENERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
PACKED = (*OPENERS,)
_UNREADABLE = (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile)
_SHOWN = 6


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


def find(data: str, data_dir: Path, expected: str = "a file or folder") -> Path:
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


def entries_of(folder: Path) -> str:
    """``. FOLDER has a, b, …``: a sentence to follow an error; empty if there is no such folder."""
    if not folder.is_dir():
        return ""
    names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir() if p.name[0] != ".")
    return f". {folder.absolute()} has {some(names) or 'nothing in it'}"


def some(values: Sequence[str]) -> str:
    """The first of several words."""
    return ", ".join(values[:_SHOWN]) + (", …" if len(values) > _SHOWN else "")


def digest_of(pieces: Iterable[str | bytes]) -> str:
    """A hash of all pieces in their order, and of where one ends and the next begins."""
    digest = sha256()
    for piece in pieces:
        # JSON may have halves of surrogate pairs
        content = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()[:16]


def facts(
    data: str,
    source: str,
    parts: Mapping[str, Sized],
    split_by: str,
    pieces: Iterable[str | bytes],
    **more: Any,
) -> OwnData:
    """What a run learned about own data: ``pieces`` are its content, ``more`` other fields."""
    sizes = {part: len(of_part) for part, of_part in parts.items()}
    given = {"name": name_of(data), "digest": digest_of(pieces)} | more
    return OwnData(source=source, splits=sizes, split_by=split_by, **given)


def text_of(path: Path) -> str:
    """The text of a file, packed or not; a byte order mark is left out."""
    try:
        data = OPENERS.get(path.suffix.lower(), bytes)(path.read_bytes())
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is damaged, or no UTF-8 text ({error}); it begins with {error.object[:16]!r}. "
            f"Save it as UTF-8, plain or packed with {' or '.join(PACKED)}"
        ) from error
    except _UNREADABLE as error:
        raise ValueError(f"{path} is damaged, or not packed as its name says ({error})") from error


def ending_of(path: Path) -> str:
    """The ending that says what a file is: ``.csv`` of ``reviews.csv.gz``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED else suffix


def files_in(folder: Path) -> list[Path]:
    """All files of a folder but hidden ones, in order."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [f for f in files if not any(w[0] == "." for w in f.relative_to(folder).parts)]


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


def part_named(*words: str) -> str | None:
    """The part that one of the words is a name of: ``valid`` for ``val``."""
    known = {*map(str.lower, words)}
    return next((part for part, spelt in _SPELLINGS.items() if known & {*spelt}), None)


def part_of(path: Path, root: Path) -> str | None:
    """The part that a file's name, or that of its folder, says: ``techdocs.train.txt.xz``."""
    return part_named(*path.relative_to(root).parts[:-1], *re.split(r"[-_.]", path.name))


def hold_out(count: int, share: float, fraction: float = 1.0) -> tuple[list[int], list[int]]:
    """The examples to train on and those to validate on, the same in every run.

    ``share`` of all examples is to validate on, ``fraction`` of the others to train on.
    """
    order = np.random.default_rng(_SEED).permutation(count)
    held = round(share * count)
    rest = order[held:]
    kept = rest[: max(1, round(fraction * len(rest)))]
    return sorted(kept.tolist()), sorted(order[:held].tolist())


def three_parts(
    found: Mapping[str, Sequence[int]],
    where: str,
    classes: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    holdout: float = _VALID_SHARE,
) -> tuple[Rows, str]:
    """The rows to train, validate and test on, and a sentence on how they were chosen.

    ``found`` has the rows of each part that the data names, ``{"train": all}`` if it names none.
    Given the ``classes`` of rows, every class is in each part; given ``groups``, no speaker is in
    two. ``holdout`` is the share to validate on if the data names none; 0 for no ``valid``.
    """
    parts = {part: list(found[part]) for part in PARTS if len(found.get(part, ()))}
    if "train" not in parts:
        raise ValueError(
            f"{where} has a part for {', '.join(parts) or 'nothing'}, but none to train on: name "
            "files or folders train, valid and test, or give one file without such a name, which "
            "is split for you"
        )
    if len(parts) == len(PARTS):
        return parts, "the parts that it names"
    alone = len(parts) == 1
    shares = {"train": 1 - holdout - alone * _TEST_SHARE, "valid": holdout}
    shares = {p: s for p, s in (shares | {"test": alone * _TEST_SHARE}).items() if s > 0}
    if "train" not in shares:
        raise ValueError(f"holdout={holdout} leaves nothing to train on")
    cut = _cut(parts["train"], shares, where, classes, groups)
    for part, rows in cut.items():
        if not rows:
            raise ValueError(
                f"{100 * shares[part]:g} % of {len(parts['train'])} examples of {where} leave "
                f"nothing for {part}; set another holdout"
            )
    how = ", ".join(f"{100 * share:.3g} % {part}" for part, share in shares.items())
    how += f", {'at random' if groups is None else 'by speaker'}, the same in every run"
    if groups is None and classes is not None:
        how += ", every class in the same share"
    if alone:
        return cut, how
    said = "its train is split"
    if "test" not in parts:
        said = f"there is no part test: its valid is reported as test, and {said}"
    return cut | {"test": parts.get("test") or parts["valid"]}, f"{said}: {how}"


def _cut(
    rows: Sequence[int],
    shares: Mapping[str, float],
    where: str,
    classes: Sequence[Hashable] | None,
    groups: Sequence[Hashable] | None,
) -> Rows:
    """Rows in parts of the given shares: groups stay whole, every class is spread over the parts.

    Every part is in increasing order.
    """
    if len(rows) < 10:
        raise ValueError(
            f"{where} has {len(rows)} examples to split, at least 10 are needed; give more, or a "
            "file for each of train, valid and test"
        )
    if groups is not None:
        part_of_group = _split_groups([groups[row] for row in rows], shares, where)
        return {p: [row for row in rows if part_of_group[groups[row]] == p] for p in shares}
    kinds = [None if classes is None else classes[row] for row in rows]
    order = np.random.default_rng(_SEED).permutation(len(rows))
    # the place of each example among those of its class, from 0 to 1
    sizes, seen = Counter(kinds), Counter[Hashable]()
    place = np.empty(len(rows))
    for at in order.tolist():
        place[at] = (seen[kinds[at]] + 0.5) / sizes[kinds[at]]
        seen[kinds[at]] += 1
    ordered = order[np.argsort(place[order], kind="stable")]
    ends = np.round(np.cumsum(list(shares.values())) * len(rows)).astype(int)
    pieces = np.split(ordered, ends[:-1])
    return {p: [rows[at] for at in sorted(piece)] for p, piece in zip(shares, pieces, strict=True)}


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


Wanted = Literal["auto", "classes", "numbers"]
# more different whole numbers than this are a quantity
_MOST_NUMBERED_CLASSES = 20


@dataclass(frozen=True)
class Labels:
    """The label of each example as a number: of its class, or itself."""

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
    """What the labels in a column are: classes, or numbers that a model is trained to predict.

    Words are classes; so are whole numbers with at most 20 different values. The caller may have
    ``wanted`` one of both; a recipe for ``only_classes`` has no such setting. ``advice`` says what
    to do if they are no labels.
    """
    read = [_number(text) for text in texts]
    numbers = [value for value in read if value is not None and math.isfinite(value)]
    words = [t for t, v in zip(texts, read, strict=True) if v is None or not math.isfinite(v)]
    if numbers and words and None not in read:
        raise ValueError(
            f"the column {column} has {len(numbers)} finite numbers and {len(words)} other labels, "
            f"such as {some(sorted(set(words)))}: correct or delete these rows"
        )
    whole = not words and all(value.is_integer() for value in numbers)
    quantity = not words and not (whole and len(set(numbers)) <= _MOST_NUMBERED_CLASSES)
    if wanted == "numbers" or (wanted == "auto" and quantity):
        if words:
            raise ValueError(
                f"labels=numbers, but the column {column} has {words[0]!r}; set labels=classes"
            )
        ends = f"numbers from {min(numbers):g} to {max(numbers):g}"
        if only_classes:
            raise ValueError(
                f"this recipe predicts classes, and the column {column} has {ends}; {advice}, or "
                "use the recipe text, which predicts numbers too"
            )
        return Labels((), numbers, f"regression, {ends} (labels=classes would make them classes)")
    # 1 and 1.0 are one class
    names = [str(int(value)) for value in numbers] if whole else list(texts)
    classes = sorted(set(names), key=int if whole else None)
    if len(classes) < 2:
        raise ValueError(
            f"every label in the column {column} is {classes[0]!r}: there is nothing to learn; "
            f"{advice}"
        )
    if wanted == "auto" and len(classes) > max(2, len(texts) / 2):
        override = "" if only_classes else ", or labels=classes if each of them is a class"
        raise ValueError(
            f"the column {column} has {len(classes)} different values in {len(texts)} rows, such "
            f"as {some(classes)}: it does not look like labels; {advice}{override}"
        )
    why = f"classification, {len(classes)} classes: {some(classes)}"
    if wanted == "auto" and whole and not only_classes:
        why += " (labels=numbers would make them a quantity)"
    place = {name: float(number) for number, name in enumerate(classes)}
    return Labels(tuple(classes), [place[name] for name in names], why)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def refuse_unseen(labels: Labels, parts: Rows, where: str) -> None:
    """Raise ValueError if a part has a class that is not trained on."""
    trained = {labels.values[row] for row in parts["train"]}
    for part, rows in parts.items():
        unseen = sorted({labels.values[row] for row in rows} - trained)
        if labels.classes and unseen:
            names = some([labels.classes[int(number)] for number in unseen])
            raise ValueError(f"{where}: {part} has labels that train lacks: {names}")
