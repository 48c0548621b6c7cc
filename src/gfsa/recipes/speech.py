"""Speech recognition: Transformer and Branchformer with joint CTC/attention training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.recipes import speech_ctc
from gfsa.recipes.config import Schedule, TrainConfig
from gfsa.recipes.data import an4, librispeech
from gfsa.recipes.speech_augment import masks, warp_time
from gfsa.recipes.speech_data import SpeechBatches, Utterances, hold_out
from gfsa.recipes.speech_decode import best_path, prefix_search
from gfsa.recipes.speech_models import SUBSAMPLING, Encoder, Recognition, TorchRecogniser
from gfsa.recipes.speech_text import BEGIN, BLANK, END, Tokens, Vocabulary, learn_vocabulary
from gfsa.recipes.task import Recipe, Task


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

    dataset: Literal["librispeech", "an4"] = "librispeech"
    train_sets: tuple[str, ...] = ("train-clean-100",)
    """Of LibriSpeech, as the next two; AN4 has sets of its own."""
    valid_sets: tuple[str, ...] = ("dev-clean",)
    test_sets: tuple[str, ...] = ("test-clean", "test-other")
    """The first is the one in the table, the others are reported beside it."""
    holdout: float = 0.1
    """Share of AN4's training utterances that is held out for validation, by speaker."""
    tokens: Tokens = "unigram"
    vocabulary: int = 5000
    """How many pieces of words to learn, unless tokens=char."""

    library: Literal["speechbrain", "torch"] = "speechbrain"
    """Whose model: SpeechBrain's with a decoder, or parts of torch.nn with CTC alone."""
    encoder: Encoder = "transformer"
    depth: int = 0
    """0: the paper's, 12 for the Transformer and 18 for the Branchformer."""
    width: int = 512
    heads: int = 0
    """0: the paper's, 4 and 8."""
    hidden: int = 0
    """Of the encoder's MLPs, the gated ones of the Branchformer; 0: the paper's, 2048 and 3072."""
    kernel: int = 31
    """Frames that the Branchformer's convolutions see."""
    norm_first: bool = False
    """LayerNorm before the Transformer's attention and MLPs instead of after them."""
    decoder_layers: int = 6
    """0: CTC alone."""
    decoder_hidden: int = 2048
    dropout: float = 0.1

    ctc_weight: float = 0.3
    label_smoothing: float = 0.1
    """Of the decoder's loss."""
    warp: int = 5
    """SpecAugment: frames by which a moment may move; 0 for none."""
    time_masks: int = 5
    time_width: int = 25
    feature_masks: int = 2
    feature_width: int = 35

    decode: Literal["greedy", "beam"] = "beam"
    """Of the test split; validation is always greedy by CTC."""
    beam: int = 66
    search_ctc_weight: float = 0.4
    """CTC's share in the joint beam search."""
    pad_to_multiple: int = 64
    """Frames of a batch are a multiple of this."""
    pad_tokens_to_multiple: int = 32

    def check(self) -> None:
        super().check()
        counts = ("width", "vocabulary", "beam", "pad_to_multiple", "pad_tokens_to_multiple")
        for name in (*counts, "kernel", "decoder_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        masked = ("warp", "time_masks", "time_width", "feature_masks", "feature_width")
        for name in (*masked, "depth", "heads", "hidden", "decoder_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("holdout", "dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("ctc_weight", "search_ctc_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for name in ("train_sets", "test_sets"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one set of LibriSpeech")
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
        return f"{self.dataset} {self.encoder}-d{self.encoder_layers}"


class SpeechTask(Task):
    """Hear features, write words; measured by the word error rate."""

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
        self.splits = {name: one.split() for name, one in batches.items()}

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
        heard = F.pad(tokens, (1, 0), value=BEGIN) if self.config.decoder_layers else None
        said: Recognition = model(batch["features"], batch["frames"], heard)
        ctc = self._ctc(said, tokens, lengths).mean()
        if said.attention is None:
            return ctc
        wanted = F.pad(tokens, (0, 1), value=BLANK).scatter(1, lengths[:, None], END)
        attention = F.cross_entropy(
            said.attention.float().flatten(0, 1),
            wanted.flatten(),
            ignore_index=BLANK,
            label_smoothing=self.config.label_smoothing,
            reduction="sum",
        ) / len(tokens)
        weight = self.config.ctc_weight
        return weight * ctc + (1 - weight) * attention

    def _ctc(self, said: Recognition, tokens: Tensor, lengths: Tensor) -> Tensor:
        log_probs = said.ctc.float().log_softmax(-1)
        if self.config.graphs or self.config.deterministic:
            return speech_ctc.ctc_loss(log_probs, tokens, said.lengths, lengths)
        return F.ctc_loss(
            log_probs.transpose(0, 1),
            tokens,
            said.lengths,
            lengths,
            blank=BLANK,
            reduction="none",
            zero_infinity=True,
        )

    def predict(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        said: Recognition = model(batch["features"], batch["frames"])
        found = {"greedy": best_path(said.ctc, said.lengths)}
        if batch["search"]:
            found["beam"] = self._search(model, said)
        texts = {
            way: [self.vocabulary.decode(tokens) for tokens in many] for way, many in found.items()
        }
        return {"text": batch["text"], "part": batch["part"], **texts}

    def _search(self, model: nn.Module, said: Recognition) -> list[list[int]]:
        config = self.config
        if config.decoder_layers == 0:
            return prefix_search(said.ctc, said.lengths, config.beam)
        from gfsa.recipes.speech_speechbrain import SpeechBrainRecogniser, joint_search

        for wrapped in ("module", "_orig_mod"):
            model = getattr(model, wrapped, model)
        assert isinstance(model, SpeechBrainRecogniser)
        return joint_search(model, said, config.beam, config.search_ctc_weight)

    def score(self, predictions: list[dict[str, Any]]) -> dict[str, float]:
        """In %, ``wer`` and ``cer`` of the first set, and ``wer_<set>`` of any others.

        Where a beam was used these are the beam's, and ``wer_greedy`` is the best path's.
        """
        from torchmetrics.functional.text import char_error_rate, word_error_rate

        way = "beam" if "beam" in predictions[0] else "greedy"
        texts, parts, said, greedy = (
            [one for prediction in predictions for one in prediction[key]]
            for key in ("text", "part", way, "greedy")
        )
        scores: dict[str, float] = {}
        for name in dict.fromkeys(parts):
            chosen = [i for i, part in enumerate(parts) if part == name]
            real = [texts[i] for i in chosen]
            written = [said[i] for i in chosen]
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
        """A few test utterances."""
        count = min(8, len(self.splits["test"]))
        batch = self.splits["test"].dataset.__getitems__(list(range(count)))  # type: ignore[attr-defined]
        inputs = {name: batch[name] for name in ("features", "frames")}
        if self.config.decoder_layers:
            inputs["tokens"] = F.pad(batch["tokens"], (1, 0), value=BEGIN)
        return inputs


def build(config: SpeechConfig, data_dir: Path) -> SpeechTask:
    """Read the data and make a model."""
    sets = _read(config, data_dir)
    texts = tuple(text for part in sets["train"] for text in part.texts)
    vocabulary = learn_vocabulary(texts, config.tokens, config.vocabulary)
    batches = {
        name: SpeechBatches(
            parts,
            vocabulary.encode,
            config.pad_to_multiple,
            config.pad_tokens_to_multiple,
            search=name == "test" and config.decode == "beam",
        )
        for name, parts in sets.items()
    }
    batches["train"].warn_of_unalignable(SUBSAMPLING)
    model = _model(config, sets["train"][0].size, len(vocabulary))
    return SpeechTask(config, model, vocabulary, batches)


def _read(config: SpeechConfig, data_dir: Path) -> dict[str, list[Utterances]]:
    if config.dataset == "librispeech":
        named = {
            "train": config.train_sets, "valid": config.valid_sets, "test": config.test_sets
        }  # fmt: skip
        return {
            split: [librispeech.read_librispeech(data_dir, name) for name in names]
            for split, names in named.items()
            if names
        }
    train, test = an4.read_an4(data_dir)
    if not config.holdout:
        return {"train": [train], "test": [test]}
    train, valid = hold_out(train, config.holdout)
    return {"train": [train], "valid": [valid], "test": [test]}


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
    from gfsa.recipes.speech_speechbrain import SpeechBrainRecogniser

    return SpeechBrainRecogniser(
        **common, decoder_layers=config.decoder_layers, decoder_hidden=config.decoder_hidden
    )


RECIPE = Recipe(
    name="speech",
    title="Speech recognition: LibriSpeech or AN4, Transformer or Branchformer",
    config=SpeechConfig,
    build=build,
    sources=(librispeech.SOURCE, an4.SOURCE),
    extra="train,speech",
)
