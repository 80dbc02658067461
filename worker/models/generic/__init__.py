"""Any causal language model of transformers, with our cache, products and weights.

causal_lm   the model that a worker runs, and the trial run that accepts or refuses it
build       makes the modules of transformers, without their weights
attention   the function that replaces the attention of transformers
masks       derives the window of a layer from its mask
probe       finds what a model computes by running a few tokens with constant weights
products    packed weights for the products and lookups of a model
experts     kernels for the experts of a model
parallel    splits a model into tensor ranks and pipeline stages
weights     maps the names of the checkpoint to those of the model
"""
