"""The command ``gfsa diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from gfsa.lens.report import LensReport
    from gfsa.lens.sources import Source


# options that say how models are measured
_MEASURING = ("data", "layers", "samples", "batch_size", "tokens", "spectral", "trace", "untrained")


def diagnose(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A transformers model (folder or hub name) or timm:NAME; repeat to compare. "
            "LABEL=MODEL gives it a name, MODEL@FOLDER adds filters saved by gfsa.save."
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Text (one sample a line), a folder of images, a .safetensors file of the model's "
            "arguments, or 'random' for inputs without meaning."
        ),
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="Show a report written with --json; runs no model.")
    ] = None,
    coefficients: Annotated[
        list[str] | None,
        typer.Option(
            help="Coefficients over training to show: coefficients.csv of a run folder; repeat to "
            "show several. LABEL=FILE gives them a name. Needs no model."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every number here.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write the figures into this folder, as PDF.")
    ] = None,
    layers: Annotated[str, typer.Option(help="all, even, odd, or numbers: 1,5-8,12.")] = "all",
    samples: Annotated[int, typer.Option(min=1, help="Number of samples, at most.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens a text, at most.")] = 128,
    spectral: Annotated[
        bool, typer.Option(help="Measure frequency responses and singular values; costs most.")
    ] = True,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace attention that no adapter knows.")
    ] = False,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="timm models: random weights, no download.")
    ] = False,
) -> None:
    """Measure whether a model over-smooths, where, and what its filters change."""
    from gfsa.lens.report import LensReport
    from gfsa.lens.sources import SourceError

    try:
        _make_places(html, json, figures)
        if report is not None:
            _refuse_given(context, "--report shows what was measured before", "model", *_MEASURING)
            found = LensReport.from_json(report)
        elif coefficients and not model:
            _refuse_given(context, "--coefficients without --model measures nothing", *_MEASURING)
            found = LensReport({}, created=_now())
        else:
            chosen = _layers(layers)
            inputs = _Inputs(data, samples, batch_size, tokens)
            found = _diagnose(model, inputs, untrained, chosen, spectral, trace)
        found.trajectories |= _trajectories(coefficients or [])
        found.table()
        _write(found, html, json, figures)
    except (SourceError, ValueError, ImportError, OSError) as error:
        typer.echo(f"gfsa diagnose: {error}", err=True)
        raise typer.Exit(1) from error
    written = [str(path) for path in (html, json, figures) if path is not None]
    if written:
        typer.echo(f"written: {', '.join(written)}")


def _refuse_given(context: typer.Context, why: str, *names: str) -> None:
    """Raise for options that were given and would have no effect."""
    from gfsa.lens.sources import SourceError

    sources = {name: context.get_parameter_source(name) for name in names}
    # by name: newer versions of typer have a copy of click's enumeration
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise SourceError(f"{why}; leave out {options}")


def _make_places(html: Path | None, json: Path | None, figures: Path | None) -> None:
    """Make the folders to write into, before minutes of measuring."""
    from gfsa.lens.sources import SourceError

    for file in (html, json):
        if file is not None and file.is_dir():
            raise SourceError(f"{file} is a folder; name a file in it")
    for folder in (html and html.parent, json and json.parent, figures):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise SourceError(
                    f"{folder} cannot be a folder to write into: there is a file of that name"
                ) from error


def _write(report: LensReport, html: Path | None, json: Path | None, figures: Path | None) -> None:
    """Write what the options name."""
    if html is not None:
        report.to_html(html)
    if json is not None:
        report.to_json(json)
    if figures is not None:
        for name, figure in report.figures.items():
            figure.savefig(figures / f"{_file_name(name)}.pdf")


class _Inputs(NamedTuple):
    """The options that say on what models are measured."""

    data: str
    samples: int
    batch_size: int
    tokens: int


def _diagnose(
    names: list[str] | None,
    inputs: _Inputs,
    untrained: bool,
    layers: str | list[int],
    spectral: bool,
    trace: bool,
) -> LensReport:
    """Load the models and measure all of them on the same inputs."""
    from gfsa.lens.diagnosis import diagnose as diagnose_models
    from gfsa.lens.sources import SourceError, load_batches, load_source, refuse_unfit

    data = inputs.data
    if not names or not data:
        raise SourceError("expected a model and data: --model NAME --data texts.txt")
    sources = [load_source(name, untrained) for name in names]
    labels = [source.label for source in sources]
    if len(set(labels)) < len(labels):
        raise SourceError(f"two models have the same name ({', '.join(labels)}): use LABEL=MODEL")
    # built with the first model's tokenizer or size
    batches = load_batches(sources[0], *inputs)
    _warn_of_inputs(sources, inputs)
    for source in sources:
        refuse_unfit(source, batches[0], data)
    found = diagnose_models(
        {source.label: source.model for source in sources},
        batches,
        layers=layers,
        spectral=spectral,
        unknown="trace" if trace else "refuse",
    )
    found.data = "random inputs without meaning" if data == "random" else Path(data).name
    return found


def _warn_of_inputs(sources: list[Source], inputs: _Inputs) -> None:
    """Say where the first model's inputs are shorter than asked, or differ from another model's."""
    from gfsa.lens.sources import other_inputs

    first, *others = sources
    data, samples, _, tokens = inputs
    if tokens > first.longest and not data.endswith(".safetensors"):
        typer.echo(
            f"gfsa diagnose: {first.label} has positions for {first.longest} tokens: "
            f"inputs have at most these, not --tokens {tokens}",
            err=True,
        )
    for source in others:
        if other_inputs(first, source, data, samples, tokens):
            typer.echo(
                f"gfsa diagnose: {source.label} makes other inputs of {Path(data).name} than "
                f"{first.label} (another tokenizer, or images of another size or scale), and "
                f"is measured on those of {first.label}: its numbers may mean nothing. "
                "Diagnose it alone",
                err=True,
            )


def _trajectories(names: list[str]) -> dict[str, Any]:
    """``[LABEL=]FILE``, by label; without one, the folder of the file is its name."""
    from gfsa.lens.sources import SourceError
    from gfsa.lens.trajectory import Trajectory

    found: dict[str, Any] = {}
    for text in names:
        # the name of a run folder may have a "=" in it; a label has none
        before, _, after = text.partition("=")
        label, path = ("", text) if Path(text).exists() or not after else (before, after)
        label = label or Path(path).absolute().parent.name
        if label in found:
            raise SourceError(f"two files have the same name ({label}): use LABEL=FILE")
        found[label] = Trajectory.from_csv(path)
    return found


def _now() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _layers(text: str) -> str | list[int]:
    if text in ("all", "even", "odd", "lower", "upper"):
        return text
    chosen: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            chosen += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise typer.BadParameter(
            f"--layers is all, even, odd, lower, upper or numbers such as 1,5-8,12; got {text!r}"
        ) from None
    return chosen


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")
