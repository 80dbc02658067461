"""Stored responses and sessions: one process for all ingresses, and the calls to it."""
