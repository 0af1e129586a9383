"""docs/device_facts.md names the figures that plan.py's expectations are reckoned from, each with its source."""

from pathlib import Path

import pytest

from smollm3_neuron.machine.expectations import FIGURES, Figure

PAGE = Path(__file__).resolve().parents[1] / "docs/device_facts.md"


def row(figure: Figure) -> str:
    value = figure.value
    if value > 1e9:
        shown = f"{value / 1e9:g} GB/s"
    elif value < 0.1:
        shown = f"{value * 1e3:g} ms"
    else:
        shown = f"{value:.0%}" if value < 1 else f"{value:g}"
    address, _, rest = figure.source.partition(" ")
    return f"| {shown} | {figure.what} | [{address.rpartition('/')[2]}]({address}) {rest} |"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.what)
def test_figure(figure):
    assert row(figure) in PAGE.read_text().splitlines()


def test_the_page_says_who_measured():
    assert "**Nothing on this page was measured by this project**" in PAGE.read_text()
