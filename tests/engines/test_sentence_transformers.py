"""sentence-transformers: embeddings of a plugged encoder, training, checkpoints and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from torch import Tensor

import gfsa
from engines.shared import word_tokenizer
from support.plugging import filtered_softmax, randomise

WORDS = 64
HEADS = 4


def texts(count: int = 6) -> list[str]:
    """Texts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 16, (count,), generator=generator).tolist()
    words = [torch.randint(2, WORDS, (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(f"w{word}" for word in row) for row in words]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with its tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 256}
    words = word_tokenizer(WORDS, "[PAD]", "[UNK]", unknown="[UNK]", **names)
    words.save_pretrained(folder)
    torch.manual_seed(0)
    bert(hidden=32, positions=32).save_pretrained(folder)
    return folder


def bert(hidden: int, positions: int) -> transformers.BertModel:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=2 * hidden,
        max_position_embeddings=positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    return transformers.BertModel(config)


def embedder(encoder: Path, noise: float = 0.0) -> SentenceTransformer:
    """A plugged model: the encoder, the mean of its tokens, a dense layer."""
    torch.manual_seed(0)
    modules = [Transformer(str(encoder)), Pooling(32), Dense(32, 8)]
    model = SentenceTransformer(modules=modules, device="cpu")
    gfsa.plug(model, K=3)
    return randomise(model, noise)


def load(folder: str | Path) -> SentenceTransformer:
    """The recipe of docs/trainers.md."""
    model = SentenceTransformer(str(folder), device="cpu")
    model[0].model = gfsa.from_pretrained(transformers.AutoModel, folder)
    return model


def embed(model: SentenceTransformer) -> Tensor:
    return model.encode(texts(), convert_to_tensor=True)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal up to rounding, which depends on where in memory weights were loaded."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_embeddings_are_those_of_the_dense_formula(encoder: Path) -> None:
    model = embedder(encoder, noise=0.3)
    together = embed(model)
    plain = transformers.BertModel.from_pretrained(encoder).eval()
    filters = [filter.coefficients().detach() for filter in gfsa.filters_of(model).values()]
    assert len(filters) == 2
    worst = 0.0
    for text, embedding in zip(texts(), together, strict=True):
        ids = model.tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad(), filtered_softmax(plain, filters):
            hidden = plain(ids).last_hidden_state
            expected = model[2]({"sentence_embedding": hidden.mean(1)})["sentence_embedding"][0]
        worst = max(worst, (embedding - expected).abs().max().item())
    assert worst < 2e-6


def test_a_folder_brings_its_filters_by_the_recipe(encoder: Path, tmp_path: Path) -> None:
    model = embedder(encoder, noise=0.3)
    model.save(str(tmp_path / "model"))
    assert not gfsa.filters_of(SentenceTransformer(str(tmp_path / "model"), device="cpu"))
    assert_same(embed(load(tmp_path / "model")), embed(model))
    gfsa.save(model, tmp_path / "filters")
    other = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    gfsa.load(other, tmp_path / "filters")
    assert_same(embed(other), embed(model))


def test_a_cross_encoder(encoder: Path, tmp_path: Path) -> None:
    model = CrossEncoder(str(encoder), num_labels=1, device="cpu")
    pairs = list(zip(texts(), reversed(texts()), strict=True))
    before = model.predict(pairs)
    gfsa.plug(model, K=3)
    assert (model.predict(pairs) == before).all()
    randomise(model)
    scores = model.predict(pairs)
    assert (scores != before).any()
    model.save_pretrained(str(tmp_path / "model"))
    gfsa.save(model, tmp_path / "filters")
    other = CrossEncoder(str(tmp_path / "model"), device="cpu")
    gfsa.load(other, tmp_path / "filters")
    assert other.predict(pairs) == pytest.approx(scores, abs=1e-6)


class FilterTrainer(gfsa.FilterRate, SentenceTransformerTrainer):
    """The trainer of docs/trainers.md."""

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        self.model.load_state_dict(load(checkpoint_path).state_dict())


class PlainTrainer(gfsa.FilterRate, SentenceTransformerTrainer):
    """Without the line that resumes."""


def trainer(kind: Any, model: SentenceTransformer, folder: Path, **settings: Any) -> Any:
    arguments = SentenceTransformerTrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        save_strategy="steps",
        save_steps=2,
        **{"max_steps": 4, **settings},
    )
    rows = Dataset.from_dict({"anchor": texts(), "positive": texts()[::-1]})
    loss = MultipleNegativesRankingLoss(model)
    return kind(model, arguments, train_dataset=rows, eval_dataset=rows, loss=loss, filter_lr=1e-1)


def test_a_run_resumes_exactly(encoder: Path, tmp_path: Path) -> None:
    whole = embedder(encoder)
    run = trainer(FilterTrainer, whole, tmp_path)
    run.train()
    # four steps at the weights' rate are 4e-3 at most
    thetas = [filter.theta for filter in gfsa.filters_of(whole).values()]
    assert all(theta.abs().max() > 1e-1 for theta in thetas)

    half = str(tmp_path / "checkpoint-2")
    resumed = embedder(encoder, noise=0.3)
    trainer(FilterTrainer, resumed, tmp_path / "resumed").train(resume_from_checkpoint=half)
    worst = max(
        (one.theta - other.theta).abs().max().item()
        for one, other in zip(
            gfsa.filters_of(whole).values(), gfsa.filters_of(resumed).values(), strict=True
        )
    )
    assert worst < 1e-5
    torch.testing.assert_close(embed(resumed), embed(whole), rtol=0, atol=1e-5)

    # sentence-transformers builds the model of a checkpoint anew, without filters
    with pytest.raises(RuntimeError, match=r"gfsa\.theta"):
        trainer(PlainTrainer, resumed, tmp_path / "plain").train(resume_from_checkpoint=half)


def test_the_best_checkpoint_is_loaded_with_its_filters(encoder: Path, tmp_path: Path) -> None:
    model = embedder(encoder)
    run = trainer(
        FilterTrainer,
        model,
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        # whichever is worse: the first is, after a few steps
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    run.train()
    best = run.state.best_model_checkpoint
    assert best is not None
    assert_same(embed(model), embed(load(best)))


def test_what_a_step_costs(encoder: Path, tmp_path: Path, costs: Any) -> None:
    wide = tmp_path / "wide"
    bert(hidden=128, positions=256).save_pretrained(wide)
    transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(wide)
    ids = torch.randint(2, WORDS, (2, 256))
    filtered, plain = (
        SentenceTransformer(modules=[Transformer(str(wide)), Pooling(128)], device="cpu")
        for _ in range(2)
    )
    gfsa.plug(filtered, K=3)

    def step(model: SentenceTransformer) -> None:
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        model(features)["sentence_embedding"].square().sum().backward()

    costs(step, filtered, plain)
