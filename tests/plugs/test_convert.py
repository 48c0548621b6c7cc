"""Checkpoints of the published code: models after its formula, converted, compute the same.

The formula is written out here, as H = w0·I + A + λ·(A + (K−1)(A² − A)) with a map in memory. The
published files are not used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import gfsa

GENERATOR = torch.Generator()
IMAGE = torch.randn(2, 3, 32, 32, generator=GENERATOR.manual_seed(0)).double()
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 3], [4, 5, 6, 7, 1, 1]])
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def published(attention: Tensor, lam: Tensor, K: int, w0: float = 0.0) -> Tensor:
    """The map that multiplies the values in the published code."""
    identity = torch.eye(attention.shape[-1], dtype=attention.dtype)
    high_order = attention + (K - 1) * (attention @ attention - attention)
    return w0 * identity + attention + lam[:, None, None] * high_order


def numbers(heads: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(heads, generator=GENERATOR).double() * 0.3)


# timm: attention modules with the formula in their forward


def vit_forward(self: Any, x: Tensor, **_: Any) -> Tensor:
    b, n, c = x.shape
    q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    a = (self.scale * q @ k.transpose(-2, -1)).softmax(-1)
    return self.proj((published(a, self.lamb, 4) @ v).transpose(1, 2).reshape(b, n, c))


def cait_forward(self: Any, x: Tensor) -> Tensor:
    b, n, c = x.shape
    q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    scores = self.proj_l((self.scale * q @ k.transpose(-2, -1)).permute(0, 2, 3, 1))
    a = self.proj_w(scores.permute(0, 3, 1, 2).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return self.proj((published(a, self.lamb, 4) @ v).transpose(1, 2).reshape(b, n, c))


def swin_forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    b, n, c = x.shape
    q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    scores = self.scale * q @ k.transpose(-2, -1) + self._get_rel_pos_bias()
    if mask is not None:
        windows = len(mask)
        scores = scores.view(-1, windows, *scores.shape[1:]) + mask[None, :, None]
        scores = scores.view(b, *scores.shape[2:])
    a = scores.softmax(-1)
    return self.proj((published(a, self.lamb, 3) @ v).transpose(1, 2).reshape(b, n, c))


FORWARDS = {
    "Attention": vit_forward,
    "TalkingHeadAttn": cait_forward,
    "WindowAttention": swin_forward,
}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
IMAGES = {
    "deit_small_patch16_224": SMALL,
    "deit_tiny_distilled_patch16_224": SMALL,
    "cait_xxs24_224": SMALL,
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
}


def image_model(name: str) -> nn.Module:
    return timm.create_model(name, num_classes=5, **IMAGES[name]).double().eval()


def published_image_model(name: str) -> nn.Module:
    """A model of timm with the parameters and the forward of the published code."""
    GENERATOR.manual_seed(1)
    torch.manual_seed(1)
    model = image_model(name)
    for module in list(model.modules()):
        forward = FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.lamb = numbers(module.num_heads)
            module.forward = functools.partial(forward, module)
    return model


def old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Swin's names of the published code, which is older than timm's of today."""
    renamed = {}
    for key, value in state.items():
        parts = key.replace("head.fc.", "head.").split(".")
        if parts[0] == "layers" and parts[2] == "downsample":
            parts[1] = str(int(parts[1]) - 1)
        renamed[".".join(parts)] = value
    renamed["layers.0.blocks.1.attn_mask"] = torch.zeros(1)
    return renamed


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str) -> None:
    source = published_image_model(name)
    state = source.state_dict()
    if name.startswith("swin"):
        state = old_names(state)
    torch.manual_seed(2)
    model = image_model(name)
    assert not torch.allclose(model(IMAGE), source(IMAGE))
    report = gfsa.convert(model, {"model": state, "epoch": 3})
    torch.testing.assert_close(model(IMAGE), source(IMAGE), rtol=0, atol=1e-6)
    assert report.parameters == sum(v.numel() for k, v in state.items() if k.endswith(".lamb"))
    for filter in gfsa.filters_of(model).values():
        assert (3 if name.startswith("swin") else 4) == filter.K
        assert filter.learn == ("wK",)
        assert filter.dropout_after == "filter"


# transformers: its own modules, with the formula as the attention function


