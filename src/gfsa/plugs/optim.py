"""A learning rate for the filters: parameter groups, and a mixin for trainers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gfsa.filters.spec import check_number
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.saving.identity import some_of
from gfsa.plugs.sites import filters_of

FILTERS = "filters"
"""The ``"name"`` of the filters' group among an optimiser's parameter groups."""

_FILTER_LR = 1e-2
# of depth terms alone: at the other rate r hardly moves in a few hundred steps
_DEPTH_LR = 1e-1


def parameter_groups(
    model: nn.Module,
    lr: float,
    filter_lr: float | None = None,
    weight_decay: float | None = None,
    *,
    gain_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, in which the filters have a learning rate of their own.

    At the model's usual learning rate filters hardly change in a short run. Frozen parameters are
    left out. In a comparison, tune the plain model's gains too: with ``gain_lr`` and without
    ``filter_lr``, a model without filters is accepted.

    Args:
        model: a plugged model.
        lr: for all parameters but the filters'.
        filter_lr: for the filters; default: 0.01 (0.1 where they learn depth terms alone), or
            ``lr`` if that is higher or the filters were plugged with an ``lr_multiplier``.
        weight_decay: for weights of two or more dimensions; default: the optimizer's own. Biases,
            norms and filters get none.
        gain_lr: for what is not decayed, filters excepted: biases, gains of norms, temperatures;
            default: as ``lr``.

    Returns:
        Up to three groups, named ``"weights"``, ``"biases"`` and ``"filters"``; empty ones are
        left out. Muon takes ``"weights"``, without embeddings: the numbers of a filter have two
        dimensions, and are not a matrix.

    Raises:
        ValueError: if the model has no filters (unless ``gain_lr`` alone is given), ``filter_lr``
            finds no parameter to train, or a rate is not a finite number of at least zero.

    Examples:
        >>> report = gfsa.plug(model)
        >>> groups = gfsa.parameter_groups(model, lr=2e-5, filter_lr=1e-2, weight_decay=0.01)
        >>> optimizer = torch.optim.AdamW(groups)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('weights', 2e-05, 0.01), ('biases', 2e-05, 0.0), ('filters', 0.01, 0.0)]
    """
    # torch's optimisers check their own defaults, not the numbers of a group
    rates = {"lr": lr, "filter_lr": filter_lr, "weight_decay": weight_decay, "gain_lr": gain_lr}
    for name, value in rates.items():
        if value is not None and not isinstance(value, Tensor):
            check_number(name, value, least=0.0)
    is_plain = gain_lr is not None and filter_lr is None and not filters_of(model)
    of_filters = [] if is_plain else trained_parameters(model, filter_lr)
    known = {id(p) for p in of_filters}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    weights = _group("weights", [p for p in rest if p.dim() > 1], lr, weight_decay)
    if weight_decay is None:
        del weights["weight_decay"]
    gain_lr = lr if gain_lr is None else gain_lr
    biases = _group("biases", [p for p in rest if p.dim() <= 1], gain_lr)
    filter_lr = _default_rate(model, lr) if filter_lr is None else filter_lr
    filters = _group(FILTERS, of_filters, filter_lr)
    return [group for group in (weights, biases, filters) if group["params"]]


def _default_rate(model: nn.Module, lr: Any) -> Any:
    """The filters' rate if none is given: at that of a fine-tuned model they would hardly move."""
    learning = [filter for filter in filters_of(model).values() if list(filter.parameters())]
    depth = [f for f in learning if f.has_depth and f.theta is not None and f.theta.shape[-1] == 1]
    rate = _DEPTH_LR if depth and depth == learning else _FILTER_LR
    if lr >= rate or any(filter.lr_multiplier != 1 for filter in learning):
        return lr
    # captured steps read a rate from a tensor
    return torch.full_like(lr, rate) if isinstance(lr, Tensor) else rate


def _group(name: str, params: list[nn.Parameter], lr: Any, decay: Any = 0.0) -> dict[str, Any]:
    return {"name": name, "params": params, "lr": lr, "weight_decay": decay}


