"""Cells of docs/matrix.md, as the tests find them."""

from __future__ import annotations

from support.subjects import SUBJECTS

FEATURES = {
    "compile, one graph": "`torch.compile(fullgraph=True)`",
    "compile, new shapes": "new batch sizes and lengths make one more graph, not one each",
    "prune": "`gfsa.prune`: negligible heads and layers skip their second pass",
    "DDP": "gradients of two processes are those of one",
    "FSDP2": "`fully_shard` with a mixed-precision policy, and its checkpoints",
    "tensor parallel": "heads sharded over two processes, filters with them",
    "context parallel": "tokens sharded over processes",
    "export": "`torch.export`, saved, run without gfsa",
    "ONNX": "ONNX Runtime gives what eager mode gives",
    "packed": "several sequences in one row are each alone",
    "jagged": "nested jagged tensors are each sequence alone",
    "threads": "concurrent inference gives what each call alone gives",
    "memory": "does not grow over 1,000 steps",
}
HEADER = """\
# Feature × model

Which feature is tested with which model; [how to use each](scale.md). ✓: equal to one process in
eager mode, to rounding. Words say what prevents it, plugged or not. –: does not apply. Each cell is
the result of a test in `tests/scale` with a tiny random model, filters away from their start, on a
CPU; `pytest tests/scale -m "slow or not slow" --write-matrix` writes the page.
"""


class Matrix:
    """Collects cells while the page is written, checks them otherwise."""

    def __init__(self, cells: dict[tuple[str, str], str], written: str | None) -> None:
        self.cells = cells
        self.written = written

    def __call__(self, feature: str, subject: str, cell: str = "✓") -> None:
        assert feature in FEATURES
        assert subject in SUBJECTS
        if self.written is None:
            known = self.cells.setdefault((feature, subject), cell)
            assert known == cell, f"two tests say different things of {feature} × {subject}"
        else:
            found = parse(self.written).get((feature, subject))
            assert found == cell, (
                f"docs/matrix.md says {found!r} for {feature} × {subject}, this test {cell!r}; "
                "pytest tests/scale --write-matrix writes it anew"
            )


def page(cells: dict[tuple[str, str], str]) -> str:
    """The whole page; a cell that no test stated is a dash."""
    lines = [HEADER, "| feature | " + " | ".join(SUBJECTS) + " |", "|---" * (len(SUBJECTS) + 1)]
    lines[-1] += "|"
    for feature in FEATURES:
        row = [cells.get((feature, subject), "–") for subject in SUBJECTS]
        lines.append(f"| {feature} | " + " | ".join(row) + " |")
    lines += ["", "What each row shows:", ""]
    lines += [f"- *{feature}*: {about}" for feature, about in FEATURES.items()]
    return "\n".join(lines) + "\n"


def parse(text: str) -> dict[tuple[str, str], str]:
    """The cells of a written page."""
    cells = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.strip().strip("|").split("|")]
        if line.startswith("|") and parts[0] in FEATURES:
            for subject, cell in zip(SUBJECTS, parts[1:], strict=True):
                cells[parts[0], subject] = cell
    return cells
