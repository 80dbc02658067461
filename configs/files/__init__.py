"""Files that a configuration names, read within bounds."""
