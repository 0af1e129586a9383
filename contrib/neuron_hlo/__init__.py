# SPDX-License-Identifier: Apache-2.0
"""NxD Inference's compile path without a device, up to the call of neuronx-cc, see README.md."""
