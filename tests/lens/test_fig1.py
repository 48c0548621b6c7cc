"""The shape of the paper's Fig. 1, on models that the demo trains."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from gfsa.lens import diagnose
from gfsa.lens.findings import passed
from gfsa.lens.readings import AttentionReading
from gfsa_experiments.demo.comparison import DemoSettings
from gfsa_experiments.demo.run_demo import train_all


def gains(layer: AttentionReading) -> tuple[float, float]:
    """What is passed of the upper half of the frequencies, by the map and by the filter."""
    assert layer.spectrum is not None
    return (
        passed(layer.spectrum.map_response),
        passed(layer.spectrum.filter_response),
    )


@pytest.mark.slow
def test_plain_attention_smooths_with_depth_and_filters_do_so_less() -> None:
    settings = DemoSettings("digits", seeds=1, jobs=1)
    models = train_all(settings, Progress(disable=True)).models
    images = settings.inputs()
    readings = diagnose(models, images, spectral_samples=len(images)).models
    plain, filtered = readings["plain"], readings["GFSA K=3"]
    # (a) the response: near nothing at high frequencies, least of all in deep layers
    assert gains(plain.attention[-1])[0] < 0.2
    lifted = [gains(layer) for layer in filtered.attention]
    assert all(filter_gain > map_gain for map_gain, filter_gain in lifted)
    # (b) similarity: climbs with depth, and less with filters
    assert plain.features[-1].cosine > plain.features[1].cosine + 0.2
    assert filtered.features[-1].cosine < plain.features[-1].cosine - 0.02
