"""Where things are in a checkout, for the tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRIB = ROOT / "contrib"
MODEL = CONTRIB / "models" / "SmolLM3-3B"
TINY = MODEL / "test" / "tiny"
