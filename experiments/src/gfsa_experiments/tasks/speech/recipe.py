"""Speech recognition: Transformer and Branchformer with joint CTC/attention training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.data.own import name_of
from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    Schedule,
    Share,
    ShareBelowOne,
    TrainConfig,
)
from gfsa_experiments.engine.task import Recipe, Task
from gfsa_experiments.tasks.speech.data import (
    LETTERS,
    LIBRISPEECH,
    SpeechBatches,
    Utterance,
    hold_out,
    letters_of,
    read_an4,
    read_librispeech,
    read_own,
)
from gfsa_experiments.tasks.speech.models import SUBSAMPLING, Encoder, Recognition, TorchRecogniser
from gfsa_experiments.tasks.speech.text import (
    BEGIN,
    BLANK,
    END,
    Tokens,
    Vocabulary,
    learn_vocabulary,
)


def warp_time(features: Tensor, frames: Tensor, most: int) -> Tensor:
    """Shift one moment of each utterance by up to ``most`` frames; both ends stay in place.

    A moment c is drawn from the utterance and w from [−most, most]; the part before c is stretched
    to c + w frames, the rest to the remaining ones. Linear interpolation, on the device.

    Args:
        features: ``(B, T, F)``.
        frames: ``(B,)``, the numbers of real frames.
        most: the shift is smaller in utterances shorter than three times this.
    """
    B, T, _ = features.shape
    last = (frames[:, None] - 1).to(features.dtype)
    room = (last / 3).clamp_max(most)
    draws = torch.rand(2, B, 1, device=features.device, dtype=features.dtype)
    moment = room + draws[0] * (last - 2 * room)
    moved = moment + (2 * draws[1] - 1) * room
    time = torch.arange(T, device=features.device, dtype=features.dtype).expand(B, T)
    before = time * moment / moved.clamp_min(1e-3)
    after = last - (last - time) * (last - moment) / (last - moved).clamp_min(1e-3)
    source = torch.where(time < moved, before, after)
    # padding stays in place
    source = torch.where(time <= last, source, time).clamp(0, T - 1)
    left = source.floor().long()
    right = (left + 1).clamp_max(T - 1)
    share = (source - left)[:, :, None]
    index = left[:, :, None].expand_as(features), right[:, :, None].expand_as(features)
    return features.gather(1, index[0]).lerp(features.gather(1, index[1]), share)


@lru_cache(maxsize=4)
def masks(time_masks: int, time_width: int, feature_masks: int, feature_width: int) -> Any:
    """torchaudio's SpecAugment: independent masks for each utterance, filled with the mean."""
    from torchaudio.transforms import SpecAugment

    return SpecAugment(
        time_masks, time_width, feature_masks, feature_width,
        iid_masks=True,
        # the largest share that a mask covers
        p=0.5,
        # the features have mean 0
        zero_masking=True,
    )  # fmt: skip


_Prefix = tuple[int, ...]
_Scores = tuple[float, float]

# tokens per frame that the beam search considers
_CANDIDATES = 8


def best_path(logits: Tensor, lengths: Tensor) -> list[list[int]]:
    """The most likely token of each frame, without repetitions and blanks."""
    path = logits.argmax(-1)
    new = torch.ones_like(path, dtype=torch.bool)
    new[:, 1:] = path[:, 1:] != path[:, :-1]
    spoken = torch.arange(path.shape[1], device=path.device) < lengths[:, None]
    kept = (new & spoken & (path != BLANK)).cpu()
    return [row[keep].tolist() for row, keep in zip(path.cpu(), kept, strict=True)]


def prefix_search(logits: Tensor, lengths: Tensor, beam: int) -> list[list[int]]:
    """The most likely text of each utterance, summed over all paths of that text."""
    log_probs = logits.float().log_softmax(-1).cpu()
    ends = lengths.tolist()
    return [_search(rows[:end], beam) for rows, end in zip(log_probs, ends, strict=True)]


