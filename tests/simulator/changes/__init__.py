"""Engines that join, leave or change their weights while something fails."""
