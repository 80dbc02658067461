"""One file for each answer format, named after its model family."""