def _search(log_probs: Tensor, beam: int) -> list[int]:
    """Keep the ``beam`` best prefixes from frame to frame (Graves, 2012; Hannun, 2014).

    Each has two log-probabilities, for paths that end in a blank and for paths that end in its last
    token: a repeated token counts as a new one only after a blank.
    """
    scores, candidates = log_probs.topk(min(_CANDIDATES, log_probs.shape[1]), dim=1)
    best = [
        list(zip(*pair, strict=True))
        for pair in zip(scores.tolist(), candidates.tolist(), strict=True)
    ]
    prefixes: dict[_Prefix, _Scores] = {(): (0.0, -math.inf)}
    for row, frame in zip(log_probs.tolist(), best, strict=True):
        grown: dict[_Prefix, _Scores] = {}
        for prefix, (in_blank, in_token) in prefixes.items():
            either = _log_add(in_blank, in_token)
            repeated = in_token + row[prefix[-1]] if prefix else -math.inf
            _add(grown, prefix, either + row[BLANK], repeated)
            for score, token in frame:
                if token != BLANK:
                    before = in_blank if prefix and token == prefix[-1] else either
                    _add(grown, (*prefix, token), -math.inf, before + score)
        ranked = sorted(grown, key=lambda prefix: -_log_add(*grown[prefix]))
        prefixes = {prefix: grown[prefix] for prefix in ranked[:beam]}
    return list(next(iter(prefixes)))


def _add(scores: dict[_Prefix, _Scores], prefix: _Prefix, in_blank: float, in_token: float) -> None:
    old_blank, old_token = scores.get(prefix, (-math.inf, -math.inf))
    scores[prefix] = _log_add(old_blank, in_blank), _log_add(old_token, in_token)


def _log_add(a: float, b: float) -> float:
    high, low = (a, b) if a > b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


