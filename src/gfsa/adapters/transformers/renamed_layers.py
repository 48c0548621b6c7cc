"""Attention layers that transformers renamed, from 5.17 (the older version) to 5.22.

Saved filters have the names of the version that they were saved with and load with both.
"""

from __future__ import annotations

from gfsa.plugs.saving.renames import Renaming


def _joined(family: str) -> Renaming:
    """Attention and its output projection were two modules of one around them; now they are one."""
    return Renaming(
        kind=f"{family}SelfAttention",
        other_kind=f"{family}Attention",
        inside="attention",
        parameters=(
            ("attention.query", "q_proj"),
            ("attention.key", "k_proj"),
            ("attention.value", "v_proj"),
            ("output.dense", "o_proj"),
        ),
    )


def _moved(kind: str, *paths: tuple[str, str]) -> Renaming:
    """The layer is the same, in another place of the model."""
    return Renaming(kind=kind, other_kind=kind, paths=paths)


_RENAMINGS = (
    *map(_joined, ("Dinov2", "Dinov2WithRegisters", "Radio", "RfDetrDinov2", "Tipsv2Vision")),
    _moved(
        "MimiAttention",
        ("encoder_transformer", "encoder.encoder_transformer"),
        ("decoder_transformer", "decoder.decoder_transformer"),
    ),
    # a whole model has the thinker beside the talker; a thinker of its own has no such prefix
    *(
        renaming
        for family in ("Qwen2_5Omni", "Qwen3OmniMoe")
        for renaming in (
            _moved(f"{family}AudioAttention", ("thinker.audio_tower", "thinker.model.audio_tower")),
            _moved(f"{family}VisionAttention", ("thinker.visual", "thinker.model.visual")),
        )
    ),
    _moved(
        "Qwen2_5OmniAttention",
        ("thinker.model.layers", "thinker.model.language_model.layers"),
        ("model.layers", "language_model.layers"),
    ),
    _moved(
        "Qwen3OmniMoeThinkerTextAttention",
        ("thinker.model.layers", "thinker.model.language_model.layers"),
        ("model.layers", "language_model.layers"),
    ),
    # a bias of keys adds the same to all scores of a query, which the softmax leaves out
    Renaming(
        kind="VideoMAESelfAttention",
        other_kind="VideoMAESelfAttention",
        only_here={"key.bias": "query.bias"},
    ),
)


def renamings_of(kind: str) -> tuple[Renaming, ...]:
    """What is known of other names of an attention class, whichever version has it."""
    return tuple(known for known in _RENAMINGS if kind in (known.kind, known.other_kind))
