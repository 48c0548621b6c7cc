"""The command ``gfsa diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gfsa.lens.report import LensReport
    from gfsa.lens.sources import Data

# options that say what is measured, and how
_MEASURING = (
    *("model", "data", "column", "layers", "samples", "batch_size", "tokens"),
    *("spectral", "trace", "untrained"),
)


def diagnose(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A transformers model (folder or hub name), timm:NAME, or my_module:build, a "
            "function that returns a model; repeat to compare. LABEL=MODEL gives it a name, "
            "MODEL@FOLDER adds filters saved by gfsa.save."
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Text (one sample per line), a .csv with --column, a folder of images, a "
            ".safetensors file of the model's arguments, or 'random' for inputs without meaning."
        ),
    ] = "",
    column: Annotated[str, typer.Option(help="The column of a .csv or .tsv with the texts.")] = "",
    report: Annotated[
        Path | None, typer.Option(help="Show a report written with --json; runs no model.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every number here.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write the figures into this folder, as PDF.")
    ] = None,
    layers: Annotated[str, typer.Option(help="all, even, odd, or numbers: 1,5-8,12.")] = "all",
    samples: Annotated[int, typer.Option(min=1, help="Number of samples, at most.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per text, at most.")] = 128,
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
    """Measure whether a model over-smooths, where, and what its filters change.

    Example: gfsa diagnose --model bert-base-uncased --data texts.txt --html page.html
    """
    from gfsa.lens.report import LensReport
    from gfsa.lens.sources import read_data

    chosen = _layers(layers)
    try:
        if report is not None:
            _refuse_beside_report(context)
        elif not model or not data:
            raise ValueError("expected a model and data: --model NAME --data texts.txt")
        _make_places(html, json, figures)
        if report is not None:
            found = LensReport.from_json(report)
        else:
            # data first: a model may take minutes to load
            inputs = read_data(data, samples, column)
            options = {"layers": chosen, "spectral": spectral}
            options["unknown"] = "trace" if trace else "refuse"
            found = _diagnose(model or [], untrained, inputs, batch_size, tokens, **options)
        found.table()
        if html is not None:
            found.to_html(html)
        if json is not None:
            found.to_json(json)
        if figures is not None:
            for name, figure in found.figures.items():
                letters = (letter if letter.isalnum() else "-" for letter in name)
                figure.savefig(figures / f"{''.join(letters).strip('-')}.pdf")
    except (ValueError, ImportError, OSError) as error:
        # what is an argument of gfsa.diagnose is a flag here
        said = str(error).replace("plug(..., unknown='trace')", "--trace")
        said = said.replace("unknown='trace'", "--trace")
        typer.echo(f"gfsa diagnose: {said}", err=True)
        raise typer.Exit(1) from error
    written = [str(path) for path in (html, json, figures) if path is not None]
    if written:
        typer.echo(f"written: {', '.join(written)}")


def _refuse_beside_report(context: typer.Context) -> None:
    """Raise for options that were given and would have no effect."""
    sources = {name: context.get_parameter_source(name) for name in _MEASURING}
    # by name: newer versions of typer have a copy of click's enumeration
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--report shows what was measured before; leave out {options}")


def _make_places(html: Path | None, json: Path | None, figures: Path | None) -> None:
    """Make the folders to write into, before minutes of measuring."""
    for file in (html, json):
        if file is not None and file.is_dir():
            raise ValueError(f"{file} is a folder; name a file in it")
    for folder in (html and html.parent, json and json.parent, figures):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise ValueError(
                    f"{folder} cannot be a folder to write into: there is a file of that name"
                ) from error


def _diagnose(
    names: list[str], untrained: bool, data: Data, batch: int, tokens: int, **options: Any
) -> LensReport:
    """Measure all models on the inputs of the first one."""
    from gfsa.lens.diagnosis import diagnose as diagnose_models
    from gfsa.lens.readings import printable
    from gfsa.lens.sources import load_batches, load_source, other_inputs, refuse_unfit

    sources = [load_source(name, untrained) for name in names]
    models = {source.label: source.model for source in sources}
    if len(models) < len(sources):
        labels = ", ".join(source.label for source in sources)
        raise ValueError(f"two models have the same name ({labels}): use LABEL=MODEL")
    first, *others = sources
    batches = load_batches(first, data, batch, tokens)
    short = Path(data.name).name
    if tokens > first.longest and data.kind != "tensors":
        typer.echo(
            f"gfsa diagnose: {first.label} has positions for {first.longest} tokens: "
            f"inputs have at most these, not --tokens {tokens}",
            err=True,
        )
    for source in others:
        if other_inputs(batches, source, data, batch, tokens):
            typer.echo(
                f"gfsa diagnose: {source.label} makes other inputs of {short} than {first.label} "
                "(another tokenizer, or images of another size or scale), and is measured on "
                f"those of {first.label}: its numbers may mean nothing. Diagnose it alone",
                err=True,
            )
    for source in sources:
        refuse_unfit(source, batches[0], data.name)
    found = diagnose_models(models, batches, **options)
    is_random = data.kind == "random"
    found.data = "random inputs without meaning" if is_random else printable(short)
    return found


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
