"""Sessions: prompts that grow by chunks, each with its own answer (`docs/guide/sessions.md`)."""
