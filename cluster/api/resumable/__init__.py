"""Answers that a client can resume after its connection was cut, and request twice."""
