"""JSON schemas as grammars: checks the keywords, merges the schemas of each place, and writes
Lark's notation."""
