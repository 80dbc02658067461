"""Tests of executors whose workers run in the process of the engine."""
