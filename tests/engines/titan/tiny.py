"""Tiny models for torchtitan, their data, and the transformers folders that describe them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

import gfsa.titan
from engines.shared import word_tokenizer

VOCABULARY = 96
LENGTH = 256  # context parallelism shards whole blocks of 128 tokens
BATCH = 4
LAYERS = 4
WIDTH = 128  # heads are 32 wide, the least that vLLM serves on a CPU


class Documents(BaseDataLoader):
    """Random packed documents: the rows of a step are the same however processes share them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        self._rows = range(dp_rank, 10**6, dp_world_size)
        self._batch_size = local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for start in range(0, len(self._rows), self._batch_size):
            rows = [document_row(row) for row in self._rows[start : start + self._batch_size]]
            tokens, positions = (torch.stack(column) for column in zip(*rows, strict=True))
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def document_row(number: int) -> tuple[Tensor, Tensor]:
    """``LENGTH + 1`` tokens of two documents, and the position of each in its own."""
    generator = torch.Generator().manual_seed(number)
    start = int(torch.randint(3, LENGTH - 3, (1,), generator=generator))
    positions = torch.arange(LENGTH)
    positions[start:] -= start
    # tokens that depend on their predecessor, so that there is something to learn
    tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
    tokens[1::2] = (tokens[:-1:2] * 5 + 1) % VOCABULARY
    return tokens, positions


def llama(inner_attention: str = "flex") -> Trainer.Config:
    """Llama 3 with two query heads for each key."""
    spec = llama3.model_registry("debugmodel")
    spec.model.layers = llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=96,
        rope=ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=LENGTH, theta=10000, scaling="none"),
        attn_backend=inner_attention,
    )
    return trainer(spec)


def llama_at_rest() -> Trainer.Config:
    """:func:`llama` with weights that stay as they are."""
    config = llama()
    config.optimizer = default_adamw(lr=0.0, weight_decay=0.0)
    return config


def qwen() -> Trainer.Config:
    """Qwen3, which normalises queries and keys; its output layer is tied to its embeddings."""
    spec = qwen3.model_registry("debugmodel")
    spec.model.layers = qwen3._build_qwen3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        hidden_dim=96,
        rope=CosSinRoPE.Config(dim=64, max_seq_len=LENGTH, theta=10000.0),
        fuse_qkv=True,
        attn_backend="flex",
    )
    return trainer(spec)


def untied_qwen() -> Trainer.Config:
    """:func:`qwen` with an output layer of its own, as from 8B on; a pipeline needs that."""
    config = qwen()
    config.model_spec.model.enable_weight_tying = False
    config.model_spec.model.tok_embeddings.param_init = {"weight": nn.init.normal_}
    return config


def upper_llama() -> Trainer.Config:
    """Llama 3 with filters in its upper half, put there by the configuration itself."""
    config = llama()
    plugged = gfsa.titan.plug(config, layers="upper", filter="Polynomial", degree=3, lr=0.05)
    assert len(plugged) == LAYERS // 2
    return config


def trainer(spec: ModelSpec) -> Trainer.Config:
    model = spec.model
    model.dim, model.vocab_size = WIDTH, VOCABULARY
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = VOCABULARY, WIDTH
    model.lm_head.in_features, model.lm_head.out_features = WIDTH, VOCABULARY
    model.norm.normalized_shape = WIDTH
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
        ),
        model_spec=spec,
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=BATCH,
            global_batch_size=BATCH,
            seq_len=LENGTH,
            steps=3,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Documents.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        # the other backends need a newer torch as soon as there are two processes
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", pipeline_parallel_schedule="1F1B"
        ),
        checkpoint=CheckpointManager.Config(),
        activation_checkpoint=SelectiveAC.Config(),
        validator=Validator.Config(enable=False),
    )


def transformers_config(name: str) -> Any:
    """The configuration with which transformers builds the model ``name``."""
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if name.endswith("qwen"):
        return transformers.Qwen3Config(
            **shared,
            architectures=["Qwen3ForCausalLM"],
            head_dim=64,
            rms_norm_eps=1e-6,
            tie_word_embeddings=name == "qwen",
        )
    return transformers.LlamaConfig(
        **shared,
        architectures=["LlamaForCausalLM"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )


def write_assets(folder: Path, name: str) -> None:
    """``config.json`` and a tokenizer, as ``hf_assets_path`` of torchtitan has them."""
    transformers_config(name).save_pretrained(folder)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    tokenizer = word_tokenizer(VOCABULARY, "<s>", "</s>", unknown="<s>", **names)
    tokenizer.save_pretrained(folder)


def write_index(folder: Path, name: str) -> None:
    """The index of weights in two files, as ``hf_assets_path`` has it for a large model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(transformers_config(name)).state_dict()
    upper = f"model.layers.{LAYERS // 2}."
    weight_map = {
        key: f"model-0000{1 if key < upper else 2}-of-00002.safetensors" for key in weights
    }
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