def published_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    scaling = kwargs.get("scaling")
    scores = (
        query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if kwargs.get("position_bias") is not None:
        scores = scores + kwargs["position_bias"]
    if mask is not None:
        scores = scores + mask
    attention = scores.softmax(-1)
    settings = getattr(module, "published", None)
    if settings is not None:
        parameter, K, w0 = settings
        attention = published(attention, getattr(module, parameter), K, w0)
    return (attention @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _published_attention() -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS.register("published", published_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("published", eager_mask)
    yield
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop("published")


BERT = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    # weights of a size that lets attention differ from a mean
    "initializer_range": 0.5,
}
GPT2 = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
GPT2 |= {"initializer_range": 0.5}
T5 = {"vocab_size": 20, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
# class → its config, the parameter of the published code, K, w0
LANGUAGE: dict[str, tuple[dict[str, Any], str, int, float]] = {
    "BertForSequenceClassification": (BERT, "w_K", 3, -0.01),
    "RobertaForSequenceClassification": (BERT, "w_K", 5, -0.05),
    "AlbertForSequenceClassification": ({**BERT, "embedding_size": 8}, "w_K", 3, 0.05),
    "GPT2LMHeadModel": (GPT2, "w_K", 4, 0.02),
    "RobertaModel": (BERT, "lamb", 4, 0.0),
    "T5ForConditionalGeneration": (T5, "lamb", 3, 0.0),
}


def language_model(name: str, **options: Any) -> Any:
    cls = getattr(transformers, name)
    return cls(cls.config_class(**LANGUAGE[name][0], **options)).double().eval()


def published_language_model(name: str) -> Any:
    GENERATOR.manual_seed(1)
    torch.manual_seed(1)
    model = language_model(name, attn_implementation="published")
    _, parameter, K, w0 = LANGUAGE[name]
    for layer in gfsa.plug(model, dry_run=True).plugged:
        module = model.get_submodule(layer)
        setattr(module, parameter, numbers(4))
        module.published = (parameter, K, w0)
    return model


def output(model: Any) -> Tensor:
    batch = {"input_ids": TOKENS, "attention_mask": PADDING}
    if isinstance(model, transformers.T5ForConditionalGeneration):
        batch["decoder_input_ids"] = TOKENS[:, :4]
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize("name", LANGUAGE)
def test_language(name: str) -> None:
    _, parameter, K, w0 = LANGUAGE[name]
    source = published_language_model(name)
    state = dict(source.state_dict())
    # buffers that old versions saved
    state["transformer.h.0.attn.bias" if name.startswith("GPT") else "position_ids"] = torch.ones(1)
    torch.manual_seed(2)
    # the published configs keep the options of a run
    model = language_model(name, **({"K": K, "w_0": w0} if parameter == "w_K" else {}))
    report = gfsa.convert(model, state)
    torch.testing.assert_close(output(model), output(source), rtol=0, atol=1e-6)
    assert all("published" not in what for what in report.how.values())
    place = "attention" if parameter == "w_K" else "filter"
    for filter in gfsa.filters_of(model).values():
        assert (filter.K, filter.dropout_after) == (K, place)
    # the formula matters: without the filters the model computes something else
    gfsa.unplug(model)
    assert (output(model) - output(source)).abs().max() > 1e-3


def test_what_is_not_in_the_checkpoint_is_asked_for() -> None:
    state = published_language_model("BertForSequenceClassification").state_dict()
    model = language_model("BertForSequenceClassification")
    with pytest.raises(ValueError, match=r"got K=None and w0=None .*config.*Pass K= and w0="):
        gfsa.convert(model, state)
    with pytest.raises(ValueError, match=r"got K=3 and w0=None .*Pass K= and w0="):
        gfsa.convert(model, state, K=3)
    gfsa.convert(model, state, K=3, w0=-0.01)
    assert {f.K for f in gfsa.filters_of(model).values()} == {3}


def test_training_wrappers_and_heads_of_tasks() -> None:
    """A checkpoint of a wrapper goes into the model inside, filters alone, by their order."""
    source = published_language_model("RobertaModel")
    state = {f"module.encoder.{key}": value for key, value in source.state_dict().items()}
    model = language_model("RobertaModel")
    with pytest.raises(ValueError, match=r"layer 'encoder\..* does not have"):
        gfsa.convert(model, state)
    assert not gfsa.filters_of(model)
    model.load_state_dict(source.state_dict(), strict=False)
    gfsa.convert(model, state, weights=False, by_order=True)
    torch.testing.assert_close(output(model), output(source), rtol=0, atol=1e-6)


class TestCrossAttention:
    def state(self, value: float) -> dict[str, Tensor]:
        source = published_language_model("T5ForConditionalGeneration")
        state = dict(source.state_dict())
        for layer in range(2):
            key = f"decoder.block.{layer}.layer.1.EncDecAttention.lamb"
            state[key] = torch.full((4,), value)
        return state

    def test_of_zeros_changes_nothing(self) -> None:
        source = published_language_model("T5ForConditionalGeneration")
        model = language_model("T5ForConditionalGeneration")
        report = gfsa.convert(model, self.state(0.0))
        torch.testing.assert_close(output(model), output(source), rtol=0, atol=1e-6)
        assert len(report.plugged) == 4
        assert len(report.skipped) == 2

    def test_with_numbers_is_refused_or_named(self) -> None:
        model = language_model("T5ForConditionalGeneration")
        before = output(model)
        with pytest.raises(
            ValueError, match=r"EncDecAttention, where none can be: cross-attention"
        ):
            gfsa.convert(model, self.state(0.2))
        assert torch.equal(output(model), before)
        report = gfsa.convert(model, self.state(0.2), strict=False)
        assert len(report.plugged) == 4
        assert all("the checkpoint has one" in why for why in report.skipped.values())


def test_by_order() -> None:
    """DeiT of transformers names its layers otherwise than the published code."""
    source = published_image_model("deit_small_patch16_224")
    config = transformers.DeiTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    model = transformers.DeiTModel(config).double()
    with pytest.raises(
        ValueError, match=r"its attention layers are .*by_order=True, weights=False"
    ):
        gfsa.convert(model, source.state_dict())
    with pytest.raises(ValueError, match="pass weights=False"):
        gfsa.convert(model, source.state_dict(), by_order=True)
    # a file may have its names in another order
    state = dict(reversed(source.state_dict().items()))
    gfsa.convert(model, state, by_order=True, weights=False)
    lambs = [v for k, v in source.state_dict().items() if k.endswith(".lamb")]
    for filter, lamb in zip(gfsa.filters_of(model).values(), lambs, strict=True):
        torch.testing.assert_close(filter.weights()["wK"], lamb)
    shallow = transformers.DeiTModel(
        transformers.DeiTConfig(**{**config.to_dict(), "num_hidden_layers": 1})
    )
    with pytest.raises(ValueError, match=r"each of the 2 filters .* got 1 \("):
        gfsa.convert(shallow, source.state_dict(), by_order=True, weights=False)


def test_speech_names_the_parameter_beta() -> None:
    """Beside normalisations, whose bias may be called beta, too."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    state = dict(model.state_dict())
    for number in range(2):
        state[f"layers.{number}.self_attn.beta"] = torch.full((4,), 0.1 * (number + 1))
    state |= {"norm.beta": torch.zeros(16), "norm.gamma": torch.ones(16)}
    with pytest.raises(ValueError, match="Pass K= and w0="):
        gfsa.convert(model, state)
    with pytest.raises(ValueError, match=r"not expected norm\.beta, norm\.gamma"):
        gfsa.convert(model, state, K=4)
    gfsa.convert(model, state, K=4, weights=False)
    first, second = gfsa.filters_of(model).values()
    torch.testing.assert_close(first.coefficients(), torch.tensor([[0.0, 0.8, 0.3]] * 4))
    assert second.dropout_after == "filter"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.9.attn.lamb": torch.ones(4)}, r"blocks\.9\.attn', which"),
        ({"blocks.0.attn.lamb": torch.ones(3)}, "for each of the 4 heads"),
        ({"blocks.0.attn.lamb": torch.full((4,), torch.nan)}, "one finite number"),
        (
            dict.fromkeys(["blocks.0.attn.lamb", "blocks.1.attn.lamb"]),
            "code; got nothing",
        ),
        # no filter is left out, or takes the place of another
        ({"ema.blocks.0.attn.lamb": torch.ones(4)}, r"ema\.blocks\.0\.attn', which"),
        ({"module.blocks.0.attn.lamb": torch.ones(4)}, r"each of the 3 filters .* got 2 \("),
        ({"blocks.1.attn.lamb": torch.ones(2, 2)}, r"lamb of shape \(2, 2\)"),
        ({"blocks.1.attn.w_K": torch.ones(4)}, r"expected one vector .*blocks\.1\.attn\.w_K"),
        # weights
        ({"blocks.1.mlp.fc1.weight": None}, r"missing blocks\.1\.mlp\.fc1\.weight"),
        ({"head.weight": torch.ones(7, 32)}, r"size mismatch for head\.weight: .*\[7, 32\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_unchanged(
    change: dict[str, Tensor | None], message: str
) -> None:
    name = "deit_small_patch16_224"
    state = published_image_model(name).state_dict() | change
    state = {key: value for key, value in state.items() if value is not None}
    model = image_model(name)
    before = model(IMAGE)
    of_filters = any("attn" in key for key in change)
    for weights in (True, False) if of_filters else (True,):
        with pytest.raises(ValueError, match=message):
            gfsa.convert(model, state, weights=weights)
        assert torch.equal(model(IMAGE), before)
        assert not gfsa.filters_of(model)


def test_models_and_checkpoints_that_cannot_be_converted() -> None:
    name = "deit_small_patch16_224"
    state = published_image_model(name).state_dict()
    with torch.device("meta"):
        model = image_model(name)
    with pytest.raises(ValueError, match="on the device meta and cannot hold weights"):
        gfsa.convert(model, state)
    with pytest.raises(TypeError, match="weights_only=True"):
        gfsa.convert(model, "checkpoint.pth")  # type: ignore[arg-type]
    gfsa.convert(model, state, weights=False)
    with pytest.raises(ValueError, match="plugged already"):
        gfsa.convert(model, state)
