"""Diffusion transformers of diffusers: DiT, PixArt, Stable Diffusion 3, Flux."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
from torch import Tensor

import gfsa
from support.plugging import check_backbone, filtered_softmax, randomise

diffusers.utils.logging.set_verbosity_error()


_SMALL = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "sample_size": 8}
_BLOCKS = "transformer_blocks"


def dit(**sizes: int) -> Any:
    sizes = {**_SMALL, "num_layers": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 4, **sizes}
    return diffusers.DiTTransformer2DModel(**sizes)


def pixart() -> Any:
    return diffusers.PixArtTransformer2DModel(
        **_SMALL, num_layers=2, out_channels=8, cross_attention_dim=16, caption_channels=12
    )


def sd3(dual: tuple[int, ...] = ()) -> Any:
    return diffusers.SD3Transformer2DModel(
        **_SMALL,
        patch_size=2,
        num_layers=3,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=dual,
        # with fused projections diffusers leaves this norm out, filtered or not
        qk_norm="rms_norm" if dual else None,
    )


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=12,
        axes_dims_rope=(4, 4, 8),
    )


# by name: how it is built, its self-attention, and its cross-attention
MODELS: dict[str, tuple[Callable[[], Any], list[str], list[str]]] = {
    "DiT": (dit, [f"{_BLOCKS}.{i}.attn1" for i in range(2)], []),
    "PixArt": (pixart, *([f"{_BLOCKS}.{i}.attn{j}" for i in range(2)] for j in (1, 2))),
    "SD3": (sd3, [f"{_BLOCKS}.{i}.attn" for i in range(3)], []),
    # a second attention, of the image tokens alone, in some blocks
    "SD3.5": (
        lambda: sd3(dual=(0,)),
        [f"{_BLOCKS}.{name}" for name in ("0.attn", "0.attn2", "1.attn", "2.attn")],
        [],
    ),
    "Flux": (flux, [f"{part}{_BLOCKS}.{i}.attn" for part in ("", "single_") for i in range(2)], []),
}


def inputs_of(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    time = torch.tensor([3.0, 700.0])
    if name == "Flux":
        places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
        return {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 5, 12),
            "pooled_projections": noise(2, 12),
            "timestep": time / 1000,
            "img_ids": places,
            "txt_ids": torch.zeros(5, 3),
        }
    image = {"hidden_states": noise(2, 4, 8, 8), "timestep": time.long()}
    if name == "DiT":
        return {**image, "class_labels": torch.tensor([1, 7])}
    text = {**image, "encoder_hidden_states": noise(2, 5, 12)}
    if name in ("SD3", "SD3.5"):
        return {**text, "pooled_projections": noise(2, 12)}
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    none = {"resolution": None, "aspect_ratio": None}
    return {**text, "encoder_attention_mask": mask, "added_cond_kwargs": none}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    # some start as zeros, which would hide what is before them
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def forward(model: Any, name: str) -> Tensor:
    inputs = {
        key: x.to(model.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in inputs_of(name).items()
    }
    sample: Tensor = model(**inputs).sample
    return sample


run = torch.no_grad()(forward)


def give_filters(model: Any) -> Any:
    gfsa.plug(model)
    return randomise(model, scale=0.5)


def assert_dense(found: Tensor, filtered: Any, plain: Any, name: str) -> None:
    """The output of the filtered model is that of the dense formula in the plain one."""
    coefficients = [filter.coefficients().detach() for filter in gfsa.filters_of(filtered).values()]
    with filtered_softmax(plain, coefficients):
        expected = run(plain, name)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_every_square_attention_is_plugged_and_no_other(name: str, tmp_path: Path) -> None:
    _, plugged, crossing = MODELS[name]
    report = check_backbone(lambda: build(name), lambda model: forward(model, name), tmp_path)
    assert list(report.plugged) == plugged
    assert list(report.skipped) == crossing
    assert all("cross-attention has no powers" in reason for reason in report.skipped.values())


@pytest.mark.parametrize("name", ["PixArt", "SD3", "Flux"])
@pytest.mark.parametrize("order", ["fuse, then plug", "plug, then fuse"])
def test_fused_projections(name: str, order: str) -> None:
    plain = build(name)
    expected = run(give_filters(copy.deepcopy(plain)), name)
    model = copy.deepcopy(plain)
    if order == "plug, then fuse":
        give_filters(model)
        model.fuse_qkv_projections()
    else:
        model.fuse_qkv_projections()
        give_filters(model)
    assert any("qkv" in key for key in dict(model.named_modules()))
    torch.testing.assert_close(run(model, name), expected, rtol=0, atol=2e-6)
    model.unfuse_qkv_projections()
    torch.testing.assert_close(run(model, name), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["SD3", "Flux"])
@pytest.mark.parametrize("order", ["plug, then LoRA", "LoRA, then plug"])
def test_lora_beside_filters(name: str, order: str) -> None:
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    plain = build(name)
    model = copy.deepcopy(plain)
    if order == "plug, then LoRA":
        give_filters(model)
        model.add_adapter(config)
    else:
        model.add_adapter(config)
        give_filters(model)
    adapted = copy.deepcopy(model)
    gfsa.unplug(adapted)
    found = run(model, name)
    assert_dense(found, model, adapted, name)
    assert not torch.allclose(found, run(give_filters(plain), name), atol=1e-4)
    # peft freezes everything that is there when it comes
    trained = {key for key, x in model.named_parameters() if x.requires_grad}
    assert any("lora_A" in key for key in trained)
    assert any(key.endswith("gfsa.theta") for key in trained) == (order == "LoRA, then plug")
    inputs = inputs_of(name)
    model.train()(**inputs).sample.square().mean().backward()
    for key, parameter in model.named_parameters():
        if key in trained and "context" not in key:
            assert parameter.grad is not None, key


def test_whole_models_are_loaded_by_diffusers(tmp_path: Path) -> None:
    model = dit()
    gfsa.plug(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"a model of another library.*gfsa\.load"):
        gfsa.from_pretrained(type(model), tmp_path)
    with pytest.raises(ValueError, match=r"weights=True is for .*weights=False"):
        gfsa.push_to_hub(model, "user/name", weights=True)


@pytest.mark.parametrize("name", ["PixArt", "Flux"])
def test_compiled(name: str) -> None:
    model = give_filters(build(name))
    expected = run(model, name)
    for layer in gfsa.filters_of(model):
        block = model.get_submodule(layer.rpartition(".")[0])
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(model, name), expected, rtol=0, atol=2e-6)


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        # its forward comes before that of blocks which are in the model before it
        mid_block_type=None,
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=12,
    )


def test_a_unet(tmp_path: Path) -> None:
    image, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)

    def run(model: Any) -> Tensor:
        times = torch.tensor([3, 700])
        return model(image.to(model.dtype), times, text.to(model.dtype)).sample

    report = check_backbone(unet, run, tmp_path)
    assert len(report.plugged) == len(report.skipped) > 0
    assert all(name.endswith("attn1") for name in report.plugged)
    assert all(name.endswith("attn2") for name in report.skipped)


def test_an_image_autoencoder() -> None:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).eval()
    image = torch.randn(2, 3, 8, 8)
    before = model.encode(image).latent_dist.mean
    gfsa.plug(model)
    assert torch.equal(model.encode(image).latent_dist.mean, before)
    # the decoder's filter was not called yet, so its first forward is watched as well
    model.decode(model.encode(image).latent_dist.mean)
    assert len(gfsa.filters_of(model)) == 2


def test_another_processor_after_plugging_is_refused() -> None:
    model = give_filters(build("DiT"))
    layer = model.transformer_blocks[1].attn1
    layer.set_processor(diffusers.models.attention_processor.AttnProcessor())
    with pytest.raises(ValueError, match=r"with AttnProcessor cannot be filtered: gfsa does not"):
        run(model, "DiT")


def test_a_layer_that_is_given_other_tokens_is_refused() -> None:
    layer = build("DiT").transformer_blocks[0].attn1
    model = torch.nn.Sequential(layer)
    gfsa.plug(model)
    with pytest.raises(ValueError, match="it is given encoder_hidden_states: cross-attention"):
        layer(torch.randn(2, 5, 16), encoder_hidden_states=torch.randn(2, 5, 16))


def test_a_backend_that_does_not_call_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers import transformer_flux

    model = give_filters(build("Flux"))
    monkeypatch.setattr(
        transformer_flux, "dispatch_attention_fn", lambda query, *args, **kwargs: query
    )
    with pytest.raises(ValueError, match=r"called torch's attention 0 times.*'native'"):
        run(model, "Flux")


def test_what_a_forward_costs(costs: Any) -> None:
    torch.manual_seed(0)
    plain = dit(num_attention_heads=4, attention_head_dim=32, sample_size=32, patch_size=2).eval()
    filtered = give_filters(copy.deepcopy(plain))
    inputs = {
        "hidden_states": torch.randn(2, 4, 32, 32),
        "timestep": torch.tensor([3, 700]),
        "class_labels": torch.tensor([1, 7]),
    }

    def forward(model: Any) -> None:
        with torch.no_grad():
            model(**inputs)

    costs(forward, filtered, plain, "a forward (DiT, 2 layers of 128 features, 2 × 256 tokens)")


def test_the_page_on_diffusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "diffusion.md"
    blocks = re.findall(r"```python no-run\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
