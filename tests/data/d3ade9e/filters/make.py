"""Writes this folder with the library as it was at commit d3ade9e; see README.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

import gfsa
from support.saved_filters import FOLDER, PLUGGED, PRETRAINED, encoder, fill_filters, output_of


def main() -> None:
    expected = {}
    for name, arguments in PLUGGED.items():
        model = encoder()
        gfsa.plug(model, **arguments)
        fill_filters(model, size=0.05 if name == "pruned" else 0.3)
        if name == "pruned":
            gfsa.prune(model, tolerance=0.045)
        gfsa.save(model, fresh(FOLDER / name))
        expected[name] = output_of(model).double().tolist()
    for name, build in PRETRAINED.items():
        model = build()
        gfsa.plug(model, K=3)
        fill_filters(model)
        model.save_pretrained(fresh(FOLDER / name))
        expected[name] = output_of(model).double().tolist()
    model = encoder()
    gfsa.plug(model, K=4, layers=[2], learn=("wK",))
    fill_filters(model)
    torch.save(model.state_dict(), FOLDER / "state_dict.pt")
    expected["state_dict"] = output_of(model).double().tolist()
    (FOLDER / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    main()
