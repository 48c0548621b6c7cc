"""Speech recognition: Transformer and Branchformer with joint CTC/attention training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.engine.task import Recipe, Task
from gfsa_experiments.tasks.speech.augment import masks, warp_time
from gfsa_experiments.tasks.speech.config import SpeechConfig
from gfsa_experiments.tasks.speech.data import (
    LETTERS,
    SpeechBatches,
    Utterance,
    hold_out,
    letters_of,
    read_an4,
    read_librispeech,
    read_own,
)
from gfsa_experiments.tasks.speech.decode import best_path, prefix_search
from gfsa_experiments.tasks.speech.models import SUBSAMPLING, Recognition, TorchRecogniser
from gfsa_experiments.tasks.speech.text import BEGIN, BLANK, END, Vocabulary, learn_vocabulary


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
