"""Pretrained models: what would be lost or made up in silence is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForImageClassification

import gfsa
from gfsa_experiments.data.pretrained import load_model, load_tokenizer
from support.tiny_texts import save_model


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    """transformers makes an empty one, to which every word is unknown."""
    folder = str(save_model(tmp_path, "bert"))
    assert len(load_tokenizer(folder)) > 20
    for file in tmp_path.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer: every word would be unknown"):
        load_tokenizer(folder)


def test_a_folder_with_filters(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path, "bert"))
    model = load_model(AutoModel, folder)
    gfsa.plug(model)
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="without the filters of its 2 layers"):
        load_model(AutoModel, folder)
    gfsa.unplug(model)
    model.save_pretrained(folder)
    assert not gfsa.filters_of(load_model(AutoModel, folder))


def test_a_damaged_folder(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "bert")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, settings = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"the weights of .* are damaged"):
        load_model(AutoModel, str(folder))
    for text, reason in (("{", "Expecting property name"), ("[1]", "expected a JSON object")):
        config.write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json is damaged: {reason}"):
            load_model(AutoModel, str(folder))
    weights.write_bytes(whole)
    config.write_text(settings)
    # transformers' own message has hundreds of names of configs
    with pytest.raises(ValueError, match=r"no AutoModelForImageClassification for it$"):
        load_model(AutoModelForImageClassification, str(folder))