def trained_parameters(model: nn.Module, filter_lr: float | None) -> list[nn.Parameter]:
    """The filters' parameters that are not frozen; with a ``filter_lr`` there has to be one."""
    filters = filters_of(model)
    if not filters:
        raise ValueError(f"{type(model).__name__} has no filters; gfsa.plug(model) first")
    # once each: layers may share a filter that somebody has assigned to both
    of_filters = dict.fromkeys(p for f in filters.values() for p in f.parameters())
    trained = [p for p in of_filters if p.requires_grad]
    if filter_lr is not None and not trained:
        raise ValueError(
            f"filter_lr={filter_lr} has no parameters to act on: every filter is frozen (peft "
            "freezes them unless modules_to_save=['gfsa']), has no learned numbers, or was "
            "flattened by FSDP 1 (use_orig_params=True keeps parameters apart)"
        )
    return trained


# what works wherever an optimiser has one rate for everything
_INSTEAD = (
    "gfsa.plug(model, lr_multiplier=m) needs no group: it moves the coefficients by m times what "
    "the optimizer moves the parameters"
)


class FilterRate:
    """Mixin that gives the filters a learning rate of their own in transformers' ``Trainer``.

    It works with subclasses of ``Trainer`` too (TRL's, for example).

    .. code-block:: python

        class FilterTrainer(gfsa.FilterRate, transformers.Trainer):
            pass

        trainer = FilterTrainer(model, args, train_dataset=data, filter_lr=1e-2)
        trainer.train()

    In the trainer's optimizer the filters get a group of their own, with no weight decay. The
    scheduler multiplies both rates, and ``filter_learning_rate`` is logged. This also holds for
    FSDP 2, and for DeepSpeed with an optimizer from its config. An optimizer that cannot have such
    a group is refused before the first step.

    Args:
        *args, **kwargs: for the trainer.
        filter_lr: the filters' highest learning rate, which the scheduler multiplies.

    Raises:
        TypeError: if a subclass has no trainer after ``FilterRate`` among its bases.
        ValueError: if ``filter_lr`` is not a finite number of at least zero; from
            ``create_optimizer``, if the model has no filters to train, or the optimizer or the
            scheduler cannot have a rate for them.
    """

    optimizer: Any
    lr_scheduler: Any
    model: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(super(), "create_optimizer"):
            raise TypeError(
                f"gfsa.FilterRate must stand before a class with create_optimizer, as in `class "
                f"{cls.__name__}(gfsa.FilterRate, transformers.Trainer)`; got the bases "
                f"({', '.join(base.__name__ for base in cls.__bases__)})"
            )

    def __init__(self, *args: Any, filter_lr: float, **kwargs: Any) -> None:
        # first: a trainer may build its optimizer while it is built
        self.filter_lr = check_number("filter_lr", filter_lr, least=0.0)
        self._filter_rate_of_step: float | None = None
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The trainer's optimizer, with the filters in a group of their own."""
        # older trainers take no model
        super().create_optimizer(*([] if model is None else [model]))  # type: ignore[misc]
        refuse_scheduler_from_config(self.lr_scheduler)
        give_rate(self.optimizer, self.model if model is None else model, self.filter_lr)
        return self.optimizer

    def _get_learning_rate(self) -> Any:
        # the trainer asks when a step is done, before the scheduler moves on
        rates = [g["lr"] for g in self.optimizer.param_groups if g.get("name") == FILTERS]
        self._filter_rate_of_step = float(rates[0]) if rates else None
        return super()._get_learning_rate()  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The trainer's log, with the filters' rate beside the model's."""
        if "learning_rate" in logs and self._filter_rate_of_step is not None:
            logs["filter_learning_rate"] = self._filter_rate_of_step
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def give_rate(optimizer: Any, model: nn.Module, filter_lr: float) -> None:
    """Move the filters of ``model`` into a group of their own in ``optimizer``, once.

    It has no scheduler yet, and may be what stands for an optimizer from DeepSpeed's config: an
    object with ``params`` alone.
    """
    of_filters = trained_parameters(model, filter_lr)
    wanted = {id(parameter) for parameter in of_filters}
    stands_for_config = not hasattr(optimizer, "param_groups")
    if stands_for_config:
        params = list(optimizer.params)
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        groups = [{**group, "params": list(group["params"])} for group in groups]
    else:
        groups = optimizer.param_groups
    for group in groups:
        if group.get("name") == FILTERS:
            rate = group.get("initial_lr", group["lr"])
            if rate != filter_lr:
                raise ValueError(
                    f"filter_lr={filter_lr}, but the optimizer has a group of filters with "
                    f"lr={rate}: give the rate once"
                )
            return
    if not wanted <= _held_by(groups):
        raise ValueError(
            f"filter_lr={filter_lr}: {type(optimizer).__name__} does not hold the filters' "
            f"parameters in its groups, so they cannot have a rate of their own there. {_INSTEAD}"
        )
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in wanted]
    if stands_for_config:
        optimizer.params = [*groups, _group(FILTERS, of_filters, filter_lr)]
    else:
        optimizer.add_param_group(_group(FILTERS, of_filters, filter_lr))


