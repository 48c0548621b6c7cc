"""TRL: supervised fine-tuning on packed documents, DPO and GRPO, with filters."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import gfsa
from engines.shared import tiny_llama, word_tokenizer
from support.plugging import randomise

VOCABULARY = 64
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LENGTHS = (5, 9, 3, 12, 7, 16, 4, 10)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    return word_tokenizer(VOCABULARY, "<pad>", "<s>", "</s>", unknown="<s>", **names)


def documents(lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def plugged() -> Any:
    model = tiny_llama(**TOKENS)
    gfsa.plug(model, K=3)
    return randomise(model)


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": False,
    }


def with_rate(model: Any) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.AdamW(gfsa.parameter_groups(model, lr=1e-3, filter_lr=1e-1)), None


PACKINGS: dict[str, dict[str, Any]] = {
    "packed, best fit": {"packing": True, "packing_strategy": "bfd"},
    "padded": {"packing": False},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_document_is_answered_as_alone(
    packing: str,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    model = plugged()
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(max_length=16, **PACKINGS[packing], **settings(tmp_path)),
        train_dataset=Dataset.from_dict({"input_ids": documents()}),
        processing_class=tokenizer,
        optimizers=with_rate(model),
    )
    seen, worst = 0, 0.0
    for batch in trainer.get_train_dataloader():
        losses = []
        with torch.no_grad():
            together = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
            for tokens, logits in documents_in(batch, together):
                alone = model(tokens[None]).logits[0]
                worst = max(worst, (logits - alone).abs().max().item())
                losses.append(F.cross_entropy(alone[:-1], tokens[1:], reduction="none"))
                seen += 1
        expected = torch.cat(losses).mean()
        torch.testing.assert_close(trainer.compute_loss(model, batch), expected)
    assert seen == len(LENGTHS)
    assert worst < 2e-6

    # three steps at the weights' rate are 3e-3 at most
    assert_trains_filters(trainer, 1e-1)


def assert_trains_filters(trainer: Any, least: float) -> None:
    """A number of each filter is moved by more than ``least``."""
    filters = gfsa.filters_of(trainer.model).values()
    before = [filter.theta.detach().clone() for filter in filters]
    trainer.train()
    for old, filter in zip(before, filters, strict=True):
        assert (filter.theta - old).abs().max() > least


def documents_in(batch: dict[str, Tensor], logits: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The tokens of each document in a batch, and its rows of the logits."""
    found = []
    for row, tokens in enumerate(batch["input_ids"]):
        if "position_ids" in batch:
            starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
        else:
            starts = [0]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            kept = tokens[start:end] != 0
            found.append((tokens[start:end][kept], logits[row, start:end][kept]))
    return found


def test_dpo_with_a_reference_that_has_the_filters(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = plugged()
    words = tokenizer.batch_decode(documents())
    prompts = [f"{prompt} " for prompt in words[:4]]
    pairs = Dataset.from_dict({"prompt": prompts, "chosen": words[4:], "rejected": words[1:5]})
    trainer = DPOTrainer(
        model=model,
        # without it TRL loads the reference by the model's name, which brings no filters
        ref_model=copy.deepcopy(model),
        args=DPOConfig(**settings(tmp_path)),
        train_dataset=pairs,
        processing_class=tokenizer,
        optimizers=with_rate(model),
    )
    assert_trains_filters(trainer, 1e-2)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # policy and reference are the same at first, filters too
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] != pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.parametrize(("K", "disable_dropout"), [(None, False), (3, True)])
def test_grpo_generates_with_a_model_that_has_attention_dropout(
    K: int | None, disable_dropout: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=64,
        **TOKENS,
    )
    assert config.attn_pdrop > 0
    model = GPT2LMHeadModel(config)
    gfsa.plug(model, K=K)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=GRPOConfig(
            **settings(tmp_path) | {"max_steps": 1},
            num_generations=2,
            max_completion_length=6,
            disable_dropout=disable_dropout,
        ),
        train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(documents()[:4])}),
        processing_class=tokenizer,
        optimizers=with_rate(model),
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert all(filter.theta.abs().max() > 0 for filter in gfsa.filters_of(model).values())


def test_what_a_step_costs(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, costs: Any) -> None:
    texts = documents(range(32, 128, 4))
    filtered, plain = (
        SFTTrainer(
            model=model,
            args=SFTConfig(max_length=256, **PACKINGS["packed, best fit"], **settings(tmp_path)),
            train_dataset=Dataset.from_dict({"input_ids": texts}),
            processing_class=tokenizer,
        )
        for model in (tiny_llama(wide=True, **TOKENS) for _ in range(2))
    )
    gfsa.plug(filtered.model, K=3)

    batch = next(iter(plain.get_train_dataloader()))

    def step(trainer: SFTTrainer) -> None:
        trainer.compute_loss(trainer.model, batch).backward()
        trainer.model.zero_grad()

    of = "a step of SFT (2 layers of 128 features, 2 × 256 packed tokens)"
    costs(step, filtered, plain, of)
