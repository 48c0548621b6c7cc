"""Entries that fail and are not mended yet; docs/supported.md says what is wrong with each.

The list only ever gets shorter: an entry that fails and is not here fails the tests, and so does an
entry that is here and does not fail any more.
"""

from __future__ import annotations

KNOWN: frozenset[str] = frozenset(
    (
        "timm:convit",
        "timm:csatv2",
        "timm:shvit",
        "transformers:autoformer",
        "transformers:cvt",
        "transformers:dab-detr",
        "transformers:deepseek_v4",
        "transformers:deformable_detr",
        "transformers:funnel",
        "transformers:glpn",
        "transformers:granite_swa",
        "transformers:granitemoe_swa",
        "transformers:grounding-dino",
        "transformers:hiera",
        "transformers:informer",
        "transformers:kosmos-2",
        "transformers:longt5",
        "transformers:mm-grounding-dino",
        "transformers:pegasus_x",
        "transformers:pvt",
        "transformers:pvt_v2",
        "transformers:sam",
        "transformers:sam3",
        "transformers:sam3_lite_text",
        "transformers:sam_hq",
        "transformers:t5gemma2",
        "transformers:videoprism",
        "transformers:vjepa2",
    )
)
