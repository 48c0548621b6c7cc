"""Importing gfsa costs next to nothing and needs torch alone."""

import subprocess
import sys

LOADED = """
import sys
import torch
before = set(sys.modules)
import gfsa
gfsa.GFSA(2).coefficients()
gfsa.graph_filter_attention(*[torch.zeros(1, 2, 3, 4)] * 3, torch.ones(3))
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(" ".join(sorted(added - set(sys.stdlib_module_names))))
"""

ALONE = """
import sys
import gfsa
assert "torch" not in sys.modules
assert gfsa.functional.which_backend and gfsa.plugs.sites and gfsa.filters and gfsa.operators
assert gfsa.plug is gfsa.plugs.plug
assert not hasattr(gfsa, "no_such_name")
"""

SECONDS = """
import time
import torch
start = time.process_time()
import gfsa
gfsa.plug
print(time.process_time() - start)
"""


def run(program: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return finished.stdout.strip()


def test_pulls_in_torch_and_the_standard_library_only() -> None:
    assert set(run(LOADED).split()) <= {"gfsa", "torch"}


def test_torch_is_imported_with_the_first_name_that_needs_it() -> None:
    run(ALONE)


def test_adds_less_than_a_fifth_of_a_second() -> None:
    # its own time, not that of others on the machine, which may still delay some of a few
    assert any(float(run(SECONDS)) < 0.2 for _ in range(4))


def test_public_names_are_there() -> None:
    import gfsa

    assert all(hasattr(gfsa, name) for name in gfsa.__all__)
    assert set(gfsa.__all__) <= set(dir(gfsa))
    assert gfsa.__version__.count(".") >= 1
