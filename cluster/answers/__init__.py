"""Answers in the shapes of the APIs, whole or as a stream."""
