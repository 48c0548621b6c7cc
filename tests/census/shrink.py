"""Tiny configs of transformers: the default config of a class with its sizes made small.

A config is a dataclass. Each of its fields is looked up by name in :data:`RULES`; a field that no
rule names keeps its default, so that whatever makes a model special (gates, norms, biases, rotary
settings) stays as it is. Configs inside a config are shrunk in the same way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH = 32, 4, 2, 8
LAYERS, INNER, VOCABULARY, POSITIONS = 2, 48, 99, 128
IMAGE, PATCH = 32, 8
EXPERTS, CHOSEN_EXPERTS = 4, 2
MOST_LAYERS = 8
SECTIONED = (
    "colqwen2", "glm46v", "glm4v", "glm_image", "glm_ocr", "glmga", "paddleocr", "qwen2_5_omni",
    "qwen2_5_vl", "qwen2_vl",
)  # fmt: skip

Rule = int | Callable[[Any], Any]


def _at_most(limit: int) -> Rule:
    return lambda value: min(value, limit)


def _patch(value: Any) -> Any:
    return PATCH if value > PATCH else value


def _widths(values: Any) -> Any:
    # a model with stages grows from stage to stage; two sizes show that, and divide by all heads
    half = len(values) // 2
    return type(values)([WIDTH // 2 if i < half else WIDTH for i in range(len(values))])


def _heads(values: Any) -> Any:
    half = len(values) // 2
    return type(values)([KEY_HEADS if i < half else HEADS for i in range(len(values))])


def _ones(values: Any) -> Any:
    return type(values)([1] * len(values))


# the first pattern that matches a field's name counts; numbers and lists have tables of their own
NUMBERS: tuple[tuple[str, Rule], ...] = (
    (r"vocab_size_per_layer_input$|^vocab_size|_vocab_size$|^entity_vocab_size$", VOCABULARY),
    (r"^type_vocab_size$", lambda value: value),
    (r"(key_value|kv)_heads$", KEY_HEADS),
    (r"linear_num_(key|value)_heads$", HEADS),
    # with few of them many scores are 0, and which of equal scores is chosen varies with the length
    (r"^index_n_heads$", _at_most(16)),
    (r"heads?$|^attention_heads$", HEADS),
    (r"qk_rope_head_dim$|head_dim$|^d_kv$|^dim_head$|head_width$|_head_size$", HEAD_WIDTH),
    (r"lora_rank$", 16),
    (r"layers?$|^depth$|_depth$|^num_blocks$", _at_most(LAYERS)),
    (r"num_(local_)?experts$|routed_experts$|moe_num_experts$", EXPERTS),
    (r"experts_per_tok(en)?$|^moe_topk$|top_k_experts$|moe_top_?k$", CHOSEN_EXPERTS),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"first_k_dense_replace$", _at_most(1)),
    (r"intermediate_(size|dim)$|ffn_dim$|^d_ff$|^n_inner$|mlp_dim$|^d_inner$|ffn_hidden_size$"
     r"|inner_dim$|feedforward_dim$", INNER),
    (r"hidden_size$|hidden_dim$|^d_model$|^n_embd$|embed_dim$|embedding_(size|dim|dimension)$"
     r"|^dim$|emb_dim$|proj(ection)?_dim$|output_dim$|^d_embed$|_width$|^width$|^hidden_sizes?$"
     r"|projection_(size|hidden_size)$|bottleneck_dim$|^feature_size$|_d_model$"
     r"|^d_latents$", WIDTH),
    (r"^image_size$|^pretrain_image_size$|^input_size$", IMAGE),
    (r"^patch_size$|^patch_stride$", _patch),
    (r"^window_size$", _at_most(4)),
    (r"max_(source|target)_positions$|max_position_embeddings$|^n_positions$|^n_ctx$"
     r"|^context_length$|num_position_embeddings$|^max_seq_len", POSITIONS),
    (r"^sliding_window$", 5),
    (r"^index_topk$", 3),
    (r"^attention_window$|^local_attention$", 4),
    (r"^rotary_dim$", _at_most(4)),
    (r"^moe_k$", CHOSEN_EXPERTS),
    (r"^num_latents$", 8),
    (r"num_queries$|num_query_tokens$|^num_labels$", 6),
    (r"num_conv_pos_embeddings$", 4),
    (r"num_conv_pos_embedding_groups$", 2),
    (r"^mm_tokens_per_image$", 4),
    (r"^base_channels$", 32),
)  # fmt: skip

LISTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    (r"hidden_sizes$|^embed_dims?$|^conv_dim$|^dims$|^encoder_hidden_sizes$", _widths),
    (r"num_(attention_)?heads$|^heads$|^num_heads$", _heads),
    (r"^depths$|^num_blocks$|^layers$", _ones),
)

# token numbers have to be below the vocabulary's size, and different from one another
_TOKEN = re.compile(r"(_token_id|_token_index|_index|_token)$")


def shrink(config: Any, special: Mapping[str, Mapping[str, Any]]) -> Any:
    """A small config of the same class as ``config``.

    Args:
        config: an instance with default values.
        special: ``model_type`` → field values that override the rules for this type.
    """
    kind = type(config)
    changes: dict[str, Any] = {}
    tokens = VOCABULARY - 1
    for field in dataclasses.fields(kind):
        if not field.init or field.name.startswith("_"):
            continue
        # some fields vary by layer, and then refuse to be read by their plain name
        value = vars(config).get(field.name)
        default = field.default
        if _is_config(value):
            changes[field.name] = shrink(value, special)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            if _TOKEN.search(field.name) and value >= VOCABULARY:
                changes[field.name], tokens = tokens, tokens - 1
                continue
            small = _small(NUMBERS, field.name, value)
            # a number that the config derives from others (None by default) is derived again
            if small is not None and default is not None:
                changes[field.name] = small
        elif isinstance(value, list | tuple) and value and isinstance(value[0], int):
            small = _small(LISTS, field.name, value)
            if small is None and len(set(value)) <= 2 and not isinstance(value[0], bool):
                # (height, width)
                one = _small(NUMBERS, field.name, value[0])
                small = None if one is None else type(value)([one] * len(value))
            if small is not None and default is not None:
                changes[field.name] = small
    if "kv_lora_rank" in changes:
        # latent attention has as many heads of keys as of queries
        changes["num_key_value_heads"] = HEADS
    changes.update(_sections(config, changes))
    changes.update(_cycle(config, kind))
    for name, value in special.get(config.model_type, {}).items():
        changes[name] = value() if callable(value) else value
    return kind(**changes)


def _sections(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings whose sections add up to half of the rotated width."""
    rope = vars(config).get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    half = int(HEAD_WIDTH * rope.get("partial_rotary_factor", 1.0)) // 2
    # some models have sections of their own if the config names none
    if "mrope_section" not in rope and not config.model_type.startswith(SECTIONED):
        return {}
    return {"rope_parameters": {**rope, "mrope_section": [half - half // 2, half // 2, 0]}}


def _cycle(config: Any, kind: Any) -> dict[str, Any]:
    """Enough layers to have every kind of layer once, where a config repeats several."""
    kinds = vars(config).get("layer_types")
    if not isinstance(kinds, list) or "num_hidden_layers" not in vars(config):
        return {}
    needed = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    layers = max(LAYERS, needed) if needed <= MOST_LAYERS else LAYERS
    changed: dict[str, Any] = {"num_hidden_layers": layers}
    default = {field.name: field for field in dataclasses.fields(kind)}.get("layer_types")
    if default is not None and default.default is not None:
        changed["layer_types"] = kinds[:layers]
    return changed


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "model_type")


def _small(rules: Any, name: str, value: Any) -> Any:
    for pattern, rule in rules:
        if re.search(pattern, name):
            return rule(value) if callable(rule) else rule
    return None
