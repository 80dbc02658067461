"""Answers that a client can continue after its connection was cut, and request twice."""
