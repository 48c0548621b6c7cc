"""Wrong models, data and files for the commands: one sentence that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import gfsa
from gfsa import cli
from gfsa.lens.report import FORMAT

hf = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders and files of which most are not what a command takes."""
    root = tmp_path_factory.mktemp("wrong")
    sizes = ("hidden_size", "intermediate_size")
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, **dict.fromkeys(sizes, 8)}
    model = hf.BertModel(hf.BertConfig(vocab_size=16, **small))
    model.save_pretrained(root / "bert")
    hf.ViTModel(hf.ViTConfig(image_size=8, patch_size=4, **small)).save_pretrained(root / "vit")
    clip = hf.CLIPConfig(
        text_config={"vocab_size": 16, "eos_token_id": 2, "bos_token_id": 1, **small},
        vision_config={"image_size": 8, "patch_size": 4, **small},
        projection_dim=8,
    )
    hf.CLIPModel(clip).save_pretrained(root / "clip")
    gfsa.plug(model)
    gfsa.save(model, root / "filters")
    for name, config in (("half", "{"), ("list", "[1]")):
        (root / name).mkdir()
        (root / name / "config.json").write_text(config)
    weights = (root / "bert" / "model.safetensors").read_bytes()
    (root / "cut").mkdir()
    (root / "cut" / "config.json").write_bytes((root / "bert" / "config.json").read_bytes())
    (root / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (root / "empty").mkdir()
    (root / "bytes").write_bytes(bytes(range(128, 256)))
    (root / "bytes.safetensors").write_bytes(bytes(range(128, 256)))
    save_file({"input_ids": torch.tensor(3)}, root / "single.safetensors")
    save_file({}, root / "none.safetensors")
    save_file({"input_ids": torch.full((2, 4), 99)}, root / "unknown_words.safetensors")
    reports = {"none": {}, "number": {"models": 3}, "bare": {"models": [{"name": "a"}]}}
    for name, report in reports.items():
        text = json.dumps({"format": FORMAT, "created": "", "gfsa": "", "data": "", **report})
        (root / f"report_{name}.json").write_text(text)
    (root / "text.txt").write_text("a line\n")
    return root


RANDOM = "--data random --samples 1 --tokens 4"
BERT = "diagnose --model bert --data"
# the command → the words of its one sentence
WRONG = {
    "info empty": "empty has no config.json; expected the folder of a whole model",
    "info filters": 'filters is filters alone, which gfsa.load(model, "filters") loads',
    "info half": "the config of half cannot be read: OSError",
    "info list": "the config of list cannot be read: TypeError",
    f"diagnose --model= {RANDOM}": "expected --model [LABEL=]MODEL[@FILTERS]",
    f"diagnose --model ./absent {RANDOM}": "./absent does not exist; expected the",
    f"diagnose --model ./text.txt {RANDOM}": "./text.txt is a file; expected the",
    f"diagnose --model empty {RANDOM}": "empty has no config.json",
    f"diagnose --model filters {RANDOM}": "filters is filters alone",
    f"diagnose --model list {RANDOM}": "the config of list cannot be read",
    f"diagnose --model cut {RANDOM}": "cut/model.safetensors is damaged",
    f"diagnose --model clip {RANDOM}": "clip (CLIPModel) takes no random inputs",
    f"diagnose --model bert --model vit {RANDOM}": (
        "vit (ViTModel) does not run on the inputs that were made of --data random: "
    ),
    f"{BERT} bytes": "bytes is damaged, or no text in UTF-8",
    f"{BERT} text.txt": "bert has no tokenizer",
    f"{BERT} bytes.safetensors": "bytes.safetensors is damaged, or no safetensors file",
    f"{BERT} absent.safetensors": "--data 'absent.safetensors' is neither a file",
    f"{BERT} single.safetensors": "in its first dimension",
    f"{BERT} none.safetensors": "of the shapes {}",
    f"{BERT} unknown_words.safetensors": (
        "does not run on the inputs that were made of --data unknown_words.safetensors"
    ),
    "diagnose --report report_none.json": "report_none.json is damaged",
    "diagnose --report report_number.json": "report_number.json is damaged",
    "diagnose --report report_bare.json": "report_bare.json is damaged",
    "diagnose --model bert --report report_none.json": (
        "--report shows what was measured before; leave out --model"
    ),
    f"diagnose --model bert {RANDOM} --html text.txt/page.html": (
        "text.txt cannot be a folder to write into"
    ),
    # before a model is loaded
    f"diagnose --model ./absent {RANDOM} --json empty": "empty is a folder; name a file in it",
}


@pytest.mark.parametrize(("command", "expected"), WRONG.items())
def test_one_sentence_says_what_is_wrong(
    place: Path, monkeypatch: pytest.MonkeyPatch, command: str, expected: str
) -> None:
    monkeypatch.chdir(place)
    shown = CliRunner().invoke(cli.build(), command.split())
    # a traceback is another exception
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert shown.exit_code in (1, 2)
    words = " ".join(shown.output.replace("│", " ").split())
    assert expected in words


def test_tune_names_the_gpus_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "nothing", "cuda:2"):
        shown = CliRunner().invoke(cli.build(), ["tune", "--device", device])
        assert shown.exit_code == 2
        assert f"--device is one of cuda, cuda:0, cuda:1, got '{device}'" in shown.output


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("absent", FileNotFoundError, "absent does not exist; expected the folder of a whole"),
        ("empty", FileNotFoundError, "empty has no config.json; expected the folder of a whole"),
        ("filters", FileNotFoundError, r"filters is filters alone, which gfsa.load\(model, "),
        ("cut", ValueError, "the weights of .*cut are damaged"),
        ("bert", ValueError, "bert was not saved from a plugged model"),
        # not a name on the hub
        ("~/absent", FileNotFoundError, "only a shell expands ~"),
    ],
)
def test_from_pretrained_says_what_a_folder_is(
    place: Path, name: str, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        gfsa.from_pretrained(hf.AutoModel, name if "~" in name else place / name)
