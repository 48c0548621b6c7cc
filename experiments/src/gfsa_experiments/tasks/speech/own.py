"""Recordings of a caller's own: a folder with a table of transcripts, or in LibriSpeech's layout.

``transcripts.tsv`` (or ``.csv``) has the columns ``path``, relative to it, and ``text``, and
``speaker`` and ``split`` if they are known. In LibriSpeech's layout a ``*.trans.txt`` has a line
for each recording beside it: its name, a space, its words. Any rate and number of channels is read:
the mean of the channels at 16 kHz. Transcripts are made upper-case.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from gfsa_experiments.data.files import BadRows
from gfsa_experiments.data.own import (
    digest_of,
    entries_of,
    find_own,
    first_lines,
    is_hidden,
    name_of,
    text_of,
)
from gfsa_experiments.data.splits import PARTS, part_named, three_parts
from gfsa_experiments.data.tables import columns_in, read_rows
from gfsa_experiments.engine.task import OwnData
from gfsa_experiments.tasks.speech.audio import header_of, read_audio
from gfsa_experiments.tasks.speech.librispeech import HOP, SAMPLE_RATE, log_mel
from gfsa_experiments.tasks.speech.utterances import Utterance, normalised

_TABLES = ("transcripts.tsv", "transcripts.csv")
_AUDIO = (".flac", ".wav", ".ogg", ".mp3")
_SHORTEST = 400
_MELS = 80
# with fewer speakers than parts they cannot be kept apart
_FEWEST_SPEAKERS = 3

Sets = dict[str, list[Utterance]]


@dataclass(frozen=True)
class _Line:
    """One line of a table or transcript."""

    where: str
    path: Path
    text: str
    speaker: str
    part: str | None


@lru_cache(maxsize=2)
def read_own(data: str, data_dir: Path, holdout: float) -> tuple[Sets, OwnData]:
    """The utterances of each part; the audio stays on the disk."""
    root = find_own(data, data_dir, "a folder with transcripts and audio")
    lines = _lines(root)
    found: list[Utterance] = []
    named: dict[str, list[int]] = {}
    bad = BadRows(root, "utterances", "utterance")
    for line in lines:
        samples, rate, reason = _length(line.path)
        if reason is None and not line.text:
            reason = "its transcript is empty"
        if reason is not None:
            bad.add(f"{line.path.name} in {line.where}", reason)
            continue
        named.setdefault(line.part or "train", []).append(len(found))
        found.append(
            Utterance(
                part="",
                name=line.path.stem,
                speaker=line.speaker,
                text=line.text,
                frames=-(-samples * SAMPLE_RATE // rate) // HOP + 1,
                features=partial(_features, line.path, _MELS),
                source=line.path.read_bytes,
            )
        )
    bad.report(len(found))
    speakers = [utterance.speaker for utterance in found]
    to_split = {speakers[row] for row in named.get("train", ())}
    known = all(speakers) and len(to_split) >= _FEWEST_SPEAKERS
    parts, split_by = three_parts(
        named, str(root), groups=speakers if known else None, holdout=holdout
    )
    if any(speakers) and not all(speakers):
        split_by += f"; speakers are not kept apart, {speakers.count('')} utterances name none"
    unused = len(_audio_in(root) - {line.path.resolve() for line in lines})
    if unused:
        split_by += f"; {unused} recordings without a transcript are not used"
    sets = {
        part: [dataclasses.replace(found[row], part=part) for row in parts[part]]
        for part in PARTS
        if part in parts
    }
    own = OwnData(
        name=name_of(data),
        source=str(root),
        splits={part: len(utterances) for part, utterances in sets.items()},
        split_by=split_by,
        unit="utterances",
        digest=digest_of(
            piece
            for part, utterances in sets.items()
            for spoken in utterances
            for piece in (part, spoken.name, spoken.speaker, spoken.text, str(spoken.frames))
        ),
    )
    return sets, own


def _audio_in(root: Path) -> set[Path]:
    return {path.resolve() for path in root.rglob("*") if path.suffix.lower() in _AUDIO}


def letters_of(sets: Sets) -> str:
    """The characters of all transcripts; the space is one of them."""
    used = {letter for utterances in sets.values() for one in utterances for letter in one.text}
    return "".join(sorted(used | {" "}))


def _lines(root: Path) -> list[_Line]:
    if root.is_file():
        raise ValueError(
            f"{root} is a file; set data= to the folder with {' or '.join(_TABLES)} and the audio"
        )
    tables = [p for p in sorted(root.rglob("transcripts.*")) if p.name in _TABLES]
    if tables:
        return [line for table in tables for line in _of_table(table, root)]
    transcripts = [p for p in sorted(root.rglob("*.trans.txt")) if not is_hidden(p, root)]
    if not transcripts:
        raise FileNotFoundError(
            f"expected {' or '.join(_TABLES)} (columns path and text) in {root}, or *.trans.txt "
            f"beside the recordings as in LibriSpeech{entries_of(root)}"
        )
    return [line for transcript in transcripts for line in _of_transcript(transcript, root)]


def _of_table(table: Path, root: Path) -> Iterator[_Line]:
    columns, begin = columns_in(table)
    if not {"path", "text"} <= set(columns):
        raise ValueError(
            f"{table}: expected the columns path and text, and speaker and split if they are "
            f"known; it has {', '.join(columns)}{begin}"
        )
    wanted = [name for name in ("path", "text", "speaker", "split") if name in columns]
    # a speaker may be unknown
    for values in read_rows(str(table), root, wanted, wanted, ("speaker",)).values:
        row = dict(zip(wanted, values, strict=True))
        part = _part_of_folders(table.parent.relative_to(root).parts)
        if "split" in row:
            part = part_named(row["split"])
            if part is None:
                raise ValueError(
                    f"{table}: expected train, valid or test in the column split, got "
                    f"{row['split']!r}{begin}"
                )
        text = " ".join(row["text"].upper().split())
        yield _Line(table.name, table.parent / row["path"], text, row.get("speaker", ""), part)


def _of_transcript(transcript: Path, root: Path) -> Iterator[_Line]:
    written = [line for line in text_of(transcript).splitlines() if line.strip()]
    for line in written:
        name, _, text = line.strip().partition(" ")
        beside = [transcript.parent / f"{name}{ending}" for ending in _AUDIO]
        path = next((path for path in beside if path.is_file()), None)
        if path is None and line == written[0]:
            raise FileNotFoundError(
                f"{transcript}: expected lines of the name of a recording, a space and its words, "
                f"but there is no {beside[0].name} (or {', '.join(_AUDIO[1:])}) beside it"
                f"{first_lines(written)}{entries_of(transcript.parent)}"
            )
        part = _part_of_folders(transcript.parent.relative_to(root).parts)
        # 19-198-0000: speaker, chapter, number
        speaker = name.split("-")[0] if "-" in name else ""
        words = " ".join(text.upper().split())
        yield _Line(transcript.name, path or beside[0], words, speaker, part)


def _part_of_folders(folders: tuple[str, ...]) -> str | None:
    """The part that a folder is named after: ``train`` for ``train-clean-100``."""
    words = (re.split(r"[-_.]", folder)[0] for folder in folders)
    return next((part for word in words if (part := part_named(word)) is not None), None)


def _length(path: Path) -> tuple[int, int, str | None]:
    """The samples and the rate of a recording by its header, and why it cannot be used."""
    info, reason = header_of(path)
    if reason is not None:
        return 0, 1, reason
    if info.frames * SAMPLE_RATE < _SHORTEST * info.samplerate:
        return 0, 1, "it is shorter than 25 ms"
    return info.frames, info.samplerate, None


def _features(path: Path, mels: int) -> Tensor:
    from torchaudio.functional import resample

    samples, rate = read_audio(path)
    wave = torch.from_numpy(samples).mean(1)
    if rate != SAMPLE_RATE:
        wave = resample(wave, rate, SAMPLE_RATE)
    return normalised(log_mel(wave, mels))
