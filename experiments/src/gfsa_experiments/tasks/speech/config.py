"""Settings of the speech recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gfsa_experiments.data.own import name_of
from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    Schedule,
    Share,
    ShareBelowOne,
    TrainConfig,
)
from gfsa_experiments.tasks.speech.data import LIBRISPEECH
from gfsa_experiments.tasks.speech.models import Encoder
from gfsa_experiments.tasks.speech.text import Tokens


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
