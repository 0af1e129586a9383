# SPDX-License-Identifier: Apache-2.0
"""The public sources of NxD and NxD Inference, run on a CPU with the SDK's closed modules stood in for."""
