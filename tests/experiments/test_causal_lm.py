"""The language modelling recipe on tiny data and models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gfsa
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks.causal_lm import (
    CausalLMConfig,
    CausalLMTask,
    causal_by_kernel,
    count_words,
    read_corpus,
)
from support.hub import HubPart, fake_hub
from support.tiny_texts import corpus, save_model, write

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpora")
    for part, lines in (("train", 40), ("valid", 12), ("test", 14)):
        write(root / f"wikitext-2/wiki.{part}.tokens", corpus(lines))
        write(root / f"ptb/ptb.{part}.txt", corpus(lines))
    return root


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny-gpt2", "gpt2"))


SMALL = CausalLMConfig(
    model="scratch",
    tokenizer="bpe",
    vocab_size=300,
    block=16,
    depth=2,
    width=16,
    heads=2,
    max_steps=3,
    tensorboard=False,
)


def built(data: Path, **settings: Any) -> CausalLMTask:
    config = dataclasses.replace(SMALL, **settings)
    config.check()
    torch.manual_seed(config.seed)
    task = CausalLMTask(config, data)
    task.model.eval()
    return task


def a_batch(task: CausalLMTask, split: str = "train") -> dict[str, torch.Tensor]:
    return task.splits[split].dataset.__getitems__([0, 2])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "file", "compressed"),
    [
        ("wikitext-2", "wiki.valid.tokens", False),
        ("wikitext-2", "wikitext-2/valid.txt", True),
        ("wikitext-103", "wikitext-103-raw/wiki.valid.raw", False),
        ("ptb", "simple-examples/data/ptb.valid.txt", False),
    ],
)
def test_where_files_are_found(name: str, file: str, compressed: bool, tmp_path: Path) -> None:
    write(tmp_path / file, corpus(3), compressed)
    lines = read_corpus(tmp_path, name, "valid")
    assert "".join(f"{line}\n" for line in lines) == corpus(3)
    assert count_words(lines) == len(corpus(3).replace("\n", "<eos>").split())


@pytest.mark.filterwarnings("default")
def test_words_are_counted_as_officially(tmp_path: Path) -> None:
    write(tmp_path / "wiki.test.tokens", corpus(3))
    with pytest.warns(UserWarning, match=r"has 36 words, the official file 245,569"):
        read_corpus(tmp_path, "wikitext-2", "test")


def test_without_files_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" = Title = \n", "", " No it was n't Black Monday \n"]
    asked = fake_hub(monkeypatch, lambda *which: HubPart(text=texts))
    with pytest.warns(UserWarning, match="Using hub:Salesforce/wikitext"):
        lines = read_corpus(tmp_path, "wikitext-2", "valid")
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1", "validation")]
    assert lines == [" = Title = ", "", " No it was n't Black Monday "]


@pytest.mark.parametrize("corpus_name", ["wikitext-2", "ptb"])
def test_a_filter_changes_nothing_to_begin_with(corpus_name: str, data: Path) -> None:
    plain, filtered = built(data, dataset=corpus_name), built(data, dataset=corpus_name)
    assert gfsa.plug(filtered.model).parameters == 12
    batch = a_batch(plain)
    loss = plain.loss(plain.model, batch)
    assert torch.equal(loss, filtered.loss(filtered.model, batch))
    loss.backward()
    assert all(p.grad is not None for p in plain.model.parameters())


@pytest.mark.parametrize("filtered", [False, True])
def test_the_loss_is_that_of_transformers(filtered: bool, data: Path) -> None:
    task = built(data)
    if filtered:
        gfsa.plug(task.model, w0=0.3, w1=0.8, wK=0.2)
    ids = a_batch(task)["input_ids"].long()
    expected = task.model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(task.loss(task.model, {"input_ids": ids}), expected)


@pytest.mark.parametrize("filtered", [False, True])
def test_the_model_sees_no_later_token(filtered: bool, data: Path) -> None:
    task = built(data)
    if filtered:
        gfsa.plug(task.model, w0=0.3, w1=0.8, wK=0.2)
    ids = a_batch(task)["input_ids"].long()
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 300
    with causal_by_kernel(task.model):
        before, after = (task.model(input_ids=x).logits for x in (ids, changed))
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@torch.no_grad()
def test_perplexity_by_hand(data: Path) -> None:
    task = built(data)
    split = task.splits["test"].dataset
    whole = split.__getitems__(list(range(len(split))))  # type: ignore[attr-defined,arg-type]
    some, rest = ({k: v[a:b] for k, v in whole.items()} for a, b in ((0, 3), (3, None)))
    scores = task.score([task.predict(task.model, part) for part in (some, rest)])
    logits = task.model(input_ids=whole["input_ids"]).logits.double().log_softmax(-1)
    picked = logits[:, :-1].gather(-1, whole["input_ids"][:, 1:, None].long())
    assert scores["perplexity"] == pytest.approx(math.exp(-float(picked.mean())), rel=1e-5)
    # the same loss over fewer words than tokens
    assert scores["word_perplexity"] > scores["perplexity"]
    words = float(whole["words"].sum())
    assert scores["word_perplexity"] == pytest.approx(math.exp(-float(picked.sum()) / words), 1e-5)


def test_an_encoder_sees_what_it_would_predict(data: Path, tmp_path: Path) -> None:
    model = str(save_model(tmp_path, "bert"))
    with pytest.raises(ValueError, match="is an encoder, which sees the tokens"):
        built(data, model=model, tokenizer="own", dropout=None)


def test_a_pretrained_model(gpt2: str, data: Path, tmp_path: Path) -> None:
    task = built(data, model=gpt2, tokenizer="own", dropout=0.3)
    config = task.model.config
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.3, 0.3, 0.3)
    assert built(data, model=gpt2, tokenizer="own", dropout=None).model.config.attn_pdrop == 0.1
    assert math.isfinite(float(task.loss(task.model, a_batch(task)).detach()))
    with pytest.raises(ValueError, match="block 64 is longer than the 32 tokens"):
        built(data, model=gpt2, tokenizer="own", block=64)
    half = str(save_model(tmp_path / "half", "gpt2", torch.float16))
    assert built(data, model=half, tokenizer="own").model.dtype == torch.float32


def trained(data: Path, out: Path, method: str, **changes: Any) -> Row:
    run = Run(
        recipe="causal_lm",
        config=dataclasses.replace(SMALL, checkpoint_every=1, lens=method == "gfsa"),
        method=method,
        options=MethodConfig(filter_lr=1e-2) if method == "gfsa" else MethodConfig(),
        data_dir=data,
        out=out,
        device="cpu",
    )
    return carry_out(dataclasses.replace(run, **changes))


def test_whole_runs(data: Path, tmp_path: Path) -> None:
    rows = {m: trained(data, tmp_path, m) for m in ("plain", "gfsa", "gfsa-even")}
    assert rows["plain"].task == "wikitext-2 gpt2-d2-w16"
    assert rows["plain"].metric == "perplexity"
    assert not rows["plain"].higher_is_better
    assert [rows[m].added for m in ("plain", "gfsa", "gfsa-even")] == [0, 12, 6]
    assert len(list(tmp_path.rglob("lens.html"))) == 1
    assert rows["plain"].test == trained(data, tmp_path / "again", "plain").test
