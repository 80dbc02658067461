"""The cluster under test, and the folder of its model."""

from __future__ import annotations

from pathlib import Path

from tests.faults.process import Cluster, ClusterFailed, enable_sigint

__all__ = ["NANO", "ROOT", "Cluster", "ClusterFailed", "enable_sigint"]

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "configs" / "models" / "nano"
