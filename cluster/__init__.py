"""Text processing, the HTTP API, the client of the engines, the placement of engines, the `swell`
command, and `LLM`."""
