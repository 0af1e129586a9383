# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of a NEFF: a line that says what it is, the release that made it, and the HLO itself."""

from .errors import DeviceError
from .sdk import release

MAGIC = b"emulated Neuron device, not a NEFF; NxD Inference "


def wrap(hlo: bytes) -> bytes:
    """`hlo` is a serialized HloModuleProto."""
    return MAGIC + release().encode() + b"\n" + hlo


def unwrap(graph: bytes) -> bytes:
    """The HLO of what `wrap` made. Raises DeviceError for a real NEFF, and for a graph of another release."""
    if not graph.startswith(MAGIC):
        raise DeviceError(
            "the graph in model.pt was not made on an emulated Neuron device (is it a NEFF?): compile again here"
        )
    made_by, _, hlo = graph[len(MAGIC) :].partition(b"\n")
    if made_by.decode() != release():
        raise DeviceError(
            f"the graph in model.pt was compiled with NxD Inference {made_by.decode()}, here is {release()}: compile "
            "again"
        )
    return hlo
