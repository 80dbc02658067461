"""Turns logits into tokens: processors of logits, sampling and log probabilities."""
