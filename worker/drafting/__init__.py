"""Draft models of speculative decoding: small models, EAGLE and MTP layers."""
