"""Filters that an earlier commit saved load today, and the model computes what it computed then."""

from __future__ import annotations

import json

import pytest
import torch

import gfsa
from gfsa.plugs.saving import files
from support.saved_filters import (
    FOLDER,
    PLUGGED,
    PRETRAINED,
    encoder,
    fill_filters,
    output_of,
)

EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def check_output(model: torch.nn.Module, name: str) -> None:
    torch.testing.assert_close(output_of(model), torch.tensor(EXPECTED[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PLUGGED)
def test_a_filter_folder(name: str) -> None:
    model = encoder()
    plain = output_of(model)
    gfsa.load(model, FOLDER / name)
    assert (output_of(model) - plain).abs().max() > 1e-2
    check_output(model, name)


@pytest.mark.parametrize("name", PLUGGED)
def test_is_written_again_as_it_was(name: str, tmp_path) -> None:
    model = encoder()
    gfsa.load(model, FOLDER / name)
    gfsa.save(model, tmp_path)
    (written, tensors), (before, tensors_before) = map(files.read, (tmp_path, FOLDER / name))
    for entry in written["filters"].values():
        # older versions did not say it
        assert entry.pop("traced") is False
        assert entry.pop("weights")
    assert written == {**before, "gfsa": gfsa.__version__}
    assert tensors.keys() == tensors_before.keys()
    assert all(torch.equal(tensors[key], value) for key, value in tensors_before.items())


def test_what_is_no_number_is_kept_too() -> None:
    def loaded(name: str) -> gfsa.GraphFilter:
        model = encoder()
        gfsa.load(model, FOLDER / name)
        return gfsa.filters_of(model)["layers.1.self_attn"]

    assert loaded("dropout-after").dropout_after == "filter"
    assert loaded("gfsa").dropout_after == "attention"
    assert loaded("lr-multiplier").lr_multiplier == 20.0
    assert loaded("exact").power == "exact"
    assert loaded("exact").degree == 4
    assert loaded("pruned").high == [0]


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_folder_of_transformers(name: str) -> None:
    model = gfsa.from_pretrained(type(PRETRAINED[name]()), FOLDER / name)
    assert len(gfsa.filters_of(model)) == 2
    check_output(model, name)


def test_a_whole_state_dict() -> None:
    model = encoder()
    gfsa.plug(model, K=4, layers=[2], learn=("wK",))
    plain = output_of(model)
    saved = torch.load(FOLDER / "state_dict.pt", weights_only=True)
    assert list(saved) == list(model.state_dict())
    model.load_state_dict(saved)
    assert (output_of(model) - plain).abs().max() > 1e-2
    check_output(model, "state_dict")


def test_the_numbers_are_those_that_were_set() -> None:
    model = encoder()
    gfsa.load(model, FOLDER / "gfsa")
    other = encoder()
    gfsa.plug(other, K=3)
    fill_filters(other)
    for name, filter in gfsa.filters_of(other).items():
        assert torch.equal(filter.theta, gfsa.filters_of(model)[name].theta)
