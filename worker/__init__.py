"""Tensors: batch, model, cache, sampler, groups."""
