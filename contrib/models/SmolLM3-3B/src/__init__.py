"""SmolLM3-3B on AWS Trainium 1 and Inferentia 2 with NxD Inference. Importing this package imports no torch."""

__version__ = "0.1.0"
