"""What one step of token generation calls on the real library's sources, against the table in docs/performance.md."""

import re

import pytest
from places import ROOT, TINY

from nxd_sources.release import run_real

ROW = re.compile(r"^\| (\S+) \| (on|off) \| ([\d,]+) \| (\d+) \| (\d+) \| (\d+) \|", re.M)
AT_MOST = {"on": 74, "off": 90}  # matrix products


def written() -> dict[tuple[str, str], list[int]]:
    text = (ROOT / "docs/performance.md").read_text().partition("## Graph cost")[2]
    return {
        (release, fused): [int(n.replace(",", "")) for n in numbers] for release, fused, *numbers in ROW.findall(text)
    }


def test_the_table_is_complete():
    assert len(written()) == 6 and all(numbers[2] <= AT_MOST[fused] for (_, fused), numbers in written().items())


def test_a_step_costs_what_the_table_says(nxd_releases, tmp_path):
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC, the sources of the real library")
    for release in nxd_releases:
        jobs = [
            {
                "name": fused,
                "kind": "cost",
                "checkpoint": str(TINY),
                "neuron": {"tp_degree": 1, "batch_size": 1, "seq_len": 128, "fused_qkv": fused == "on"},
            }
            for fused in ("off", "on")
        ]
        for fused, found in run_real(release, jobs, tmp_path / release.version).items():
            assert "error" not in found, found["error"]
            counted = [found["calls"], found["computing"], found["products"], found["by_origin"]["model"]]
            assert counted == written()[release.version, fused]
            assert found["products"] <= AT_MOST[fused]
