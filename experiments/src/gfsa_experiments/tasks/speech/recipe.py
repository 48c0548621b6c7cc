"""Speech recognition: SpeechBrain's Transformer and Branchformer, joint CTC/attention training."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from gfsa_experiments.engine.task import Task
from gfsa_experiments.tasks.speech.data import (
    AN4,
    BEGIN,
    BLANK,
    END,
    LETTERS,
    SpeechBatches,
    Tokens,
    learn_vocabulary,
    letters_of,
    read_speech,
)

# the paper's layers, heads and width of the MLPs
_PAPER = {"transformer": (12, 4, 2048), "branchformer": (18, 8, 3072)}
# frames per token of the encoder
_SUBSAMPLING = 4


@dataclass(frozen=True, kw_only=True)
class SpeechConfig(TrainConfig):
    """The paper's Transformer for LibriSpeech 100h; ``encoder=branchformer`` for the other."""

    in_label = ("data",)
    used_if = (
        ("tokens=unigram,bpe", "vocabulary"),
        ("time_masks", "time_width"),
        ("feature_masks", "feature_width"),
        # a Transformer has one hidden for both
        ("encoder=branchformer", "kernel decoder_hidden"),
        ("decoder_layers", "decoder_hidden label_smoothing beam search_ctc_weight"),
        ("decode=beam", "beam search_ctc_weight"),
    )

    epochs: float = 100
    batch_size: int = 32
    lr: float = 8e-4
    weight_decay: float = 0.01
    beta2: float = 0.98
    schedule: Schedule = "linear"
    warmup: float = 0.25
    clip: float = 5.0
    group_by_length: bool = True

    data: str = AN4
    """CMU's AN4, or recordings of the caller's own (``./an4`` for a folder of that name): a folder
    with transcripts.tsv (or .csv), or in LibriSpeech's layout."""
    holdout: ShareBelowOne = 0.1
    """Share of the training utterances held out for validation if there is no part for it, by
    speaker where speakers are known."""
    tokens: Tokens = "unigram"
    vocabulary: Count = 5000
    """The number of word pieces to learn, unless tokens=char."""

    encoder: Literal["transformer", "branchformer"] = "transformer"
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
    """In the decoder's loss."""
    warp: CountOrZero = 5
    """SpecAugment: the largest time shift in frames; 0 for none."""
    time_masks: CountOrZero = 5
    time_width: CountOrZero = 25
    feature_masks: CountOrZero = 2
    feature_width: CountOrZero = 35

    decode: Literal["greedy", "beam"] = "beam"
    """How the test split is decoded; validation, and CTC alone, is always greedy."""
    beam: Count = 66
    search_ctc_weight: Share = 0.4
    """CTC's share in the joint beam search."""
    pad_to_multiple: Count = 64
    """Frames of a batch are a multiple of this."""
    pad_tokens_to_multiple: Count = 32

    def check(self) -> None:
        super().check()
        if self.graphs:
            raise ValueError("CTC's loss reads lengths on the host: leave graphs=false")
        _, heads, hidden = self.sizes
        if self.width % heads or self.width % 2:
            raise ValueError(
                f"width must be even and divisible by heads, got {self.width} and {heads}"
            )
        if self.encoder == "branchformer" and (hidden % 2 or self.kernel % 2 == 0):
            raise ValueError(
                "the Branchformer needs an even hidden and an odd kernel, "
                f"got {hidden} and {self.kernel}"
            )
        if (self.decoder_layers == 0) != (self.ctc_weight == 1):
            raise ValueError(
                "CTC alone is decoder_layers=0 and ctc_weight=1, both or neither; got "
                f"decoder_layers={self.decoder_layers} and ctc_weight={self.ctc_weight}"
            )

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        if not self.decoder_layers and self.decode == "beam":
            unused["decode"] = "decoder_layers=0 is CTC alone, which is always greedy"
        return unused

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Layers, heads and width of the MLPs of the encoder."""
        layers, heads, hidden = _PAPER[self.encoder]
        return self.depth or layers, self.heads or heads, self.hidden or hidden

    def label(self) -> str:
        data = AN4 if self.data == AN4 else f"data={name_of(self.data)}"
        return f"{data} {self.encoder}-d{self.sizes[0]}"


class Recognition(NamedTuple):
    """The output of a recogniser.

    ``states (B, N, E)`` of the encoder (``lengths (B,)`` are real), the logits ``ctc
    (B, N, V)`` and, if there is a decoder, its logits ``attention (B, L + 1, V)``.
    """

    states: Tensor
    lengths: Tensor
    ctc: Tensor
    attention: Tensor | None


class Recogniser(nn.Module):
    """``TransformerASR`` behind SpeechBrain's convolutions, with linear layers for CTC and text.

    As in SpeechBrain's LibriSpeech recipes: the Transformer has absolute positions, the
    Branchformer relative ones.
    """

    def __init__(self, config: SpeechConfig, features: int, vocabulary: int) -> None:
        from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
        from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
        from speechbrain.nnet.linear import Linear

        super().__init__()
        channels = 64
        branches = config.encoder == "branchformer"
        layers, heads, hidden = config.sizes
        self.front = ConvolutionFrontEnd(
            input_shape=(None, None, features),
            num_blocks=3,
            num_layers_per_block=1,
            out_channels=(channels,) * 3,
            kernel_sizes=(5, 5, 1),
            strides=(2, 2, 1),
            residuals=(False, False, True),
            dropout=config.dropout,
        )
        self.asr = TransformerASR(
            tgt_vocab=vocabulary,
            # the convolutions have a stride of 4 over features too
            input_size=channels * -(-features // 4),
            d_model=config.width,
            nhead=heads,
            num_encoder_layers=layers,
            num_decoder_layers=config.decoder_layers,
            d_ffn=config.decoder_hidden if branches else hidden,
            csgu_linear_units=hidden,
            kernel_size=config.kernel,
            dropout=config.dropout,
            activation=nn.GELU,
            encoder_module=config.encoder,
            attention_type="RelPosMHAXL" if branches else "regularMHA",
            normalize_before=config.norm_first,
            causal=False,
        )
        self.ctc = Linear(vocabulary, input_size=config.width)
        decodes = config.decoder_layers > 0
        self.text = Linear(vocabulary, input_size=config.width) if decodes else None

    def forward(
        self, features: Tensor, frames: Tensor, tokens: Tensor | None = None
    ) -> Recognition:
        """``features (B, T, F)`` (``frames (B,)`` are real); ``tokens (B, L + 1)`` start
        with 1 and are the input of the decoder, which does not run without them."""
        x = self.front(features)
        lengths = (frames + _SUBSAMPLING - 1) // _SUBSAMPLING
        share = lengths / x.shape[1]
        if self.text is None or tokens is None:
            states = self.asr.encode(x.flatten(2), share)
            return Recognition(states, lengths, self.ctc(states), None)
        states, decoded = self.asr(x, tokens, share, pad_idx=BLANK)
        return Recognition(states, lengths, self.ctc(states), self.text(decoded))


def joint_search(
    model: Recogniser, output: Recognition, beam: int, ctc_weight: float
) -> list[list[int]]:
    """The most likely tokens by CTC and decoder together, found by SpeechBrain's beam search."""
    from speechbrain.decoders.scorer import CTCScorer, ScorerBuilder
    from speechbrain.decoders.seq2seq import S2STransformerBeamSearcher

    scorers: dict[str, Any] = {}
    if ctc_weight > 0:
        ctc = CTCScorer(ctc_fc=model.ctc, blank_index=BLANK, eos_index=END)
        scorers["scorer"] = ScorerBuilder(full_scorers=[ctc], weights={"ctc": ctc_weight})
    search = S2STransformerBeamSearcher(
        modules=[model.asr, model.text],
        bos_index=BEGIN,
        eos_index=END,
        min_decode_ratio=0.0,
        max_decode_ratio=1.0,
        beam_size=beam,
        using_eos_threshold=False,
        length_normalization=True,
        **scorers,
    )
    # the search expects a batch that is exactly as long as its longest utterance
    states = output.states[:, : int(output.lengths.max())]
    with torch.no_grad():
        tokens, *_ = search(states, output.lengths / states.shape[1])
    return [[int(token) for token in row] for row in tokens]


