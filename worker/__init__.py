"""The worker, which owns the tensors: batch, model, cache, sampler, groups."""
