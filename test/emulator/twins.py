"""Broken twins."""
