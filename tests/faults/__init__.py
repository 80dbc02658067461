"""Tests of the promise that answers stay right if any process, or several at once, is lost while
they stream."""
