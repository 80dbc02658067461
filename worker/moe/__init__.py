"""Experts over ranks: placement, balance and exchange."""
