"""Sessions: prompts that grow by chunks, each with its answer (`docs/sessions.md`)."""
