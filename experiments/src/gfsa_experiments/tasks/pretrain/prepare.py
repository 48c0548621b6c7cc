"""Encode a corpus without training on it: ``python -m gfsa_experiments.tasks.pretrain.prepare``."""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gfsa_experiments.data.files import cache_folder
from gfsa_experiments.data.own import PARTS
from gfsa_experiments.tasks.pretrain.data import META, TOKENIZER, TokenizerChoice, token_files


def pack(folder: Path, out: Path) -> Path:
    """A prepared corpus with its tokens compressed, for taking it elsewhere."""
    out.mkdir(parents=True)
    for name in (META, TOKENIZER):
        shutil.copyfile(folder / name, out / name)
    for part in PARTS:
        packed = lzma.compress((folder / f"{part}.bin").read_bytes(), preset=6)
        (out / f"{part}.bin.xz").write_bytes(packed)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare a corpus, and pack it for another machine if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m gfsa_experiments.tasks.pretrain.prepare",
        description="Encode text for `gfsa train pretrain`, which does so itself if need be.",
    )
    parser.add_argument(
        "--data", default="techdocs", help="a corpus below --data-dir, a path or hub:ID"
    )
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GFSA_DATA", "data")))
    parser.add_argument("--text", default="text", help="the key or column of the text")
    parser.add_argument("--vocab-size", type=int, default=16_384, help="of the BPE that is trained")
    parser.add_argument("--tokenizer", default="", help="a tokenizer.json instead")
    parser.add_argument("--cache", default="", help="default: GFSA_CACHE, or ~/.cache/gfsa")
    parser.add_argument("--pack", type=Path, help="also write it there, compressed")
    given = parser.parse_args(arguments)
    choice = TokenizerChoice(given.tokenizer, given.vocab_size)
    cache = cache_folder(given.cache)
    try:
        found = token_files(given.data, given.data_dir, choice, cache, given.text)
        parts = found.meta.parts.items()
        print(f"{found.folder}: {', '.join(f'{n} {p.tokens:,} tokens' for n, p in parts)}")
        if given.pack is not None:
            print(f"packed into {pack(found.folder, given.pack)}")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
