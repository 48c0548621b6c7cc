"""AttnScale averages the keys that a query sees, whatever a class calls its masks.

Padding must not count and the future must not leak; where a mask cannot be read, it is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gfsa.operators import AttentionOperator, DenseOperator
from gfsa.operators.visibility import Visibility
from gfsa_experiments import baselines
from gfsa_experiments.baselines.masks import refusal_of_reading

hf.logging.set_verbosity_error()

IDS = torch.randint(3, 61, (2, 10), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(2, 10, dtype=torch.long)
PADDED[0, -3:] = 0
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
GPT = {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
SWIN = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}


def build(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**options)).eval().double()


def apply(model: Any) -> None:
    baselines.apply(model, "attnscale")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for scale in baselines.parameters_of(model):
            scale.copy_(torch.randn(scale.shape, generator=generator) * 0.5)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("T5", "sdpa"), ("T5", "eager"), ("MT5", "sdpa"), ("MT5", "eager"), ("UMT5", "eager")],
)
@torch.no_grad()
def test_padding_of_t5_and_its_relatives_does_not_count(kind: str, implementation: str) -> None:
    model = build(kind, **T5, attn_implementation=implementation)
    apply(model)
    encoder = model.encoder
    whole = encoder(input_ids=IDS, attention_mask=PADDED)[0]
    other = torch.where(PADDED.bool(), IDS, 5)
    assert torch.equal(encoder(input_ids=other, attention_mask=PADDED)[0][0, :7], whole[0, :7])
    alone = encoder(input_ids=IDS[:1, :7])[0]
    torch.testing.assert_close(whole[0, :7], alone[0], rtol=0, atol=1e-6)
    # the decoder is causal
    later = IDS.clone()
    later[:, 5:] = 9
    outputs = [model(input_ids=IDS, decoder_input_ids=ids)[0] for ids in (IDS, later)]
    assert torch.equal(outputs[0][:, :5], outputs[1][:, :5])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("OpenAIGPT", GPT),
        (
            "GPTNeo",
            {
                "vocab_size": 61,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "window_size": 4,
                "attention_types": [[["global", "local"], 1]],
            },
        ),
    ],
)
@torch.no_grad()
def test_what_a_module_hides_by_itself_does_not_count(kind: str, options: dict[str, Any]) -> None:
    model = build(kind, **options)
    apply(model)
    cache = {} if kind == "OpenAIGPT" else {"use_cache": False}
    later = IDS.clone()
    later[:, 5:] = 9
    for mask in (None, PADDED):
        outputs = [model(ids, attention_mask=mask, **cache)[0] for ids in (IDS, later)]
        assert torch.equal(outputs[0][:, :5], outputs[1][:, :5])
        assert not torch.allclose(outputs[0][1, 5:], outputs[1][1, 5:])
    if kind == "GPTNeo":
        # a local layer sees four tokens: the first token is out of the last one's sight there
        layer = model.h[1].attn.attention
        x = torch.randn(1, 10, 32, dtype=torch.float64)
        first = x.clone()
        first[:, 0] = 1.0
        assert torch.equal(layer(x)[0][:, 4:], layer(first)[0][:, 4:])


@pytest.mark.parametrize("kind", ["Swin", "DonutSwin", "Swinv2"])
@pytest.mark.parametrize("images", [1, 3])
@torch.no_grad()
def test_shifted_windows_are_graphs_of_their_own(kind: str, images: int) -> None:
    model = build(kind, **SWIN)
    pixels = torch.randn(images, 3, 32, 32, dtype=torch.float64)
    plain = model(pixels)[0]
    baselines.apply(model, "attnscale")
    torch.testing.assert_close(model(pixels)[0], plain, rtol=0, atol=1e-9)
    baselines.remove(model)
    apply(model)
    together = model(pixels)[0]
    alone = torch.cat([model(image[None])[0] for image in pixels])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)


@torch.no_grad()
def test_swin_is_the_dense_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Swin", **SWIN)
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    apply(model)
    found = model(pixels)[0]
    scales = {}
    for name, module in model.named_modules():
        if hasattr(module, "gfsa"):
            scales[name] = module.gfsa.theta.clone()
    baselines.remove(model)
    by_module = {id(model.get_submodule(name)): scale for name, scale in scales.items()}

    def dense(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        shape = (*q.shape[:3], k.shape[2])
        mask = torch.zeros(shape, dtype=q.dtype) if mask is None else mask.expand(shape)
        scaling = options.get("scaling") or q.shape[-1] ** -0.5
        a = (q @ k.transpose(-2, -1) * scaling + mask).softmax(-1)
        m = (mask > -50).to(q.dtype)
        m = m / m.sum(-1, keepdim=True)
        h = m + (1 + by_module[id(module)][..., None]) * (a - m)
        return (h @ v).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", dense)
    torch.testing.assert_close(found, model(pixels)[0], rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_mask_that_hides_where_others_show_is_refused() -> None:
    model = build("Mpt", d_model=32, n_heads=4, n_layers=2, vocab_size=61, max_seq_len=64)
    baselines.apply(model, "attnscale")
    with pytest.raises(ValueError, match=r"masks of blocks\.0\.attn cannot be read"):
        model(IDS, use_cache=False)
    baselines.remove(model)
    model(IDS, use_cache=False)


def test_a_mask_of_another_name_is_refused() -> None:
    sides = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 32))
    }
    config = hf.FSMTConfig(
        src_vocab_size=61, tgt_vocab_size=61, d_model=32, langs=["a", "b"], **sides
    )
    model = hf.FSMTModel(config).eval()
    baselines.apply(model, "attnscale")
    with pytest.raises(TypeError, match="key_padding_mask, which cannot be read"):
        model(IDS, attention_mask=PADDED, decoder_input_ids=IDS)


@pytest.mark.parametrize("dense", [True, False])
def test_what_was_read_is_compared_with_what_is_used(dense: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    seen = {
        "causal": Visibility(causal=True),
        "all": Visibility(),
        "pairs": Visibility(None, causal),
    }
    operators: dict[str, Any] = {
        "causal": AttentionOperator(q, k, is_causal=True),
        "all": AttentionOperator(q, k),
        "pairs": AttentionOperator(q, k, causal),
    }
    for used, operator in operators.items():
        operator = DenseOperator(operator.dense()) if dense else operator
        for read, sight in seen.items():
            refusal, decided = refusal_of_reading(sight, operator, v, training=False)
            assert decided
            same = (read == "all") == (used == "all")
            narrower = used == "all" and not dense
            # a kernel has no map to look at; its masks alone cannot show that too little was read
            assert (refusal is None) == (same or narrower), (read, used)
            dropped, decided = refusal_of_reading(sight, operator, v, training=True)
            assert dropped is None or dropped == refusal
    assert refusal_of_reading(Visibility(), operators["all"], v[:, :, :1], False) == (None, False)
