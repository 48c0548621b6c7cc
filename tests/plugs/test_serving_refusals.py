"""What ``gfsa serve`` refuses before it loads weights; tests/engines runs the server itself."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gfsa
from gfsa import cli

hf = pytest.importorskip("transformers")
serving = pytest.importorskip("gfsa.adapters.transformers.serving")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, a classifier and the filters of either, as they are saved."""
    root = tmp_path_factory.mktemp("saved")
    config = hf.GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    for name, model_class in (
        ("writes", hf.GPT2LMHeadModel),
        ("classifies", hf.GPT2ForSequenceClassification),
    ):
        model = model_class(config)
        gfsa.plug(model, K=3)
        model.save_pretrained(root / name)
    gfsa.save(model, root / "filters")
    (root / "empty").mkdir()
    return root


def test_a_language_model_is_served(folders: Path) -> None:
    assert serving.refusal_to_serve(str(folders / "writes"), "main") is None


def test_a_classifier_stops_the_start(folders: Path) -> None:
    path = folders / "classifies"
    with pytest.raises(serving.NotServedError) as stopped:
        serving.FilteredModelManager(device="cpu", force_model=str(path))
    message = str(stopped.value)
    assert f"{path} is a GPT2ForSequenceClassification, which generates no text" in message
    assert "expects a causal language model" in message
    assert f'gfsa.from_pretrained(transformers.GPT2ForSequenceClassification, "{path}")' in message


def test_folders_that_are_no_model_say_what_they_are(folders: Path) -> None:
    filters = serving.refusal_to_serve(str(folders / "filters"), "main")
    assert "is filters alone, which gfsa.load(model," in filters
    assert "has no config.json" in serving.refusal_to_serve(str(folders / "empty"), "main")
    absent = serving.refusal_to_serve(str(folders / "absent"), "main")
    assert "absent does not exist; expected the folder of a whole model" in absent


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["MyOwnLM"]}, "is a MyOwnLM, which transformers"),
        ([1], "cannot be read"),
    ],
)
def test_configs_without_a_class_of_transformers(
    folders: Path, tmp_path: Path, changed: dict | list, reason: str
) -> None:
    config = json.loads((folders / "writes" / "config.json").read_text())
    written = {**config, **changed} if isinstance(changed, dict) else changed
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert reason in serving.refusal_to_serve(str(tmp_path), "main")


@pytest.mark.parametrize("error", [ValueError("no\n  model"), OSError("no model")])
def test_the_command_says_in_one_line_why_it_does_not_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(arguments: list[str]) -> None:
        raise error

    monkeypatch.setattr(serving, "run", fails)
    shown = CliRunner().invoke(cli.build(), ["serve", "folder"])
    assert (shown.exit_code, shown.output) == (2, "gfsa serve: no model\n")
