"""vLLM: a plugin that serves a plugged model, exactly, from its transformers folder.

vLLM finds :func:`register` by its entry point (``vllm.general_plugins``) and calls it in each of
its processes. From then on ``vllm serve DIR`` works for a folder that ``save_pretrained`` wrote
from a plugged model: ``config.py`` reads the filters' descriptions with the model's config and
names a model class of ``models.py``, whose attention layers (``attention.py``) apply them.
Checkpoints without filters are served as without the plugin.
"""

from __future__ import annotations


def register() -> None:
    """Make the model classes and the config parser known to vLLM; may be called again."""
    from vllm import ModelRegistry

    from gfsa.engines.vllm.config import MODELS, install_parser

    for architecture, name in MODELS.items():
        # by name: vLLM imports the class when a model needs it, in the process that needs it
        ModelRegistry.register_model(architecture, f"gfsa.engines.vllm.models:{name}")
    install_parser()
