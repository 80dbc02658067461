"""Text and tokens: templates, tokenizing, detokenizing, parsers, structured output."""
