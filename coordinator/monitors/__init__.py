"""Notices engines that are silent or stalled, and groups that do not form."""
