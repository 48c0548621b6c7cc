"""The language modelling recipe on tiny data and models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gfsa
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks.pretrain.data import count_words, read_lines
from gfsa_experiments.tasks.pretrain.model import causal_by_kernel
from gfsa_experiments.tasks.pretrain.recipe import CausalLMConfig, LanguageTask
from support.hub import HubPart, fake_hub
from support.tiny_runs import tiny_run
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


def built(data: Path, **settings: Any) -> LanguageTask:
    config = dataclasses.replace(SMALL, **settings)
    config.check()
    torch.manual_seed(config.seed)
    task = LanguageTask(config, data)
    task.model.eval()
    return task


def a_batch(task: LanguageTask, split: str = "train") -> dict[str, Any]:
    return task.rows[split].__getitems__([0, 2])


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
    lines = read_lines(tmp_path, name, "valid")
    assert "".join(f"{line}\n" for line in lines) == corpus(3)
    assert count_words(lines) == len(corpus(3).replace("\n", "<eos>").split())


@pytest.mark.filterwarnings("default")
def test_words_are_counted_as_officially(tmp_path: Path) -> None:
    write(tmp_path / "wiki.test.tokens", corpus(3))
    with pytest.warns(UserWarning, match=r"has 36 words, the official file 245,569"):
        read_lines(tmp_path, "wikitext-2", "test")


def test_without_files_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" = Title = \n", "", " No it was n't Black Monday \n"]
    asked = fake_hub(monkeypatch, lambda *which: HubPart(text=texts))
    with pytest.warns(UserWarning, match="Using hub:Salesforce/wikitext"):
        lines = read_lines(tmp_path, "wikitext-2", "valid")
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1", "validation")]
    assert lines == [" = Title = ", "", " No it was n't Black Monday "]


@pytest.mark.parametrize("filtered", [False, True])
def test_the_loss_is_that_of_transformers(filtered: bool, data: Path) -> None:
    task = built(data)
    if filtered:
        gfsa.plug(task.model, w0=0.3, w1=0.8, wK=0.2)
    ids = task.rows["train"].ids(a_batch(task))
    expected = task.model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(task.loss(task.model, a_batch(task)), expected)


@pytest.mark.parametrize("filtered", [False, True])
def test_the_model_sees_no_later_token(filtered: bool, data: Path) -> None:
    task = built(data)
    if filtered:
        gfsa.plug(task.model, w0=0.3, w1=0.8, wK=0.2)
    ids = task.rows["train"].ids(a_batch(task))
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 300
    with causal_by_kernel(task.model):
        before, after = (task.model(input_ids=x).logits for x in (ids, changed))
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@torch.no_grad()
def test_perplexity_by_hand(data: Path) -> None:
    task = built(data)
    rows = task.rows["test"]
    every = range(len(rows))
    parts = [rows.__getitems__(list(some)) for some in (every[:3], every[3:])]
    scores = task.score([task.predict(task.model, part) for part in parts])
    ids = rows.ids(rows.__getitems__(list(every)))
    logits = task.model(input_ids=ids).logits.double().log_softmax(-1)
    picked = logits[:, :-1].gather(-1, ids[:, 1:, None])
    assert scores["perplexity"] == pytest.approx(math.exp(-float(picked.mean())), rel=1e-5)
    # the same loss over fewer words than tokens: those of the whole text, by its tokens
    assert scores["word_perplexity"] > scores["perplexity"]
    share = picked.numel() / len(rows._host)
    words = count_words(read_lines(data, "wikitext-2", "test")) * share
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


def test_whole_runs(data: Path, tmp_path: Path) -> None:
    def trained(out: Path, method: str) -> Row:
        settings = {"checkpoint_every": 1, "lens": method == "gfsa"}
        return carry_out(tiny_run("causal_lm", SMALL, data, out, method, **settings))

    rows = {m: trained(tmp_path, m) for m in ("plain", "gfsa", "gfsa-even")}
    assert rows["plain"].task == "wikitext-2 gpt2-d2-w16"
    assert rows["plain"].metric == "perplexity"
    assert not rows["plain"].higher_is_better
    assert [rows[m].added for m in ("plain", "gfsa", "gfsa-even")] == [0, 12, 6]
    assert len(list(tmp_path.rglob("lens.html"))) == 1
    assert rows["plain"].test == trained(tmp_path / "again", "plain").test