@dataclass(frozen=True, kw_only=True)
class SpeechConfig(TrainConfig):
    """The paper's Transformer on LibriSpeech 100h; ``encoder=branchformer`` for the other."""

    epochs: float = 100
    batch_size: int = 32
    lr: float = 8e-4
    weight_decay: float = 0.01
    beta2: float = 0.98
    schedule: Schedule = "linear"
    warmup: float = 0.25
    clip: float = 5.0
    group_by_length: bool = True

    data: str = ""
    """Recordings of the caller's own instead of ``dataset``: a folder with transcripts.tsv (or
    .csv), or in LibriSpeech's layout."""
    dataset: Literal["librispeech", "an4"] = "librispeech"
    train_sets: tuple[str, ...] = ("train-clean-100",)
    """Of LibriSpeech, as the next two; AN4 has sets of its own."""
    valid_sets: tuple[str, ...] = ("dev-clean",)
    test_sets: tuple[str, ...] = ("test-clean", "test-other")
    """Tables show the first; the others are reported in addition."""
    holdout: ShareBelowOne = 0.1
    """Share of AN4's training utterances, or of those in ``data``, held out for validation, by
    speaker where speakers are known."""
    tokens: Tokens = "unigram"
    vocabulary: Count = 5000
    """The number of word pieces to learn, unless tokens=char."""

    library: Literal["speechbrain", "torch"] = "speechbrain"
    """SpeechBrain's model with a decoder, or one built from torch.nn with CTC alone."""
    encoder: Encoder = "transformer"
    depth: CountOrZero = 0
    """0: the paper's, 12 for the Transformer and 18 for the Branchformer."""
    width: Count = 512
    heads: CountOrZero = 0
    """0: the paper's, 4 and 8."""
    hidden: CountOrZero = 0
    """Width of the encoder's MLPs (gated in the Branchformer); 0: the paper's, 2048 and 3072."""
    kernel: Count = 31
    """Kernel size of the Branchformer's convolutions, in frames."""
    norm_first: bool = False
    """LayerNorm before the Transformer's attention and MLPs instead of after them."""
    decoder_layers: CountOrZero = 6
    """0: CTC alone."""
    decoder_hidden: Count = 2048
    """Width of the decoder's MLPs with a Branchformer; a Transformer has ``hidden`` for both."""
    dropout: ShareBelowOne = 0.1

    ctc_weight: Share = 0.3
    label_smoothing: ShareBelowOne = 0.1
    """Of the decoder's loss."""
    warp: CountOrZero = 5
    """SpecAugment: the largest time shift in frames; 0 for none."""
    time_masks: CountOrZero = 5
    time_width: CountOrZero = 25
    feature_masks: CountOrZero = 2
    feature_width: CountOrZero = 35

    decode: Literal["greedy", "beam"] = "beam"
    """How the test split is decoded; validation is always greedy, by CTC."""
    beam: Count = 66
    search_ctc_weight: Share = 0.4
    """CTC's share in the joint beam search."""
    pad_to_multiple: Count = 64
    """Frames of a batch are a multiple of this."""
    pad_tokens_to_multiple: Count = 32

    def check(self) -> None:
        super().check()
        for name in ("train_sets", "test_sets"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one set of LibriSpeech")
        self._check_sets()
        if self.graphs:
            raise ValueError("CTC's loss reads lengths on the host: leave graphs=false")
        if self.width % self.head_count or self.width % 2:
            raise ValueError(
                f"width must be even and divisible by heads, got {self.width} and {self.head_count}"
            )
        if self.encoder == "branchformer" and (self.hidden_size % 2 or self.kernel % 2 == 0):
            raise ValueError(
                "the Branchformer needs an even hidden and an odd kernel, "
                f"got {self.hidden_size} and {self.kernel}"
            )
        if self.library == "torch" and self.decoder_layers:
            raise ValueError(
                "library=torch has CTC alone: set decoder_layers=0 and ctc_weight=1, "
                "or library=speechbrain"
            )
        if (self.decoder_layers == 0) != (self.ctc_weight == 1):
            raise ValueError(
                "CTC alone is decoder_layers=0 and ctc_weight=1, both or neither; got "
                f"decoder_layers={self.decoder_layers} and ctc_weight={self.ctc_weight}"
            )

    def _check_sets(self) -> None:
        """Raise ValueError if a set is unknown or serves two purposes."""
        uses: dict[str, list[str]] = {}
        for role in ("train_sets", "valid_sets", "test_sets"):
            for name in getattr(self, role):
                uses.setdefault(name, []).append(role)
        for name, roles in uses.items():
            if name not in LIBRISPEECH:
                raise ValueError(
                    f"{roles[0]} takes sets of LibriSpeech, {', '.join(LIBRISPEECH)}; got {name!r}"
                )
            if len(roles) > 1:
                raise ValueError(
                    f"the set {name} is named {len(roles)} times, in {' and in '.join(roles)}; "
                    "what is trained on, chosen on and reported must be different sets"
                )

    def unused(self) -> dict[str, str]:
        return super().unused() | self._unused_of_data() | self._unused_of_model()

    def _unused_of_data(self) -> dict[str, str]:
        unused: dict[str, str] = {}
        if self.data:
            own = "data= names the recordings"
            unused |= dict.fromkeys(("dataset", "train_sets", "valid_sets", "test_sets"), own)
        elif self.dataset == "an4":
            own = "AN4 has sets of its own; dataset=librispeech has these"
            unused |= dict.fromkeys(("train_sets", "valid_sets", "test_sets"), own)
        else:
            unused["holdout"] = "LibriSpeech has valid_sets; dataset=an4 holds some out"
        if self.tokens == "char":
            unused["vocabulary"] = "tokens=char are the letters; unigram and bpe are learned"
        for kind in ("time", "feature"):
            if not getattr(self, f"{kind}_masks"):
                unused[f"{kind}_width"] = f"{kind}_masks=0 masks nothing"
        return unused

    def _unused_of_model(self) -> dict[str, str]:
        # norm_first changes nothing in a Branchformer of library=torch either, but rows of
        # results/speech.csv have it: leaving it out would be another experiment to the tables
        unused: dict[str, str] = {}
        if self.encoder == "transformer":
            unused["kernel"] = "encoder=branchformer alone has convolutions"
            unused["decoder_hidden"] = "encoder=transformer has one hidden for both; set hidden"
        if self.decode == "greedy":
            unused |= dict.fromkeys(("beam", "search_ctc_weight"), "decode=beam alone searches")
        if not self.decoder_layers:
            alone = "decoder_layers=0 is CTC alone, without a decoder"
            unused |= dict.fromkeys(
                ("decoder_hidden", "label_smoothing", "search_ctc_weight"), alone
            )
        return unused

    @property
    def encoder_layers(self) -> int:
        return self.depth or (12 if self.encoder == "transformer" else 18)

    @property
    def head_count(self) -> int:
        return self.heads or (4 if self.encoder == "transformer" else 8)

    @property
    def hidden_size(self) -> int:
        return self.hidden or (2048 if self.encoder == "transformer" else 3072)

    def label(self) -> str:
        data = f"data={name_of(self.data)}" if self.data else self.dataset
        return f"{data} {self.encoder}-d{self.encoder_layers}"


class SpeechTask(Task):
    """Transcribes features; measured by the word error rate."""

    metric = "wer"
    higher_is_better = False

    def __init__(
        self,
        config: SpeechConfig,
        model: nn.Module,
        vocabulary: Vocabulary,
        batches: dict[str, SpeechBatches],
    ) -> None:
        self.config = config
        self.model = model
        self.vocabulary = vocabulary
        self.splits = {name: of_split.split() for name, of_split in batches.items()}

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """SpecAugment."""
        config = self.config
        features = batch["features"]
        if config.warp:
            features = warp_time(features, batch["frames"], config.warp)
        augment = masks(
            config.time_masks, config.time_width, config.feature_masks, config.feature_width
        )
        features = augment(features.transpose(1, 2)).transpose(1, 2)
        return {**batch, "features": features}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        r"""``λ·CTC + (1 − λ)·cross-entropy``, each summed over an utterance."""
        tokens, lengths = batch["tokens"], batch["lengths"]
        previous = F.pad(tokens, (1, 0), value=BEGIN) if self.config.decoder_layers else None
        output: Recognition = model(batch["features"], batch["frames"], previous)
        ctc = self._ctc(output, tokens, lengths).mean()
        if output.attention is None:
            return ctc
        target = F.pad(tokens, (0, 1), value=BLANK).scatter(1, lengths[:, None], END)
        attention = F.cross_entropy(
            output.attention.float().flatten(0, 1),
            target.flatten(),
            ignore_index=BLANK,
            label_smoothing=self.config.label_smoothing,
            reduction="sum",
        ) / len(tokens)
        weight = self.config.ctc_weight
        return weight * ctc + (1 - weight) * attention

    def _ctc(self, output: Recognition, tokens: Tensor, lengths: Tensor) -> Tensor:
        log_probs = output.ctc.float().log_softmax(-1)
        return F.ctc_loss(
            log_probs.transpose(0, 1),
            tokens,
            output.lengths,
            lengths,
            blank=BLANK,
            reduction="none",
            zero_infinity=True,
        )

    def predict(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        output: Recognition = model(batch["features"], batch["frames"])
        found = {"greedy": best_path(output.ctc, output.lengths)}
        if batch["search"]:
            found["beam"] = self._search(model, output)
        texts = {
            way: [self.vocabulary.decode(tokens) for tokens in rows] for way, rows in found.items()
        }
        return {"text": batch["text"], "part": batch["part"], **texts}

    def _search(self, model: nn.Module, output: Recognition) -> list[list[int]]:
        config = self.config
        if config.decoder_layers == 0:
            return prefix_search(output.ctc, output.lengths, config.beam)
        from gfsa_experiments.tasks.speech.speechbrain import SpeechBrainRecogniser, joint_search

        for wrapped in ("module", "_orig_mod"):
            model = getattr(model, wrapped, model)
        assert isinstance(model, SpeechBrainRecogniser)
        return joint_search(model, output, config.beam, config.search_ctc_weight)

    def score(self, predictions: list[dict[str, Any]]) -> dict[str, float]:
        """In percent: ``wer`` and ``cer`` of the first set, and ``wer_<set>`` of any others.

        After a beam search these are its rates, and ``wer_greedy`` is that of the best path.
        """
        from torchmetrics.functional.text import char_error_rate, word_error_rate

        way = "beam" if "beam" in predictions[0] else "greedy"
        texts, parts, decoded, greedy = (
            [entry for prediction in predictions for entry in prediction[key]]
            for key in ("text", "part", way, "greedy")
        )
        scores: dict[str, float] = {}
        for name in dict.fromkeys(parts):
            chosen = [i for i, part in enumerate(parts) if part == name]
            real = [texts[i] for i in chosen]
            written = [decoded[i] for i in chosen]
            rate = 100 * float(word_error_rate(written, real))
            if scores:
                scores[f"wer_{name}"] = rate
                continue
            scores = {"wer": rate, "cer": 100 * float(char_error_rate(written, real))}
            if way == "beam":
                best = [greedy[i] for i in chosen]
                scores["wer_greedy"] = 100 * float(word_error_rate(best, real))
        return scores

    def example(self) -> dict[str, Tensor]:
        """A few validation utterances (test utterances, if there are none)."""
        batch = self.first_examples(8)
        inputs = {name: batch[name] for name in ("features", "frames")}
        if self.config.decoder_layers:
            inputs["tokens"] = F.pad(batch["tokens"], (1, 0), value=BEGIN)
        return inputs

    def identity(self, split: str, index: int) -> Any:
        """The recording and transcript; features and tokens are computed on each machine."""
        return self.splits[split].dataset.source(index)  # type: ignore[attr-defined]


def build(config: SpeechConfig, data_dir: Path) -> SpeechTask:
    """Read the data and build the model."""
    own = None
    if config.data:
        sets, own = read_own(config.data, Path(data_dir).absolute(), config.holdout)
    else:
        sets = _read(config, data_dir)
    texts = tuple(utterance.text for utterance in sets["train"])
    letters = LETTERS if own is None else letters_of(sets)
    vocabulary = learn_vocabulary(texts, config.tokens, config.vocabulary, letters)
    batches = {
        name: SpeechBatches(
            utterances,
            vocabulary.encode,
            config.pad_to_multiple,
            config.pad_tokens_to_multiple,
            search=name == "test" and config.decode == "beam",
        )
        for name, utterances in sets.items()
    }
    batches["train"].warn_of_unalignable(SUBSAMPLING)
    model = _model(config, sets["train"][0].features().shape[1], len(vocabulary))
    task = SpeechTask(config, model, vocabulary, batches)
    task.own_data = own
    return task


def _read(config: SpeechConfig, data_dir: Path) -> dict[str, list[Utterance]]:
    if config.dataset == "librispeech":
        sets = {
            "train": config.train_sets, "valid": config.valid_sets, "test": config.test_sets
        }  # fmt: skip
        return {
            split: [one for name in names for one in read_librispeech(data_dir, name)]
            for split, names in sets.items()
            if names
        }
    train, test = read_an4(data_dir)
    if not config.holdout:
        return {"train": train, "test": test}
    train, valid = hold_out(train, config.holdout)
    return {"train": train, "valid": valid, "test": test}


def _model(config: SpeechConfig, features: int, vocabulary: int) -> nn.Module:
    common: dict[str, Any] = {
        "features": features,
        "vocabulary": vocabulary,
        "encoder": config.encoder,
        "width": config.width,
        "heads": config.head_count,
        "layers": config.encoder_layers,
        "hidden": config.hidden_size,
        "kernel": config.kernel,
        "dropout": config.dropout,
        "norm_first": config.norm_first,
    }
    if config.library == "torch":
        return TorchRecogniser(**common)
    from gfsa_experiments.tasks.speech.speechbrain import SpeechBrainRecogniser

    return SpeechBrainRecogniser(
        **common, decoder_layers=config.decoder_layers, decoder_hidden=config.decoder_hidden
    )


RECIPE = Recipe(
    name="speech",
    title="Speech recognition: LibriSpeech or AN4, Transformer or Branchformer",
    config=SpeechConfig,
    build=build,
    extra="speech",
)
