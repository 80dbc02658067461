"""llama.cpp with a static batch: `MODEL ROWS INPUT_TOKENS OUTPUT_TOKENS`, batches by turns.

The weights are those of the model's folder, as a float32 GGUF in the same folder. llama.cpp pairs
rotated dimensions differently; with random weights this changes tokens, not the amount of work.
"""

import json
import os
import random
import sys
from pathlib import Path

from lines import Lines

BATCH_TOKENS, MICRO_BATCH_TOKENS = 2048, 512
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(folder):
    """Returns the GGUF of a model folder, which is created at first use."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    target = folder / "model.gguf"
    if target.exists():
        return target
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    made = folder / f"model.gguf.{os.getpid()}"
    writer = gguf.GGUFWriter(str(made), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)
    writer.add_tokenizer_model("none")
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made.rename(target)
    return target


def gguf_name(name):
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


class StaticBatch:
    """A batch whose rows all start and finish together."""

    def __init__(self, folder, rows, inputs, outputs):
        import llama_cpp

        self.lib, self.rows, self.inputs, self.outputs = llama_cpp, rows, inputs, outputs
        cores = len(os.sched_getaffinity(0))
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(
            str(convert(folder)).encode(), model_params
        )
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = rows * (inputs + outputs + 16)
        params.n_batch, params.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = cores
        params.kv_unified = False
        params.type_k = params.type_v = 0  # float32
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, outputs):
        """Computes the prompts and `outputs` greedy tokens for each row; returns the number of
        tokens."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        sampled = self._prefill(random.Random(0))
        for step in range(outputs - 1):
            self.batch.n_tokens = 0
            for row in range(self.rows):
                self._put(sampled[row], self.inputs + step, row, True)
            self._decode()
            logits = self._logits(self.lib.llama_get_logits(self.context), self.rows)
            sampled = logits.argmax(1).tolist()
        return self.rows * outputs

    def _prefill(self, rng):
        sampled = []
        group = max(1, BATCH_TOKENS // self.inputs)
        for first in range(0, self.rows, group):
            self.batch.n_tokens = 0
            ends = []
            for row in range(first, min(self.rows, first + group)):
                for position in range(self.inputs):
                    last = position == self.inputs - 1
                    self._put(rng.randrange(1000, 30_000), position, row, last)
                ends.append(self.batch.n_tokens - 1)
            self._decode()
            for end in ends:
                row = self._logits(self.lib.llama_get_logits_ith(self.context, end), 1)
                sampled.append(int(row.argmax()))
        return sampled

    def _put(self, token, position, row, samples):
        index = self.batch.n_tokens
        self.batch.token[index] = token
        self.batch.pos[index] = position
        self.batch.n_seq_id[index] = 1
        self.batch.seq_id[index][0] = row
        self.batch.logits[index] = samples
        self.batch.n_tokens = index + 1

    def _decode(self):
        code = self.lib.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")

    def _logits(self, pointer, rows):
        import numpy as np

        return np.ctypeslib.as_array(pointer, (rows, self.vocab_size))


def main(lines):
    model, (rows, inputs, outputs) = Path(sys.argv[1]), map(int, sys.argv[2:])
    contender = StaticBatch(model, rows, inputs, outputs)
    contender.run(4)
    lines.send(ready=True)
    lines.send_rates(lambda: contender.run(outputs))


if __name__ == "__main__":
    main(Lines())
