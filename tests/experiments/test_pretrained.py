"""Pretrained models: what would be lost or made up in silence is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModel

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
