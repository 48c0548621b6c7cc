"""What a run leaves when it has finished: its row, and files in its folder."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

import gfsa
from gfsa._version import __version__
from gfsa.environment import commit, device_name
from gfsa.lens.trajectory import Trajectory
from gfsa.plugs.saving.checkpoint import write_filters
from gfsa_experiments.engine.config import as_text
from gfsa_experiments.engine.measure import COEFFICIENTS
from gfsa_experiments.engine.step import to_device
from gfsa_experiments.engine.task import Task
from gfsa_experiments.engine.trainer import Outcome
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run_folder import now

if TYPE_CHECKING:
    from gfsa_experiments.runs.run import Run


def row_of(
    run: Run, task: Task, data: str, added: int, outcome: Outcome, accelerator: Accelerator
) -> Row:
    """The row of a run, whose model has ``added`` numbers more than without its method."""
    metric = task.metric
    others = {name: round(v, 6) for name, v in outcome.test.items() if name != metric}
    return Row(
        **run.key()._asdict(),
        metric=metric,
        higher_is_better=task.higher_is_better,
        test=outcome.test[metric],
        valid=outcome.valid[metric] if outcome.valid else None,
        others=as_text(others),
        parameters=sum(p.numel() for p in task.model.parameters() if p.requires_grad),
        added=added,
        moved=outcome.moved,
        coefficients=_coefficients(task.model),
        epochs=outcome.epochs,
        steps=outcome.steps,
        seconds=round(outcome.seconds, 3),
        seconds_per_step=outcome.seconds_per_step,
        peak_memory_mib=outcome.peak_memory_mib,
        jobs=run.jobs,
        device=_devices(accelerator),
        precision=run.config.precision,
        torch=torch.__version__,
        gfsa=__version__,
        commit=commit(),
        date=now(),
        command=run.command,
        data=data,
    )


def _devices(accelerator: Accelerator) -> str:
    count, name = accelerator.num_processes, device_name(accelerator.device)
    return name if count == 1 else f"{count} × {name}"


def _polynomials(model: nn.Module) -> list[gfsa.GraphFilter]:
    """The model's filters that are a polynomial of A; those of some baselines are not."""
    return [f for f in gfsa.filters_of(model).values() if f.is_polynomial]


def _coefficients(model: nn.Module) -> str:
    """The coefficient of each power of A, averaged over heads and layers."""
    found = [f.coefficients().detach().double().cpu() for f in _polynomials(model)]
    if not found:
        return ""
    powers = max(c.shape[1] for c in found)
    rows = torch.cat([nn.functional.pad(c, (0, powers - c.shape[1])) for c in found])
    return " ".join(f"{value:.4f}" for value in rows.mean(0).tolist())


def keep_files(run: Run, task: Task, model: nn.Module) -> None:
    """Save filters, and if wanted weights, probes and a lens page, in the run's folder."""
    folder = run.folder
    if _polynomials(model):
        # save_model says whether the trained backbone is kept, so no warning is due
        write_filters(model, folder / "filters")
    if run.config.save_model:
        torch.save(model.state_dict(), folder / "model.pt")
    probes = task.probes(model)
    if probes is not None:
        (folder / "probes.json").write_text(json.dumps(probes, indent=1) + "\n")
    if run.config.lens:
        _write_lens_page(run, task, model)


def _write_lens_page(run: Run, task: Task, model: nn.Module) -> None:
    example = task.example()
    if example is None:
        warnings.warn(f"no lens page: recipe {run.recipe} has no example inputs", stacklevel=2)
        return
    device = next(model.parameters()).device
    report = gfsa.diagnose({run.method: model}, to_device(example, device), progress=False)
    recorded = run.folder / COEFFICIENTS
    if recorded.exists():
        report.trajectories = {run.method: Trajectory.from_csv(recorded)}
    report.to_html(run.folder / "lens.html")
    report.to_json(run.folder / "lens.json")
