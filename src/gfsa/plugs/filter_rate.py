"""A learning rate of the filters' own in trainers that build their optimiser themselves."""

from __future__ import annotations

from typing import Any

from torch import nn

from gfsa.plugs.optim import FILTERS, check_rate, filter_group, trained_parameters

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

    The trainer builds the optimizer that ``args`` ask for; then the filters are moved into a group
    of their own, with ``filter_lr`` and no weight decay. The scheduler multiplies both rates,
    gradients are clipped as before, a checkpoint resumes exactly, and ``filter_learning_rate`` is
    logged beside ``learning_rate``. This also holds where ``Trainer`` accepts no ready optimizer:
    FSDP 2, and DeepSpeed with an optimizer from its config. An optimizer that cannot have such a
    group is refused before the first step.

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
        self.filter_lr = check_rate(filter_lr)
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
        self._filter_rate_of_step = rate_in(self.optimizer)
        return super()._get_learning_rate()  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The trainer's log, with the filters' rate beside the model's."""
        if "learning_rate" in logs and self._filter_rate_of_step is not None:
            logs["filter_learning_rate"] = self._filter_rate_of_step
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def give_rate(optimizer: Any, model: nn.Module, filter_lr: float) -> None:
    """Move the filters of ``model`` into a group of their own in ``optimizer``.

    ``optimizer`` has not made a step and has no scheduler. It may also be what stands for an
    optimizer from DeepSpeed's config: an object with ``params`` alone. A second call changes
    nothing.
    """
    of_filters = trained_parameters(model, filter_lr)
    wanted = {id(parameter) for parameter in of_filters}
    stands_for_config = not hasattr(optimizer, "param_groups")
    groups = _groups_of(optimizer.params) if stands_for_config else optimizer.param_groups

    present = next((group for group in groups if group.get("name") == FILTERS), None)
    if present is not None:
        rate = present.get("initial_lr", present["lr"])
        if rate != filter_lr:
            raise ValueError(
                f"filter_lr={filter_lr}, but the optimizer has a group of filters with lr={rate}: "
                "give the rate once"
            )
        return

    held = {id(parameter) for group in groups for parameter in group["params"]}
    if not wanted <= held:
        raise ValueError(
            f"filter_lr={filter_lr}: {type(optimizer).__name__} does not hold the filters' "
            f"parameters in its groups, so they cannot have a rate of their own there. {_INSTEAD}"
        )
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in wanted]
    if stands_for_config:
        optimizer.params = [*groups, filter_group(of_filters, filter_lr)]
    else:
        optimizer.add_param_group(filter_group(of_filters, filter_lr))


def rate_in(optimizer: Any) -> float | None:
    """The present rate of the filters' group, or None if there is no such group."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("name") == FILTERS]
    return float(rates[0]) if rates else None


def refuse_scheduler_from_config(scheduler: Any) -> None:
    """DeepSpeed's own schedulers know one highest rate, for all groups alike."""
    # accelerate's stand-in for a scheduler that DeepSpeed builds from its config
    if type(scheduler).__name__ != "DummyScheduler" or scheduler.lr_scheduler_callable is not None:
        return
    raise ValueError(
        "FilterRate: the DeepSpeed config has a `scheduler`, which takes all groups to one rate "
        "(warmup_max_lr, cycle_max_lr), the filters too. Remove it from the config: "
        f"TrainingArguments(lr_scheduler_type=…, warmup_steps=…) schedules instead. Or: {_INSTEAD}"
    )


def _groups_of(params: Any) -> list[dict[str, Any]]:
    params = list(params)
    is_grouped = bool(params) and isinstance(params[0], dict)
    if not is_grouped:
        return [{"params": params}]
    return [{**group, "params": list(group["params"])} for group in params]
