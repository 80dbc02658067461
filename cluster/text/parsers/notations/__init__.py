"""How calls are written: JSON, tagged elements, Python calls; parsers and grammars."""
