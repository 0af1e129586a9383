# SPDX-License-Identifier: Apache-2.0
"""An emulated Neuron device: NxD Inference's own compile, load and forward on a machine that has none. See README.md.

Nothing here is a device: the HLO stands in the place of the NEFF, XLA-CPU in the place of the NeuronCores.
"""

import os
from pathlib import Path

NAME = "emulated Neuron device"
FOLDER = Path(__file__).resolve().parent
DEVICE_FILES = FOLDER / "dev"  # in the place of /dev
CORES = int(os.environ.get("NEURON_EMULATOR_CORES", 32))
