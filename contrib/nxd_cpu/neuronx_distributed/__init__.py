# SPDX-License-Identifier: Apache-2.0
"""NxD's tensor parallel layers for the CPU. Every rank is a thread of this process; see `_cpu.py`."""
