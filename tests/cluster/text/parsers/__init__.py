"""Tests of the parsers of model outputs."""
