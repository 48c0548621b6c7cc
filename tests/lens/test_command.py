"""``gfsa diagnose`` from the outside: names of models and data in, a table and files out."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import gfsa
from gfsa.lens import LensReport
from gfsa.lens.command import diagnose
from gfsa.lens.sources import read_data
from support.lens import SMALL, only
from support.tiny import UnknownAttention

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "dogs"]


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(diagnose)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def reported(folder: Path, *arguments: str | Path) -> LensReport:
    """The report of a command that succeeds."""
    done = run(*arguments, "--json", folder / "r.json")
    assert done.exit_code == 0, done.output
    return LensReport.from_json(folder / "r.json")


def refused(*arguments: str | Path) -> str:
    """What a command says, without line breaks, that fails."""
    done = run(*arguments)
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with its tokenizer, as save_pretrained leaves it."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("bert")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    hf.BertTokenizer(vocabulary).save_pretrained(folder)
    config = hf.BertConfig(**SMALL | {"vocab_size": len(vocabulary), "num_hidden_layers": 3})
    hf.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("the cat sat on a mat\n\ndogs looked\na dogs cat and the mat\n")
    return path


def test_texts(bert: Path, texts: Path, tmp_path: Path) -> None:
    html, json, figures = tmp_path / "a" / "page.html", tmp_path / "r.json", tmp_path / "figures"
    done = run(
        "--model", f"plain={bert}", "--data", texts, "--html", html, "--json", json,
        "--figures", figures, "--batch-size", "2", "--layers", "1,3",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "plain" in done.output
    report = LensReport.from_json(json)
    reading = report.models["plain"]
    # [CLS] and [SEP] count, padding does not: 8 + 4 + 8
    assert (reading.samples, reading.tokens) == (3, 20)
    assert [layer.depth for layer in reading.attention] == [1, 3]
    assert report.data == "texts.txt"
    assert "texts.txt" in html.read_text()
    assert (figures / "similarity.pdf").read_bytes().startswith(b"%PDF")

    again = run("--report", json, "--html", tmp_path / "again.html")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.html").stat().st_size == html.stat().st_size
    # layers 1 and 3 would be shown whatever is asked for
    assert "leave out --model, --layers" in refused(
        "--report", json, "--layers", "2", "--model", bert
    )


def test_a_byte_order_mark_is_no_word(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("cat", encoding="utf-8-sig")
    assert read_data(str(tmp_path / "a.txt"), 1).samples == ["cat"]


def test_a_table_needs_its_column_named(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text('label,text\n1,"a cat, and\ndogs"\n0,mat\n')
    assert read_data(str(path), 9, "text").samples == ["a cat, and\ndogs", "mat"]
    for column, said in (("", "--column names the one"), ("words", "has no column 'words'")):
        with pytest.raises(ValueError, match=rf"columns label, text: .*{said}"):
            read_data(str(path), 9, column)
    (tmp_path / "a.txt").write_text("cat")
    with pytest.raises(ValueError, match=r"which --data .*a\.txt is not"):
        read_data(str(tmp_path / "a.txt"), 9, "text")


def test_a_model_of_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_of_test.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)\n"
        "    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)\n"
        "number = int\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_file({"src": torch.randn(3, 5, 8)}, tmp_path / "src.safetensors")
    options = ("--data", "src.safetensors", "--no-spectral")
    report = reported(tmp_path, "--model", "mine=own_of_test:build", *options)
    assert report.models["mine"].samples == 3
    for name, said in (("number", "returns an nn.Module, got int"), ("none", "has no attribute")):
        assert said in refused("--model", f"own_of_test:{name}", *options)


@pytest.mark.parametrize("named", [["pipeline"], [5], [], "BertModel"])
def test_damaged_architectures_are_no_traceback(bert: Path, tmp_path: Path, named: object) -> None:
    folder = shutil.copytree(bert, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": named}))
    done = run("--model", folder, "--data", "random", "--no-spectral", "--samples", "2")
    assert isinstance(done.exception, SystemExit | None), done.exception


def test_compares_with_filters_saved_on_their_own_and_in_a_model(
    bert: Path, texts: Path, tmp_path: Path
) -> None:
    import transformers as hf

    model = hf.BertForSequenceClassification.from_pretrained(bert)
    gfsa.plug(model, w0=0.5)
    gfsa.save(model, tmp_path / "filters")
    model.save_pretrained(tmp_path / "whole")
    hf.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "whole")
    models = reported(
        tmp_path, "--model", f"plain={bert}", "--model", f"filters={bert}@{tmp_path / 'filters'}",
        "--model", f"whole={tmp_path / 'whole'}", "--data", texts, "--no-spectral",
    ).models  # fmt: skip
    assert models["plain"].attention[0].filter is None
    assert models["filters"].attention[0].coefficients == [[0.5, 1, 0]] * 4
    assert models["filters"].attention == models["whole"].attention
    assert models["filters"].features == models["whole"].features


def test_random_and_tensors(bert: Path, tmp_path: Path) -> None:
    sizes = ("--samples", "5", "--tokens", "6")
    report = reported(tmp_path, "--model", bert, "--data", "random", *sizes)
    assert "without meaning" in report.data
    assert (only(report).samples, only(report).tokens) == (5, 30)
    file = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.arange(12).reshape(3, 4)}, file)
    reading = only(reported(tmp_path, "--model", bert, "--data", file))
    assert (reading.samples, reading.tokens) == (3, 12)


def test_inputs_end_where_the_model_s_positions_do(bert: Path, texts: Path, tmp_path: Path) -> None:
    import transformers as hf

    short = shutil.copytree(bert, tmp_path / "short")
    config = hf.AutoConfig.from_pretrained(bert, max_position_embeddings=6)
    hf.BertForSequenceClassification(config).save_pretrained(short)
    # its positions begin behind that of padding
    roberta = tmp_path / "roberta"
    hf.RobertaModel(hf.RobertaConfig(**SMALL, max_position_embeddings=10)).save_pretrained(roberta)
    options = ("--samples", "3", "--no-spectral", "--json", tmp_path / "r.json")
    for model, data, most, tokens in (
        (short, "random", 6, 18),
        (short, texts, 6, 6 + 4 + 6),
        (roberta, "random", 8, 24),
    ):
        done = run("--model", model, "--data", data, *options)
        assert f"has positions for {most} tokens" in done.output
        assert only(LensReport.from_json(tmp_path / "r.json")).tokens == tokens


@pytest.mark.parametrize("sizes", [[0], [3, 2], [3, None], []])
def test_tensors_that_are_no_samples(tmp_path: Path, sizes: list[int | None]) -> None:
    shapes = [() if size is None else (size, 4) for size in sizes]
    path = tmp_path / "none.safetensors"
    save_file({str(at): torch.zeros(shape) for at, shape in enumerate(shapes)}, path)
    with pytest.raises(ValueError, match="as many samples in its first dimension, at least 1"):
        read_data(str(path), 9)


def test_timm_on_a_folder_of_images(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    from PIL import Image

    for number in range(3):
        Image.new("RGB", (40, 30), (number * 80, 10, 200)).save(tmp_path / f"{number}.png")
    options = ("--untrained", "--data", tmp_path, "--trace")
    reading = only(reported(tmp_path, "--model", "timm:test_vit", *options))
    assert reading.samples == 3
    assert len(reading.attention) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a model and data"),
        (["--model", "no_such_module:build", "--data", "random"], "No module named"),
        (["--model", "timm:no_such_model", "--data", "random"], "no model 'no_such_model'"),
        # data is read before a model is loaded
        (["--model", "no_such_module:build", "--data", "/no/such/file"], "is neither a file"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_attention_that_no_adapter_knows_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = ModuleType("own_module")
    own.build = lambda: torch.nn.Sequential(UnknownAttention())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_module", own)
    file = tmp_path / "inputs.safetensors"
    save_file({"input": torch.randn(3, 5, 8)}, file)
    assert "with --trace gfsa follows" in refused("--model", "own_module:build", "--data", file)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["adapter_config.json"], "is an adapter of peft"),
        (["config.json", "environment.json"], "--set lens=true for a lens page"),
    ],
)
def test_folders_without_a_model_of_transformers_say_what_they_are(
    tmp_path: Path, files: list[str], said: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    assert said in refused("--model", tmp_path, "--data", "random")


# "2-" could mean from the second on
@pytest.mark.parametrize("layers", ["first", "2-", "-2", ""])
def test_layers_that_are_none(bert: Path, layers: str) -> None:
    done = run("--model", bert, "--data", "random", "--layers", layers)
    assert done.exit_code == 2
    assert "1,5-8,12" in done.output


def test_a_model_with_another_tokenizer_is_said(bert: Path, texts: Path, tmp_path: Path) -> None:
    """All models are measured on the inputs of the first one."""
    other = shutil.copytree(bert, tmp_path / "other")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *reversed(WORDS)]
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.BertTokenizer({word: i for i, word in enumerate(words)})
    tokenizer.save_pretrained(other)
    options = ("--data", texts, "--no-spectral")
    done = run("--model", f"a={bert}", "--model", f"b={other}", *options)
    assert done.exit_code == 0, done.output
    assert "b makes other inputs of texts.txt than a" in " ".join(done.output.split())
    same = shutil.copytree(bert, tmp_path / "same")
    assert "other inputs" not in run("--model", f"a={bert}", "--model", same, *options).output
    # a folder of a run often has no tokenizer
    for file in same.glob("*token*"):
        file.unlink()
    (same / "vocab.txt").unlink(missing_ok=True)
    done = run("--model", f"a={bert}", "--model", f"b={same}", *options)
    assert done.exit_code == 0, done.output
    assert "other inputs" not in done.output
    # then it makes no inputs either: every word would be unknown
    assert "has no tokenizer" in refused("--model", same, *options)
