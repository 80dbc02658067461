"""Models in GGUF files, the format of llama.cpp: one file with the config, the tokenizer and the
weights.

`header` reads a file. `architectures` (with `metadata` and `rope`) turns its metadata into a
`config.json`, and `tokenizer` (with `spm` and `byte_pairs`) into a `tokenizer.json`. `unpacked`
keeps these small files in a folder, from which the server reads them as from any model folder. The
weights stay in the GGUF file, where the workers read them; `tensor_names` gives them the names of
transformers.
"""
