# SPDX-License-Identifier: Apache-2.0
def cpu_mode() -> bool:
    """Whether the model runs on a CPU. Always true here."""
    return True
