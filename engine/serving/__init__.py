"""The engine behind its channel: server, reports and the coordinator's client."""
