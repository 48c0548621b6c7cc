"""What transformers changed between 5.17 and 5.22 in the parts that gfsa hooks into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor

import gfsa
from support.zoo import VOCABULARY, ZOO, randomise

hf.logging.set_verbosity_error()

IMAGE = VOCABULARY - 1
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXT = {
    **_SIZES,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_VISION = {**_SIZES, "image_size": 28, "patch_size": 14}


def plugged(model: Any) -> Any:
    model = model.float().eval()
    gfsa.plug(model, K=3)
    randomise(model)
    with torch.no_grad():
        # the largest logits of a random model are closer to one another than rounding should decide
        model.get_output_embeddings().weight.mul_(20)
    return model


def decoder(name: str) -> Any:
    return plugged(ZOO[name].model(ZOO[name].implementations[0]))


def tokens(length: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, IMAGE, (2, length), generator=generator)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_dynamic_cache_is_empty_after_reset(name: str) -> None:
    """It drops its tokens; before, it had zeroed them and kept their number."""
    model = decoder(name)
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(9), past_key_values=cache)
        cache.reset()
        prompt = tokens(7, seed=4)
        found = model(prompt, past_key_values=cache).logits
        assert close(found, model(prompt, use_cache=False).logits)
        newest = tokens(1, seed=5)
        found = model(newest, past_key_values=cache).logits
        whole = model(torch.cat([prompt, newest], 1), use_cache=False).logits
    assert close(found, whole[:, -1:])


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_that_records_its_past(name: str) -> None:
    """Until it is cropped it keeps more tokens than it returns; so do the powers beside it."""
    model = decoder(name)
    cache = hf.DynamicCache(config=model.config)
    cache.activate_past_recording()
    parts = [tokens(7), tokens(3, seed=4), tokens(2, seed=5), tokens(3, seed=6)]
    with torch.no_grad():
        for part in parts[:3]:
            model(part, past_key_values=cache)
        # the last two parts were wrong guesses
        cache.crop(-5)
        found = model(parts[3], past_key_values=cache).logits
        whole = model(torch.cat([parts[0], parts[3]], 1), use_cache=False).logits
    assert close(found, whole[:, -3:])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("guesses", [{"prompt_lookup_num_tokens": 3}, {"assistant": "llama"}])
def test_assisted_decoding(name: str, guesses: dict[str, Any]) -> None:
    model = decoder(name)
    if "assistant" in guesses:
        # the draft's own cache is not cropped between its own calls of generate
        guesses = {"assistant_model": decoder(name)}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    # a prompt with repetitions, in which a guess may be found
    prompt = tokens(4)[:1].repeat(1, 3)
    found = model.generate(prompt, **options, **guesses)
    assert torch.equal(found, model.generate(prompt, **options, use_cache=False))


def test_an_fp8_cache_is_refused() -> None:
    model = decoder("llama")
    quantised = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with pytest.raises(TypeError, match="cannot decode with a Fp8QuantizedLayer"):
        model.generate(tokens(7), max_new_tokens=2, **quantised)


def llava() -> Any:
    vision = hf.CLIPVisionConfig(**_VISION, projection_dim=32)
    text = hf.LlamaConfig(**_TEXT)
    config = hf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    return hf.LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = hf.Gemma3Config(
        text_config={**_TEXT, **kinds},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    model = hf.Gemma3ForConditionalGeneration(config)
    # it starts at zero, with which pictures say nothing
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def picture_and_text(model: Any) -> dict[str, Tensor]:
    ids = torch.cat([torch.ones(2, 1).long(), torch.full((2, 4), IMAGE), tokens(3)], 1)
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    if isinstance(model, hf.Gemma3ForConditionalGeneration):
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs


@pytest.mark.parametrize("build", [llava, gemma3])
@pytest.mark.parametrize("beams", [1, 3])
def test_pictures_are_encoded_before_the_first_forward(build: Any, beams: int) -> None:
    """``generate`` calls the vision tower by itself; its filters are called there."""
    torch.manual_seed(0)
    model = plugged(build())
    inputs = picture_and_text(model)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    options = {**options, "suppress_tokens": [IMAGE], "eos_token_id": None}
    found = model.generate(**inputs, **options)
    assert torch.equal(found, model.generate(**inputs, **options, use_cache=False))
    with torch.no_grad():
        before = model(**inputs).logits
        for name, filter in gfsa.filters_of(model).items():
            if "vision" in name:
                filter.theta.zero_()
        # the vision tower's filters are part of what was compared
        assert not close(model(**inputs).logits, before)


def test_one_part_of_a_model_is_switched() -> None:
    torch.manual_seed(0)
    model = plugged(llava())
    inputs = picture_and_text(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation({"text_config": "eager"})
        assert model.config.text_config._attn_implementation == "eager"
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert close(model(**inputs).logits, expected)


def test_positions_of_logits_by_sample() -> None:
    model = decoder("llama")
    ids, kept = tokens(9), torch.tensor([[1, 4], [0, 8]])
    with torch.no_grad():
        found = model(ids, logits_to_keep=kept).logits
        whole = model(ids).logits
    assert close(found, torch.take_along_dim(whole, kept[..., None], 1))


def test_load_adapter_loads_the_filters_of_an_adapter(tmp_path: Path) -> None:
    """On a plugged base; ``load_adapter`` of 5.17 leaves out whatever is in ``modules_to_save``."""
    config = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["gfsa"], init_lora_weights=False
    )
    model = peft.get_peft_model(decoder("llama"), config).eval()
    model.save_pretrained(tmp_path)
    base = ZOO["llama"].model("sdpa").float()
    base.get_output_embeddings().weight.data.mul_(20)
    gfsa.plug(base, K=3)
    base.load_adapter(tmp_path)
    expected = [filter.theta for filter in gfsa.filters_of(model).values()]
    assert all(map(torch.equal, (f.theta for f in gfsa.filters_of(base).values()), expected))
    with torch.no_grad():
        assert torch.equal(base.eval()(tokens(7)).logits, model(tokens(7)).logits)
