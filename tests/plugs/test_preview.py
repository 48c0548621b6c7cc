"""The preview of plug by the name of a model, also on the command line."""

from __future__ import annotations

import pytest
import transformers as hf
from typer.testing import CliRunner

import gfsa
from gfsa.cli import build as build_cli
from gfsa.plugs.preview import build, describe


def test_a_timm_name():
    report = describe("deit_small_patch16_224", learn=("wK",))
    assert report.dry_run
    assert len(report.plugged) == 12
    assert report.parameters == 72


def test_a_transformers_type_or_folder(tmp_path):
    assert len(describe("bert").plugged) == 12
    hf.BertConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    assert len(describe(str(tmp_path)).plugged) == 3


def test_nothing_is_allocated():
    assert all(p.is_meta for p in build("vit_base_patch16_224").parameters())
    assert all(p.is_meta for p in build("gpt2").parameters())


def test_an_unknown_name_suggests_others():
    with pytest.raises(ValueError, match=r"nothing is downloaded.*deit_small_patch16_224"):
        describe("deit_small_patch16_225")


def test_a_type_whose_defaults_make_no_model():
    with pytest.raises(ValueError, match="no model can be built from the default config of 'esm'"):
        describe("esm")


def test_maps_that_are_not_squares_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="kept in bands or blocks"):
        describe("longformer")


def test_on_the_command_line():
    shown = CliRunner().invoke(build_cli(), ["info", "cait_xxs24_224"])
    assert shown.exit_code == 0
    assert "would plug 24 layers" in shown.output
    assert "blocks.0.attn: 4 heads, adapter" in shown.output
    assert "class attention has one query" in shown.output
    for arguments in (["xcit_nano_12_p8_224"], ["no_such_model"]):
        refused = CliRunner().invoke(build_cli(), ["info", *arguments])
        assert refused.exit_code != 0


def test_a_folder_that_has_filters_already_says_so(tmp_path):
    config = hf.BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    config.save_pretrained(tmp_path)
    for plugged in (None, False, True):
        if plugged is not None:
            model = hf.BertModel(config)
            if plugged:
                gfsa.plug(model)
            model.save_pretrained(tmp_path)
        shown = CliRunner().invoke(build_cli(), ["info", str(tmp_path)])
        assert shown.exit_code == 0
        assert "would plug 1 layer," in shown.output
        assert ("has filters already" in shown.output) == bool(plugged)


def test_tracing_on_the_command_line():
    for options in ([], ["--trace"]):
        shown = CliRunner().invoke(build_cli(), ["info", "tiny_vit_5m_224", *options])
        assert shown.exit_code == 0
        assert "tracer" in shown.output
