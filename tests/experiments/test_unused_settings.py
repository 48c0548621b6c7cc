"""Settings that change nothing: what a recipe says of them is true, of all of them, and refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gfsa_experiments.engine.config import TrainConfig, field_names
from gfsa_experiments.engine.task import Task
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.runs.sweep import Request
from gfsa_experiments.tasks import find_recipe
from support.graph_files import write_zinc
from support.own_data import (
    reviews,
    write_functions,
    write_npz,
    write_photos,
    write_recordings,
    write_table,
)
from support.speech import write_an4, write_librispeech
from support.tiny_images import write_cifar10, write_folder
from support.tiny_texts import corpus, save_model, write, write_devign, write_glue

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*results are not those of the official"),
    pytest.mark.filterwarnings("ignore:.*the official"),
]

TOY = "support.toy_recipe"
SMALL: dict[str, dict[str, Any]] = {
    "lra": {"dim": 8, "depth": 1, "num_heads": 2, "ffn_dim": 8, "projected": 8},
    "graph": {"depth": 1, "width": 16, "heads": 2},
    "image": {"model": "deit_tiny", "depth": 1},
    "speech": {"width": 16, "heads": 2, "hidden": 32, "depth": 1, "kernel": 5, "beam": 2},
    "causal_lm": {"block": 16},
    "code": {"max_length": 24, "pad_to_multiple": 8},
    "glue": {"task": "rte"},
    "text": {"data": "my.csv", "text": ("review",), "label_column": "stars"},
    "digits": {"depth": 1, "width": 16, "heads": 2},
    "stdlib": {"depth": 1, "width": 16, "heads": 2, "block": 16},
    "pretrain": {"vocab_size": 300, "block": 16, "head_dim": 8, "precision": "fp32"},
}
SCRATCH: dict[str, Any] = {
    "model": "scratch", "depth": 1, "width": 16, "heads": 2, "vocab_size": 300
}  # fmt: skip
CTC_ALONE: dict[str, Any] = {
    "dataset": "an4", "library": "torch", "decoder_layers": 0, "ctc_weight": 1.0, "tokens": "char"
}  # fmt: skip
JOINT: dict[str, Any] = {
    "dataset": "an4", "decoder_layers": 1, "decoder_hidden": 32, "tokens": "char"
}  # fmt: skip
LIBRISPEECH = CTC_ALONE | {"dataset": "librispeech", "test_sets": ("test-clean",)}
# each recipe with choices that leave it other settings to use
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("lra", {"task": "listops", "attention": "softmax"}),
    ("lra", {"task": "image", "attention": "efficient"}),
    ("lra", {"task": "image", "attention": "linformer"}),
    ("graph", {"model": "graphormer-slim", "ffn_width": 16}),
    ("graph", {"model": "gps", "encoding_width": 4}),
    ("graph", {"model": "gps", "encoding": "none"}),
    ("graph", {"model": "graph-vit", "gnn_depth": 2, "patches": 4}),
    ("graph", {"model": "graph-vit", "gnn_depth": 2, "patches": 4, "encoding": "none"}),
    ("image", {"dataset": "cifar10"}),
    ("image", {"dataset": "cifar10", "mixup": 0.0}),
    ("image", {"dataset": "cifar10", "augment": "workers", "cutmix": 0.0}),
    ("image", {"dataset": "folder", "image_size": 32}),
    ("speech", CTC_ALONE),
    ("speech", CTC_ALONE | {"decode": "greedy", "time_masks": 0, "feature_masks": 0}),
    ("speech", CTC_ALONE | {"encoder": "branchformer"}),
    ("speech", LIBRISPEECH),
    ("speech", JOINT),
    ("speech", JOINT | {"encoder": "branchformer", "decode": "greedy"}),
    ("causal_lm", SCRATCH | {"tokenizer": "bpe"}),
    ("causal_lm", {"model": "tiny-gpt2"}),
    ("code", SCRATCH),
    ("code", {"model": "tiny-roberta"}),
    ("glue", {"model": "tiny-bert"}),
    ("text", {"model": "tiny-bert"}),
    ("causal_lm", SCRATCH | {"tokenizer": "bpe", "data": "notes.txt"}),
    ("code", SCRATCH | {"data": "functions.jsonl", "text": ("code",), "label_column": "kind"}),
    ("lra", {"data": "my.csv", "text": "review", "label_column": "stars", "length": 32}),
    ("graph", {"model": "gps", "encoding_width": 4, "data": "my_graphs.npz"}),
    ("image", {"data": "photos", "image_size": 32}),
    ("speech", CTC_ALONE | {"data": "recordings"}),
    ("digits", {}),
    ("stdlib", {}),
    ("pretrain", {"depth": 1, "width": 16, "heads": 2, "mlp": 16}),
    ("pretrain", {"depth": 1, "width": 16, "heads": 2}),
]
NAMES = [f"{recipe} {' '.join(map(str, choice.values()))}" for recipe, choice in CHOICES]
# the trainer or the sweep reads these, not the task that is built
ELSEWHERE = set(field_names(TrainConfig)) | {"evaluations"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gfsa_experiments.tasks.lra.listops import write_listops

    root = tmp_path_factory.mktemp("data")
    write_listops(root / "listops", counts={"train": 6, "val": 2, "test": 2})
    write_cifar10(root / "cifar10", per_file=4, test=4)
    write_folder(root, {"train": 4, "val": 2})
    write_zinc(root)
    write_an4(root / "an4")
    for name in ("train-clean-100", "dev-clean", "dev-other", "test-clean"):
        write_librispeech(root, name)
    for part in ("train", "valid", "test"):
        write(root / f"wikitext-2/wiki.{part}.tokens", corpus(20))
        write(root / f"techdocs/techdocs.{part}.txt", corpus(20))
    write_table(root / "my.csv", reviews())
    (root / "notes.txt").write_text(corpus(400))
    write_functions(root / "functions.jsonl")
    write_photos(root / "photos")
    write_npz(root / "my_graphs.npz")
    write_recordings(root / "recordings")
    write_devign(root / "devign")
    write_glue(root / "glue", "RTE")
    for kind in ("gpt2", "roberta", "bert"):
        save_model(root / f"tiny-{kind}", kind)
    return root


def config_of(recipe: str, choice: dict[str, Any], data: Path) -> Any:
    settings = SMALL[recipe] | choice
    if str(settings.get("model", "")).startswith("tiny-"):
        settings["model"] = str(data / settings["model"])
    config = find_recipe(recipe).config(**settings)
    config.check()
    return config


def what_comes_of(config: Any, build: Callable[[Any, Path], Task], data: Path) -> list[Any]:
    """The model, a training batch and its loss, and what is predicted: numbers and words."""
    torch.manual_seed(0)
    task = build(config, data)
    torch.manual_seed(1)
    batch = task.prepare(first_items(task, "train"))
    weights = dict(task.model.state_dict())
    loss = task.loss(task.model.train(), batch)
    with torch.no_grad():
        predicted = task.predict(task.model.eval(), first_items(task, "test"))
    sizes = [(name, len(split)) for name, split in task.splits.items()]
    return tree_leaves([repr(task.model), weights, batch, loss, predicted, sizes])


def first_items(task: Task, part: str) -> Any:
    split = task.splits[part]
    fetch = getattr(split.dataset, "__getitems__", lambda some: [split.dataset[i] for i in some])
    return split.collate(fetch([0, 1]))


def are_alike(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(some, others, strict=True)
    )


def another(config: Any, name: str) -> Any:
    """Another value of a setting."""
    value, kind = getattr(config, name), get_type_hints(type(config))[name]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return ("dev-other",)
    if isinstance(value, str):
        return "rand-m5"
    return value + 1 if isinstance(value, int) else value / 2 + 0.1


@pytest.mark.parametrize(("recipe", "choice"), CHOICES, ids=NAMES)
def test_what_is_unused_changes_nothing(recipe: str, choice: dict[str, Any], data: Path) -> None:
    config, build = config_of(recipe, choice, data), find_recipe(recipe).build
    unused = [name for name in config.unused() if name not in ELSEWHERE]
    expected = what_comes_of(config, build, data) if unused else []
    for name in unused:
        changed = dataclasses.replace(config, **{name: another(config, name)})
        assert are_alike(what_comes_of(changed, build, data), expected), name


@pytest.mark.parametrize(("recipe", "choice"), CHOICES, ids=NAMES)
def test_whatever_nobody_reads_is_unused(recipe: str, choice: dict[str, Any], data: Path) -> None:
    config, build = config_of(recipe, choice, data), find_recipe(recipe).build
    read: set[str] = set()

    class Watched(type(config)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    watched = object.__new__(Watched)
    watched.__dict__.update(vars(config))
    what_comes_of(watched, build, data)
    # CTC alone has one ctc_weight, which must be given: check() sees to it
    own = set(field_names(config)) - ELSEWHERE - {"ctc_weight"}
    assert own - read <= set(config.unused())


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({"patience": 1, "best": False}, {"best": True}),
        ({"accumulate": 2, "drop_last": False}, {"drop_last": True}),
    ],
)
def test_what_the_loop_does_not_use_changes_no_row(
    tmp_path: Path, settings: dict[str, Any], unused: dict[str, Any]
) -> None:
    kind = find_recipe(TOY).config
    assert set(unused) <= set(kind(**settings).unused())
    rows = [
        carry_out(Run(recipe=TOY, config=kind(**one), out=tmp_path / str(number), device="cpu"))
        for number, one in enumerate((settings, settings | unused))
    ]
    assert rows[0].test == rows[1].test
    assert rows[0].others == rows[1].others
    assert rows[0].steps == rows[1].steps


@pytest.mark.parametrize(
    ("recipe", "settings", "told"),
    [
        ("lra", "projected=64", "projected (only attention=linformer"),
        ("lra", "task=image length=3000 pad_to_multiple=64", "length (every image is 1024 tokens"),
        ("lra", "holdout=0.2", "holdout (ListOps has a validation part"),
        ("graph", "pooling=sum", "pooling (model=graphormer-slim does not use it; gps would"),
        ("graph", "model=gps patches=8", "patches (model=gps does not use it; graph-vit would"),
        ("graph", "model=graph-vit mlp_dropout=0.2", "graphormer-slim or graphormer would"),
        ("graph", "model=gps encoding=none encoding_size=8", "encoding=none has no size"),
        ("image", "dataset=cifar10 auto_augment=", "auto_augment (only augment=workers"),
        ("image", "augment=workers", "augment (images in folders are always"),
        ("image", "switch=0.2 mixup=0", "switch (it chooses between mixup and cutmix"),
        ("image", "group_by_length=true", "group_by_length (every image has the same size"),
        ("speech", "dataset=an4 train_sets=dev-clean", "train_sets (AN4 has sets of its own"),
        ("speech", "holdout=0.2", "holdout (LibriSpeech has valid_sets"),
        ("speech", "tokens=char vocabulary=30", "vocabulary (tokens=char are the letters"),
        ("speech", "decode=greedy beam=3", "beam (decode=beam alone searches"),
        ("speech", "kernel=15", "kernel (encoder=branchformer alone"),
        ("speech", "time_masks=0 time_width=3", "time_width (time_masks=0 masks nothing"),
        ("causal_lm", "depth=3", "depth (gpt2 has its own; model=scratch takes it"),
        ("causal_lm", "vocab_size=300", "vocab_size (tokenizer=own has its own"),
        ("code", "dropout=0.2", "dropout (microsoft/codebert-base has its own"),
        ("glue", "schedule=constant min_lr=0.1", "min_lr (schedule=constant never decays"),
    ],
)
def test_what_would_change_nothing_is_refused(recipe: str, settings: str, told: str) -> None:
    request = Request(recipe, settings=pairs(settings))
    with pytest.raises(ValueError, match="leave out settings that would have no effect") as caught:
        request.runs()
    assert told in str(caught.value)


def pairs(settings: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, _, value in (s.partition("=") for s in settings.split()))


def test_of_several_values_one_that_uses_it_is_enough() -> None:
    each = (("task", "image,listops"),)
    image, lists = Request("lra", settings=pairs("holdout=0.2"), each=each).runs()
    assert (image.config.holdout, lists.config.holdout) == (0.2, 0.1)
    each = (("task", "listops"), ("attention", "softmax,efficient"))
    with pytest.raises(ValueError, match="holdout"):
        Request("lra", settings=pairs("holdout=0.2"), each=each).runs()
