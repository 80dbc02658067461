"""The forms of weights other than plain tensors."""
