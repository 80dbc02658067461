"""Serves an engine over its channel: server, reports and the client of the coordinator."""
