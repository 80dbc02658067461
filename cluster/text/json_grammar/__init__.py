"""JSON schemas as grammars: their keywords are checked, the schemas of one place are merged, and
Lark's notation is written."""
