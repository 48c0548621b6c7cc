r"""Continuous batching with room for the powers of past tokens: memory, forks and offloading.

transformers' manager builds one paged cache, of as many blocks as the memory of the device holds.
Here a block also holds :math:`A v, …, A^{m-1} v` of its tokens: they are counted when the number of
blocks is chosen, copied when a request is forked, and moved when a request goes to the CPU. Blocks
that requests with the same prompt share are shared with their powers, which in causal attention
depend on the same earlier tokens as the keys and values do.

How a cache is laid out depends on the version of transformers: ``paged_groups.py`` (5.15 to 5.17),
``paged_sectors.py`` (since 5.19).
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from gfsa.adapters.transformers.paged import VERSIONS, plugged_modules


def start(model: Any, generation_config: Any, config: Any, workload_hints: Any) -> Any:
    """``init_continuous_batching`` of a plugged model; arguments and result are the same."""
    layout = _layout()
    if config is None:
        general = model.generation_config if generation_config is None else generation_config
        config = getattr(general, "continuous_batching_config", None) or ContinuousBatchingConfig()
    if config.max_blocks_per_request:
        raise ValueError(
            f"max_blocks_per_request={config.max_blocks_per_request} asks for a decoding kernel "
            "that stores keys and values only, not the powers that a filter needs; leave it at "
            "None, or pass 0"
        )
    config = copy.deepcopy(config)
    config.max_blocks_per_request = 0
    # the powers take the rest of the memory on the CPU, of the space and of its limit
    share = layout.share_of_keys_and_values(model, config)
    config.cpu_offload_space_safety_threshold *= share
    if config.cpu_offload_space is not None:
        config.cpu_offload_space *= share
    manager = type(model).init_continuous_batching(model, generation_config, config, workload_hints)
    if type(manager) is ContinuousBatchingManager:
        manager.__class__ = FilteredBatchingManager
    # the filtered name of the paged implementation is registered now, not in a compiled forward
    for module in plugged_modules(model):
        _ = module.config._attn_implementation
    return manager


class FilteredBatchingManager(ContinuousBatchingManager):
    """A manager whose cache has room for the powers of past tokens."""

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            return super()._create_batch_processor()
        layout = _layout()
        room = layout.plan(self)
        processor = super()._create_batch_processor()
        layout.add_powers(processor, room)
        return processor


def _layout() -> ModuleType:
    """The module for the paged cache of this transformers; raises if there is none."""
    try:
        layout = _imported_layout()
    except ImportError as error:
        raise NotImplementedError(
            "continuous batching of a plugged model needs transformers 5.15 to 5.17 or 5.19 to "
            f"5.22, got {transformers.__version__} ({error.msg}). Use generate(), or install "
            f"{VERSIONS}"
        ) from error
    overridden = ((ContinuousBatchingManager, "_create_batch_processor"), *layout.OVERRIDDEN)
    missing = [f"{kind.__name__}.{name}" for kind, name in overridden if not hasattr(kind, name)]
    if missing:
        raise NotImplementedError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}, which is "
            "needed for continuous batching of a plugged model. Use generate(), or install "
            f"{VERSIONS}"
        )
    return layout


def _imported_layout() -> ModuleType:
    # a cache of sectors, which blocks of different sizes share
    if hasattr(PagedAttentionCache, "perform_cache_copy"):
        import gfsa.adapters.transformers.paged_sectors as sectors

        return sectors
    import gfsa.adapters.transformers.paged_groups as groups

    return groups
