"""The stages of the report: each module has `run(scale)`, which returns figures by name. It raises
`AssertionError` if a result is wrong."""
