"""NxD Inference's compile path without a device, up to the call of neuronx-cc, see README.md."""
