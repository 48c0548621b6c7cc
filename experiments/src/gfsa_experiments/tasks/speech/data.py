"""Utterances with their transcripts: AN4, or recordings of a caller's own, LibriSpeech's too.

A folder of recordings has ``transcripts.tsv`` (or ``.csv``) with the columns ``path``, relative to
it, and ``text``, and ``speaker`` and ``split`` if they are known; or LibriSpeech's layout, in which
a ``*.trans.txt`` has a line for each recording beside it: its name, a space, its words. Any rate
and number of channels is read: the mean of the channels at 16 kHz. Transcripts are made upper-case.
Features are 80 log-Mel energies of 25 ms every 10 ms, computed when an utterance is read.
"""

from __future__ import annotations

import dataclasses
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from gfsa_experiments.data import own
from gfsa_experiments.data.files import Bad, check_count, read_npz, report_bad, source_of
from gfsa_experiments.data.tables import open_table, usable_rows
from gfsa_experiments.engine.task import OwnData, Split, as_it_is

AN4 = "an4"
LETTERS = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The characters of the transcripts of AN4 and LibriSpeech."""
SAMPLE_RATE, HOP, _WINDOW, _MELS = 16_000, 160, 400, 80
_TABLES = ("transcripts.tsv", "transcripts.csv")
_AUDIO = (".flac", ".wav", ".ogg", ".mp3")
# with fewer speakers than parts they cannot be kept apart
_FEWEST_SPEAKERS = 3


@dataclass(frozen=True)
class Utterance:
    """A spoken sentence with its transcript."""

    part: str
    """The set it belongs to, for example ``train-clean-100``; empty if nothing says it."""
    name: str
    speaker: str
    text: str
    """Upper-case words separated by single spaces."""
    frames: int
    features: Callable[[], Tensor]
    """Returns ``(frames, size)``, with mean 0 and variance 1; can be pickled, for workers."""
    source: Callable[[], bytes]
    """Returns what the features were computed from, or a hash of it."""


Sets = dict[str, list[Utterance]]


def normalised(features: Tensor) -> Tensor:
    """``(frames, size)`` with mean 0 and variance 1 over the frames of this utterance."""
    return (features - features.mean(0)) / features.std(0, correction=0).clamp_min(1e-5)


@lru_cache(maxsize=2)
def read_speech(data: str, data_dir: Path, holdout: float) -> tuple[Sets, OwnData | None]:
    """The utterances of each part of AN4 or of a folder; ``valid`` are speakers of ``train``."""
    if data == AN4:
        path = source_of(AN4).find(data_dir, "an4_mfcc.npz")
        found = [*_an4_part(path, "train"), *_an4_part(path, "test")]
        unused = 0
    else:
        path = own.find(data, data_dir, "a folder with transcripts and audio")
        found, unused = _recordings(path)
    named: dict[str, list[int]] = {}
    for row, utterance in enumerate(found):
        named.setdefault(_part_in(utterance.part) or "train", []).append(row)
    speakers = [utterance.speaker for utterance in found]
    to_split = {speakers[row] for row in named.get("train", ())}
    groups = speakers if all(speakers) and len(to_split) >= _FEWEST_SPEAKERS else None
    parts, split_by = own.three_parts(named, str(path), groups=groups, holdout=holdout)
    if any(speakers) and not all(speakers):
        split_by += f"; speakers are not kept apart, {speakers.count('')} utterances name none"
    if unused:
        split_by += f"; {unused} recordings without a transcript are not used"
    sets = {
        part: [dataclasses.replace(found[row], part=found[row].part or part) for row in rows]
        for part, rows in parts.items()
    }
    if data == AN4:
        return sets, None
    pieces = (
        piece
        for part, utterances in sets.items()
        for one in utterances
        for piece in (part, one.name, one.speaker, one.text, str(one.frames))
    )
    return sets, own.facts(data, str(path), sets, split_by, pieces, unit="utterances")


def _an4_part(path: Path, part: str) -> list[Utterance]:
    """CMU AN4's utterances as 13 cepstra per frame.

    The file holds for ``train`` and ``test`` the concatenated frames ``feat_*``, the counts
    ``n_frame_*``, ``text_*`` and ``utt_*``.
    """
    names = [f"{kind}_{part}" for kind in ("feat", "n_frame", "text", "utt")]
    features, frames, texts, ids = read_npz(path, names).values()
    frames = frames.astype(np.int64)
    if len(features) != frames.sum() or not len(frames) == len(texts) == len(ids):
        raise ValueError(
            f"{path} is damaged: {len(features)} frames and {len(texts)} texts of {len(frames)} "
            f"utterances with {frames.sum()} frames; get it again"
        )
    bad: Bad = []
    found = []
    spoken = np.split(features, np.cumsum(frames)[:-1])
    for name, text, of_one in zip(map(str, ids), map(str, texts), spoken, strict=True):
        if not text.strip() or set(text) - set(LETTERS):
            bad.append((name, f"expected A–Z, apostrophe and space, got {text!r}"))
        elif not len(of_one) or not np.isfinite(of_one).all():
            bad.append((name, "it has no frames, or features that are not finite"))
        else:
            # an251-fash-b: number, speaker, microphone
            speaker = name.split("-")[-2] if "-" in name else name
            tensor = normalised(torch.from_numpy(of_one).float())
            source = partial(as_it_is, sha256(of_one.tobytes()).digest())
            given = len(of_one), partial(as_it_is, tensor), source
            found.append(Utterance(part, name, speaker, " ".join(text.split()), *given))
    report_bad(bad, len(found), f"{path}, {part}", "utterances", "utterance")
    check_count(
        f"AN4 {part}", len(texts), source_of(AN4).sizes[own.PARTS.index(part)], "utterances"
    )
    return found


Line = tuple[Path, str, str, str]
"""A recording, its transcript, its speaker and its part."""


def _recordings(root: Path) -> tuple[list[Utterance], int]:
    """The recordings that can be used, and how many have no transcript; audio stays on the disk."""
    import soundfile

    lines = _lines(root)
    bad: Bad = []
    found = []
    for path, text, speaker, part in lines:
        try:
            info = soundfile.info(str(path))
        except (soundfile.LibsndfileError, OSError) as error:
            bad.append((path.name, f"it has no readable audio ({error})"))
            continue
        words = " ".join(text.upper().split())
        if info.frames * SAMPLE_RATE < _WINDOW * info.samplerate or not words:
            bad.append((path.name, "it is shorter than 25 ms, or has no transcript"))
            continue
        frames = -(-info.frames * SAMPLE_RATE // info.samplerate) // HOP + 1
        read = partial(_features, path), path.read_bytes
        found.append(Utterance(part, path.stem, speaker, words, frames, *read))
    report_bad(bad, len(found), root, "utterances", "utterance")
    audio = {path.resolve() for path in root.rglob("*") if path.suffix.lower() in _AUDIO}
    return found, len(audio - {path.resolve() for path, *_ in lines})


def _features(path: Path) -> Tensor:
    import soundfile
    from torchaudio.functional import resample

    # torchaudio.load needs torchcodec since 2.9
    samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    wave = torch.from_numpy(samples).mean(1)
    if not wave.isfinite().all():
        raise ValueError(f"{path} has samples that are NaN or infinite; replace or delete it")
    if rate != SAMPLE_RATE:
        wave = resample(wave, rate, SAMPLE_RATE)
    return normalised(_mel_filters()(wave).clamp_min(1e-10).log().T)


@lru_cache(maxsize=1)
def _mel_filters() -> Any:
    from torchaudio.transforms import MelSpectrogram

    return MelSpectrogram(SAMPLE_RATE, n_fft=_WINDOW, hop_length=HOP, n_mels=_MELS)


def _lines(root: Path) -> list[Line]:
    tables = [p for p in sorted(root.rglob("transcripts.*")) if p.name in _TABLES]
    transcripts = [p for p in own.files_in(root) if p.name.endswith(".trans.txt")]
    if not tables and not transcripts:
        raise FileNotFoundError(
            f"expected {' or '.join(_TABLES)} (columns path and text) in the folder {root}, or "
            f"*.trans.txt beside the recordings as in LibriSpeech{own.entries_of(root)}"
        )
    read, places = (_of_table, tables) if tables else (_of_transcript, transcripts)
    return [line for place in places for line in read(place, root)]


def _of_table(table: Path, root: Path) -> Iterator[Line]:
    found = open_table(table)
    wanted = ["path", "text", *({"speaker", "split"} & {*found.columns})]
    # a speaker may be unknown
    for values in usable_rows(table, found, wanted, wanted, "speaker"):
        row = dict(zip(wanted, values, strict=True))
        part = row.get("split", _part_of_folders(table.parent.relative_to(root)))
        if "split" in row and own.part_named(part) is None:
            raise ValueError(
                f"{table}: expected train, valid or test in the column split, got {part!r}"
            )
        yield table.parent / row["path"], row["text"], row.get("speaker", ""), part


def _of_transcript(transcript: Path, root: Path) -> Iterator[Line]:
    part = _part_of_folders(transcript.parent.relative_to(root))
    for line in filter(str.strip, own.text_of(transcript).splitlines()):
        name, _, text = line.strip().partition(" ")
        beside = [transcript.parent / f"{name}{ending}" for ending in _AUDIO]
        path = next((path for path in beside if path.is_file()), beside[0])
        # 19-198-0000: speaker, chapter, number
        yield path, text, name.split("-")[0] if "-" in name else "", part


def _part_in(name: str) -> str | None:
    """``train`` for ``train-clean-100``."""
    return own.part_named(re.split(r"[-_.]", name)[0])


def _part_of_folders(place: Path) -> str:
    """The folder that is named after a part, such as ``train-clean-100``."""
    return next(filter(_part_in, place.parts), "")


def letters_of(sets: Sets) -> str:
    """The characters of all transcripts; the space is one of them."""
    used = {letter for utterances in sets.values() for one in utterances for letter in one.text}
    return "".join(sorted(used | {" "}))


@dataclass(eq=False)
class SpeechBatches(Dataset[dict[str, Any]]):
    """Batches of ``features (B, T, F)``, ``frames (B,)``, ``tokens (B, L)`` and ``lengths (B,)``.

    T and L are multiples of two numbers, so that few shapes occur; padding is zeros. ``text`` are
    the transcripts, ``part`` is the name of the set of each utterance, and ``search`` says whether
    to decode with a beam.
    """

    utterances: Sequence[Utterance]
    encode: InitVar[Callable[[str], list[int]]]
    """Returns the tokens of a transcript."""
    frames_multiple: int
    tokens_multiple: int
    search: bool = False

    def __post_init__(self, encode: Callable[[str], list[int]]) -> None:
        self._tokens = [torch.tensor(encode(utterance.text)) for utterance in self.utterances]

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        chosen = [self.utterances[index] for index in indices]
        tokens = [self._tokens[index] for index in indices]
        return {
            "features": _padded(
                [utterance.features() for utterance in chosen], self.frames_multiple
            ),
            "frames": torch.tensor([utterance.frames for utterance in chosen]),
            "tokens": _padded(tokens, self.tokens_multiple),
            "lengths": torch.tensor([len(row) for row in tokens]),
            "text": [utterance.text for utterance in chosen],
            "part": [utterance.part for utterance in chosen],
            "search": self.search,
        }

    def source(self, index: int) -> Any:
        """Set, name, transcript and length of an utterance, and the source of its features."""
        utterance = self.utterances[index]
        return utterance.part, utterance.name, utterance.text, utterance.frames, utterance.source()

    def split(self) -> Split:
        return Split(self, as_it_is, [utterance.frames for utterance in self.utterances])

    def warn_of_unalignable(self, subsampling: int) -> None:
        """CTC needs a frame for each token and another one between two equal tokens."""
        frames = [-(-utterance.frames // subsampling) for utterance in self.utterances]
        needed = [len(row) + int((row[1:] == row[:-1]).sum()) for row in self._tokens]
        short = sum(n > f for n, f in zip(needed, frames, strict=True))
        if short:
            warnings.warn(
                f"{short} of {len(self)} utterances have fewer than one frame in {subsampling} for "
                "each token: CTC learns nothing from them",
                stacklevel=3,
            )


def _padded(sequences: list[Tensor], multiple: int) -> Tensor:
    """``(B, N, …)``, zeros at the end, N the length of the longest, rounded up to a multiple."""
    padded = pad_sequence(sequences, batch_first=True)
    beside = (0, 0) * (padded.dim() - 2)
    return F.pad(padded, (*beside, 0, -padded.shape[1] % multiple))


BLANK, BEGIN, END = 0, 1, 2
_SPECIAL = 3

Tokens = Literal["char", "unigram", "bpe"]


@dataclass(frozen=True)
class Vocabulary:
    """Texts as tokens; the special ones, below 3, belong to no text."""

    size: int
    """The number of tokens, special ones included."""
    encode: Callable[[str], list[int]]
    join: Callable[[list[int]], str]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self.join([int(token) for token in tokens if token >= _SPECIAL])


def characters(letters: str = LETTERS) -> Vocabulary:
    """Each of these characters is a token."""
    token = {letter: _SPECIAL + i for i, letter in enumerate(letters)}

    def join(tokens: list[int]) -> str:
        return " ".join("".join(letters[token - _SPECIAL] for token in tokens).split())

    return Vocabulary(_SPECIAL + len(letters), lambda text: [token[c] for c in text], join)


def pieces(texts: Sequence[str], kind: Literal["unigram", "bpe"], size: int) -> Vocabulary:
    """Parts of words as tokens, learned from the training transcripts by SentencePiece."""
    import sentencepiece

    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=written,
            model_type=kind,
            vocab_size=size,
            character_coverage=1.0,
            pad_id=BLANK,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=_SPECIAL,
            # several threads may break ties differently
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"SentencePiece could not learn {size} {kind} pieces from {len(texts)} "
            f"transcripts; set vocabulary lower, or tokens=char ({error})"
        ) from error
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return Vocabulary(int(model.get_piece_size()), model.encode, model.decode)


@lru_cache(maxsize=2)
def learn_vocabulary(
    texts: tuple[str, ...], tokens: Tokens, size: int, letters: str = LETTERS
) -> Vocabulary:
    """The vocabulary for these transcripts, which consist of ``letters``."""
    return characters(letters) if tokens == "char" else pieces(texts, tokens, size)
