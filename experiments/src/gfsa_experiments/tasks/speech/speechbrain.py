"""SpeechBrain's speech recognisers: encoder, decoder and joint beam search."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gfsa_experiments.tasks.speech.models import Encoder, Recognition, subsampled
from gfsa_experiments.tasks.speech.text import BEGIN, BLANK, END


class SpeechBrainRecogniser(nn.Module):
    """``TransformerASR`` behind SpeechBrain's convolutions, with linear layers for CTC and text.

    As in SpeechBrain's LibriSpeech recipes: the Transformer has absolute positions, the
    Branchformer relative ones.
    """

    def __init__(
        self,
        features: int,
        vocabulary: int,
        encoder: Encoder,
        width: int,
        heads: int,
        layers: int,
        hidden: int,
        decoder_layers: int,
        decoder_hidden: int,
        kernel: int,
        dropout: float,
        norm_first: bool,
    ) -> None:
        try:
            from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
            from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
            from speechbrain.nnet.linear import Linear
        except ImportError as error:
            raise ImportError(
                "library=speechbrain needs SpeechBrain, which cannot be imported here "
                f"({error}): pip install speechbrain, or train CTC alone with library=torch "
                "decoder_layers=0 ctc_weight=1"
            ) from error

        super().__init__()
        channels = 64
        self.front = ConvolutionFrontEnd(
            input_shape=(None, None, features),
            num_blocks=3,
            num_layers_per_block=1,
            out_channels=(channels,) * 3,
            kernel_sizes=(5, 5, 1),
            strides=(2, 2, 1),
            residuals=(False, False, True),
            dropout=dropout,
        )
        self.asr = TransformerASR(
            tgt_vocab=vocabulary,
            # the convolutions have a stride of 4 over features too
            input_size=channels * -(-features // 4),
            d_model=width,
            nhead=heads,
            num_encoder_layers=layers,
            num_decoder_layers=decoder_layers,
            d_ffn=decoder_hidden if encoder == "branchformer" else hidden,
            csgu_linear_units=hidden,
            kernel_size=kernel,
            dropout=dropout,
            activation=nn.GELU,
            encoder_module=encoder,
            attention_type="RelPosMHAXL" if encoder == "branchformer" else "regularMHA",
            normalize_before=norm_first,
            causal=False,
        )
        self.ctc = Linear(vocabulary, input_size=width)
        self.text = Linear(vocabulary, input_size=width) if decoder_layers else None

    def forward(
        self, features: Tensor, frames: Tensor, tokens: Tensor | None = None
    ) -> Recognition:
        """``features (B, T, F)``, of which ``frames (B,)`` are real; ``tokens (B, L + 1)`` start
        with 1 and are the input of the decoder, which does not run without them."""
        x = self.front(features)
        lengths = subsampled(frames)
        share = lengths / x.shape[1]
        if self.text is None or tokens is None:
            states = self.asr.encode(x.flatten(2), share)
            return Recognition(states, lengths, self.ctc(states), None)
        states, decoded = self.asr(x, tokens, share, pad_idx=BLANK)
        return Recognition(states, lengths, self.ctc(states), self.text(decoded))


def joint_search(
    model: SpeechBrainRecogniser, output: Recognition, beam: int, ctc_weight: float
) -> list[list[int]]:
    """The most likely tokens by CTC and decoder together, found by SpeechBrain's beam search."""
    from speechbrain.decoders.scorer import CTCScorer, ScorerBuilder
    from speechbrain.decoders.seq2seq import S2STransformerBeamSearcher

    if model.text is None:
        raise ValueError("joint_search needs a decoder; this model has CTC alone")
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
