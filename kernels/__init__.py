"""Operations on tensors: one file for each operation, with its formula, its shapes and the backends
that compute it."""
