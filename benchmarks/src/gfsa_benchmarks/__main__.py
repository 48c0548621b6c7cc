"""``python -m gfsa_benchmarks``: ``gfsa bench`` where the distribution is on the path alone."""

import typer

from gfsa_benchmarks.command import bench

if __name__ == "__main__":
    typer.run(bench)