def refuse_scheduler_from_config(scheduler: Any) -> None:
    """DeepSpeed's own schedulers know one highest rate, for all groups alike."""
    # accelerate's stand-in for a scheduler that DeepSpeed builds from its config
    if type(scheduler).__name__ == "DummyScheduler" and scheduler.lr_scheduler_callable is None:
        raise ValueError(
            "FilterRate: the `scheduler` of the DeepSpeed config takes all groups to one rate, the "
            "filters too. Remove it from the config: TrainingArguments(lr_scheduler_type=…, "
            f"warmup_steps=…) schedules instead. Or: {_INSTEAD}"
        )


# plugged models, each with the steps in which their filters got gradients and did not move, and the
# versions of their numbers at the last of these
_WATCHED: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
# the Muons that were looked at
_MUONS: WeakSet[Any] = WeakSet()
# how many steps optimizers may make before one of them must have moved a filter
_STEPS = 10


def watch_optimizers(model: nn.Module) -> None:
    """Look at the optimizers that train ``model`` before they make a step.

    One for matrices alone that has filters, and one without them while nothing else moves them, are
    warned of once. A copy of the model is not watched.
    """
    _listen()
    _WATCHED[model] = 0, 0


@functools.cache
def _listen() -> None:
    # torch's hook for all optimizers: a parameter does not know its own
    register_optimizer_step_pre_hook(_look_at)


def _look_at(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    kind = type(optimizer).__name__
    is_new_muon = "Muon" in kind and optimizer not in _MUONS
    if is_new_muon:
        _MUONS.add(optimizer)
    orthogonalised = set()
    # keyrefs is one operation: meanwhile another thread may plug a model
    for model in [reference() for reference in _WATCHED.keyrefs()]:
        if model is None or (_WATCHED[model][0] == _STEPS and not is_new_muon):
            continue
        steps, before = _WATCHED[model]
        filters = {f"{n}.{CHILD}".lstrip("."): f for n, f in filters_of(model).items()}
        learned = {p: name for name, f in filters.items() for p in f.parameters()}
        # some implementations have groups for AdamW, too
        matrices = _held_by(g for g in optimizer.param_groups if g.get("use_muon", True))
        orthogonalised |= {n for p, n in learned.items() if is_new_muon and id(p) in matrices}
        if steps == _STEPS:
            continue
        held = _held_by(optimizer.param_groups)
        own = [p for p in learned if p.requires_grad]
        # an optimizer that moves filters need not be one of torch: versions show it
        versions = sum(p._version for p in own)
        if not own or held & {id(p) for p in own} or (steps and versions != before):
            _WATCHED[model] = _STEPS, versions
        elif any(p.grad is not None for p in own) and any(
            id(p) in held for p in model.parameters()
        ):
            _WATCHED[model] = steps + 1, versions
            if steps + 1 == _STEPS:
                warnings.warn(
                    f"in {_STEPS} training steps of {type(model).__name__} other weights have "
                    "changed, but no filter has, although filters got gradients: build the "
                    "optimizer after gfsa.plug, so that it has their parameters; to keep the "
                    "filters as they are, call requires_grad_(False) on them",
                    stacklevel=3,
                )
    if orthogonalised:
        warnings.warn(
            f"{kind} has the filters {some_of(orthogonalised)}, and orthogonalises their numbers "
            "as if they were a matrix: give it the other weights, and the filters to AdamW "
            "(gfsa.parameter_groups(model, ...) has a group of each)",
            stacklevel=3,
        )


def _held_by(groups: Iterable[dict[str, Any]]) -> set[int]:
    return {id(parameter) for group in groups for parameter in group["params"]}
