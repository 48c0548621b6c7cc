"""Decoding with a cache, and the same tokens without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from census.inputs import Batch

NEW_TOKENS = 4


def generated(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens with their start, and the logits of each new one."""
    model.generation_config.eos_token_id = None
    start = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    out = model.generate(
        **batch,
        **start,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, 1)


def teacher_forced(model: Any, batch: Batch, tokens: Tensor) -> Tensor:
    """The logits of the same tokens in one forward without a cache."""
    batch = dict(batch)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens[:, :-1]
    else:
        batch["input_ids"] = tokens[:, :-1]
        if "attention_mask" in batch:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    logits: Tensor = model(**batch, use_cache=False).logits
    return logits[:, -NEW_TOKENS:]
