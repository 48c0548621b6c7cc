"""Small data of a user's own: the files that the pages of the recipes name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support.speech import sentence as spoken_sentence
from support.tiny_images import pictures
from support.tiny_texts import corpus, save_model, sentence

MODULE = '''"""A data set of a user's own."""

import torch
from torch_geometric.data import Data


class Rings:
    """Rings of 3 to 7 nodes with random colours; is there an even number of them?"""

    def __init__(self, split):
        first = {"train": 0, "val": 20, "test": 30}[split]
        self.sizes = [3 + (first + i) % 5 for i in range(20 if split == "train" else 10)]

    def __iter__(self):
        for size in self.sizes:
            here = torch.arange(size)
            edges = torch.stack([here, (here + 1) % size])
            yield Data(x=here[:, None] % 3, edge_index=edges, y=torch.tensor([size % 2]))
'''


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A csv with a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def reviews(count: int = 40) -> list[dict[str, Any]]:
    return [{"review": sentence(i), "stars": 1 + i % 3} for i in range(count)]


def write_functions(path: Path, count: int = 24) -> Path:
    """JSON lines of code with one of three kinds."""
    kinds = ("getter", "setter", "other")
    rows = [{"code": f"int f{i} ( x ) ; {sentence(i)}", "kind": kinds[i % 3]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_photos(root: Path, classes: int = 3, each: int = 10) -> Path:
    """A folder of images for each class, and no parts."""
    pixels, labels = pictures(classes * each, classes)
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = root / f"kind{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    return root


def ring(size: int, **more: Any) -> Any:
    """A ring as PyG has it, each edge in both directions."""
    from torch_geometric.data import Data

    here = torch.arange(size)
    there = (here + 1) % size
    edges = torch.stack([torch.cat([here, there]), torch.cat([there, here])])
    return Data(x=here[:, None] % 3, edge_index=edges, **more)


def rings(count: int = 30) -> list[Any]:
    """Rings with their number of nodes, even or odd, as the class."""
    return [ring(3 + i % 5, y=torch.tensor([(3 + i % 5) % 2])) for i in range(count)]


def write_npz(path: Path, count: int = 30, **changes: Any) -> Path:
    """Rings whose label is a number, each edge once, without parts."""
    sizes = [3 + i % 5 for i in range(count)]
    edges = [[(i, (i + 1) % size) for i in range(size)] for size in sizes]
    arrays = {
        "n_node": np.array(sizes),
        "n_edge": np.array(sizes),
        "edge": np.concatenate(edges).astype(np.uint16),
        "node_feat": np.concatenate([np.arange(size) % 3 for size in sizes])[:, None],
        "y": np.array([size + 0.01 * i for i, size in enumerate(sizes)]),
    }
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def write_recordings(root: Path, count: int = 20, rate: int = 8_000) -> Path:
    """Half a second of noise in two channels each, by five speakers, and a table."""
    import soundfile

    (root / "audio").mkdir(parents=True)
    noise = np.random.default_rng(0)
    rows = []
    for i in range(count):
        wave = 0.1 * noise.normal(size=(rate // 2 + 40 * i, 2))
        soundfile.write(str(root / "audio" / f"{i}.wav"), wave, rate)
        text = f"{spoken_sentence(i).lower()} straße"
        rows.append({"path": f"audio/{i}.wav", "text": text, "speaker": f"s{i % 5}"})
    lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
    (root / "transcripts.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def write_everything(root: Path) -> Path:
    """All that the commands of the pages name."""

    write_table(root / "my.csv", reviews())
    (root / "notes.txt").write_text(corpus(400))
    (root / "my-text").mkdir()
    (root / "my-text" / "first.md").write_text(corpus(300))
    (root / "my-text" / "second.jsonl").write_text(json.dumps({"text": corpus(100)}) + "\n")
    write_functions(root / "functions.jsonl")
    write_photos(root / "photos")
    write_npz(root / "my_graphs.npz")
    torch.save(rings(), root / "my_graphs.pt")
    (root / "my_module.py").write_text(MODULE)
    write_recordings(root / "recordings")
    for kind in ("bert", "roberta", "gpt2"):
        save_model(root / f"tiny-{kind}", kind)
    return root
