"""Layers of models, split over tensor ranks."""