def augmentations(config: SpeechConfig) -> Any:
    """SpecAugment: SpeechBrain's shift of a moment in time, torchaudio's masks of mean values."""
    from speechbrain.augment.freq_domain import Warping
    from torchaudio.transforms import SpecAugment

    # independent masks for each utterance, each over at most half of it; the features have mean 0
    masks = SpecAugment(
        config.time_masks, config.time_width, config.feature_masks, config.feature_width,
        iid_masks=True, p=0.5, zero_masking=True,
    )  # fmt: skip
    warped = Warping(warp_window=config.warp) if config.warp else nn.Identity()
    return lambda features: masks(warped(features).transpose(1, 2)).transpose(1, 2)


class SpeechTask(Task):
    """Transcribes features; measured by the word error rate."""

    metric = "wer"
    higher_is_better = False

    def __init__(self, config: SpeechConfig, data_dir: Path) -> None:
        self.config = config
        sets, self.own_data = read_speech(config.data, Path(data_dir).absolute(), config.holdout)
        texts = tuple(utterance.text for utterance in sets["train"])
        letters = LETTERS if self.own_data is None else letters_of(sets)
        self.vocabulary = learn_vocabulary(texts, config.tokens, config.vocabulary, letters)
        searched = config.decode == "beam" and config.decoder_layers > 0
        multiples = config.pad_to_multiple, config.pad_tokens_to_multiple
        batches = {
            name: SpeechBatches(
                of_part, self.vocabulary.encode, *multiples, search=searched and name == "test"
            )
            for name, of_part in sets.items()
        }
        batches["train"].warn_of_unalignable(_SUBSAMPLING)
        features = sets["train"][0].features().shape[1]
        self.model = Recogniser(config, features, self.vocabulary.size)
        self.splits = {name: of_split.split() for name, of_split in batches.items()}
        self.augment = augmentations(config)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """SpecAugment."""
        return {**batch, "features": self.augment(batch["features"])}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        r"""``λ·CTC + (1 − λ)·cross-entropy``, each summed over an utterance."""
        tokens, lengths = batch["tokens"], batch["lengths"]
        previous = F.pad(tokens, (1, 0), value=BEGIN) if self.config.decoder_layers else None
        output: Recognition = model(batch["features"], batch["frames"], previous)
        ctc = F.ctc_loss(
            output.ctc.float().log_softmax(-1).transpose(0, 1),
            tokens,
            output.lengths,
            lengths,
            blank=BLANK,
            reduction="none",
            zero_infinity=True,
        ).mean()
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

    def predict(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        from speechbrain.decoders.ctc import ctc_greedy_decode

        output: Recognition = model(batch["features"], batch["frames"])
        share = output.lengths / output.ctc.shape[1]
        # the most likely token of each frame, without repetitions and blanks
        found = {"greedy": ctc_greedy_decode(output.ctc.float(), share, BLANK)}
        if batch["search"]:
            for wrapped in ("module", "_orig_mod"):
                model = getattr(model, wrapped, model)
            assert isinstance(model, Recogniser)
            given = self.config.beam, self.config.search_ctc_weight
            found["beam"] = joint_search(model, output, *given)
        texts = {
            way: [self.vocabulary.decode(tokens) for tokens in rows] for way, rows in found.items()
        }
        return {"text": batch["text"], "part": batch["part"], **texts}

    def score(self, predictions: list[dict[str, Any]]) -> dict[str, float]:
        """In percent: ``wer`` and ``cer`` of the first set, and ``wer_<set>`` of any others.

        After a beam search these are its rates, and ``wer_greedy`` is that of the best path.
        """
        from torchmetrics.functional.text import char_error_rate, word_error_rate

        way = "beam" if "beam" in predictions[0] else "greedy"
        columns = ("part", "text", way, "greedy")
        found = [zip(*(batch[key] for key in columns), strict=True) for batch in predictions]
        sets: dict[str, list[Any]] = {}
        for part, *texts in itertools.chain(*found):
            sets.setdefault(part, []).append(texts)
        scores: dict[str, float] = {}
        for part, rows in sets.items():
            real, written, greedy = map(list, zip(*rows, strict=True))
            rate = 100 * float(word_error_rate(written, real))
            if scores:
                scores[f"wer_{part}"] = rate
                continue
            scores = {"wer": rate, "cer": 100 * float(char_error_rate(written, real))}
            if way == "beam":
                scores["wer_greedy"] = 100 * float(word_error_rate(greedy, real))
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
