"""Runs any causal language model of transformers with our paged cache.

The modules are those of transformers, except for those that the other files of this folder replace.
The model gets one row [1, T] of tokens with their positions and no cache; all earlier tokens are in
our cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swell.configs.runtime.log import first_line
from swell.kernels.linear import linear_argmax
from swell.kernels.sample import greedy_sample
from swell.worker.comm.mesh import Mesh
from swell.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from swell.worker.layers.weight_shard import WeightShard, replicated_shard
from swell.worker.models.generic import masks, probe
from swell.worker.models.generic.attention import Mode, PagedAttentionHook, UnsupportedModelError
from swell.worker.models.generic.build import body_name, drop_towers, materialize, on_meta
from swell.worker.models.generic.experts import ExpertMatrix, Experts, use_expert_kernels
from swell.worker.models.generic.masks import UnsupportedMaskError
from swell.worker.models.generic.parallel import (
    StageBoundary,
    decoder_layers,
    split_stages,
    split_tensors,
)
from swell.worker.models.generic.products import (
    PackedLinear,
    TransposedLinear,
    packing_unless_read,
    use_kernels,
)
from swell.worker.models.generic.weights import WeightsMapper
from swell.worker.step.intermediate import IntermediateTensors
from swell.worker.step.layer_taps import LayerTaps

if TYPE_CHECKING:
    from swell.worker.layers.attention import Attention
    from swell.worker.step.input_batch import InputBatch
    from swell.worker.step.prompt_embeds import EmbedsOverride

ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types that differ only in their masks."""
UNSUPPORTED_TYPES = {
    "gemma4_assistant": "it reads the keys and values of another model",
    "gemma4_unified_assistant": "it reads the keys and values of another model",
    "idefics": "it computes no text without an image",
    "paligemma": "it reads its prompts in both directions",
}
"""Model type -> the reason why it cannot be served, if a trial run does not show it."""


class GenericForCausalLM(nn.Module):
    """One tensor rank's part of one pipeline stage of a transformers model."""

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        """`config` is the model's; the matrices of its linear layers stay on the meta device.

        Runs one batch of two tokens through the stage, without its peers. Raises `ValueError` for a
        model that cannot be served or split.
        """
        super().__init__()
        refuse_config(config, max_positions)
        causal, base = on_meta(config)
        self.mesh, self.device, self.dtype = mesh, device, dtype
        self.transformers_model = type(causal).__name__
        self.hidden = int(base.config.hidden_size)
        self.vocab_size = int(base.config.vocab_size)
        self.width = self.hidden
        """The size of the head's input: some models project hidden states before the head."""
        self.embedding_width = int(base.get_input_embeddings().weight.shape[1])
        self.embeds_plainly = type(base.get_input_embeddings()) is nn.Embedding
        self._stage_boundary = StageBoundary()
        self._calls = PagedAttentionHook(self.transformers_model, max_positions)
        self._names = WeightsMapper(causal)
        drop_towers(causal, base)
        split_tensors(causal, base.config, mesh.tensor)
        self.range = split_stages(causal, base, mesh, self._stage_boundary)
        if not mesh.is_last_stage:
            _drop_head(causal, base)
        materialize(causal, device, dtype)
        use_kernels(causal)
        use_expert_kernels(causal)
        self._parts = list(causal.named_modules())
        self._calls.attach(causal)
        output_layer = causal.get_output_embeddings()
        # The whole model computes the head; its body is replaced by one that returns given hidden
        # states.
        self._head_input = _HeadInput(causal.get_submodule(body_name(causal)))
        setattr(causal, body_name(causal), self._head_input)
        self.base, self.head = base, causal
        self._prompt_embeds: EmbedsOverride | None = None
        self._plain_head = output_layer if isinstance(output_layer, PackedLinear) else None
        """The layer whose outputs are the logits; None: there is more to compute."""
        if mesh.is_first_stage:
            base.get_input_embeddings().register_forward_hook(self._embed)
        self.taps = LayerTaps(self.range)
        with packing_unless_read(module for _, module in self._parts):
            self._trace()

    def forward(
        self, batch: InputBatch, intermediate: IntermediateTensors | None = None
    ) -> torch.Tensor | IntermediateTensors:
        """Computes the stage's layers for a flat batch of T tokens.

        The first stage reads `batch.input_ids`, the others `intermediate`. The last stage returns
        the normed hidden states of `batch.hidden_indices`, [W, hidden], or of all tokens.
        """
        if not len(batch.positions):  # the dummy batch: transformers cannot compute empty rows
            nothing = self.make_empty_intermediate(0)
            if not self.mesh.is_last_stage:
                return nothing
            return nothing.hidden_states.new_empty(0, self.width)
        self._calls.metadata = batch.attention
        incoming = None if intermediate is None else intermediate.hidden_states
        self.taps.begin(() if intermediate is None else intermediate.layer_inputs)
        self._prompt_embeds = batch.prompt_embeds
        hidden = self._run(batch.input_ids, batch.positions, incoming)
        if not self.mesh.is_last_stage:
            return IntermediateTensors(hidden, layer_inputs=self.taps.leaving())
        return (
            hidden if batch.hidden_indices is None else hidden.index_select(0, batch.hidden_indices)
        )

    def _embed(self, _: nn.Module, args: Any, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, width] from the embedding table -> x with the embeddings of the step's prompt
        embeddings"""
        embeds = self._prompt_embeds
        return x if embeds is None else embeds.put_into(x[0])[None]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] of the last stage -> logits [S, vocab] float32, on each tensor rank"""
        self._head_input.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)  # not read
        logits = self.head(input_ids=ids, use_cache=False).logits[0]
        return logits[:, : self.vocab_size].float()

    def argmax(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [S, hidden] of the last stage -> the tokens of the largest logits, [S] int64, and
        these logits, [S] float32"""
        if self._plain_head is None:
            return greedy_sample(self.compute_logits(hidden))
        logits, tokens = linear_argmax(hidden, self._plain_head.own_weight, self.vocab_size)
        return tokens, logits

    def _is_plain(self, head: PackedLinear | None) -> bool:
        """Whether the logits are the outputs of `head`, without a bias, a scale or a cap. While all
        weights are constant, all outputs for a token are equal: logits that equal them for hidden
        states of several magnitudes are the outputs."""
        if head is None or head.bias is not None:
            return False
        magnitudes = torch.logspace(-3, 3, 13, dtype=self.dtype, device=self.device)
        hidden = magnitudes[:, None].expand(-1, self.width).contiguous()
        outputs = head(hidden)[:, : self.vocab_size].float()
        return torch.equal(self.compute_logits(hidden), outputs)

    def tap_layers(self, layers: Sequence[int]) -> None:
        """Captures the inputs of these layers, in any stage, from now on. Raises `ValueError` for a
        model whose layers cannot be found."""
        modules = decoder_layers(self.base, self.base.config.num_hidden_layers)
        self.taps.select(layers)
        for index in self.taps.tapped:
            modules[index].register_forward_pre_hook(self._record_input, with_kwargs=True)

    def _record_input(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        x: torch.Tensor = args[0] if args else kwargs["hidden_states"]  # [1, T, hidden]
        self.taps.record(x[0])

    def attention_layers(self) -> list[Attention]:
        """Returns the attention layers of this stage, in order: each needs a KV cache."""
        return [self._calls.layers[i] for i in self.range]

    def make_empty_intermediate(self, tokens: int) -> IntermediateTensors:
        """Returns buffers for the activations of the previous stage, for `tokens` tokens."""
        x, *others = torch.empty(
            1 + self.taps.num_earlier, tokens, self.hidden, dtype=self.dtype, device=self.device
        )
        return IntermediateTensors(x, layer_inputs=others)

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Returns the parts of the checkpoint that this rank needs; `stored`: the checkpoint's
        names."""
        yield from self._names.in_checkpoint(self._own_weight_shards(), stored)

    @staticmethod
    def tied_pairs(config: Any, stored: Collection[str]) -> list[tuple[str, str]]:
        """Returns the stored names of parameters that the config ties, if both are stored.

        Returns an empty list for a model that will be refused.
        """
        try:
            return WeightsMapper(on_meta(config)[0]).tied_pairs(stored) if stored else []
        except ValueError:
            return []

    def _own_weight_shards(self) -> Iterator[WeightShard]:
        seen: set[int] = set()
        for path, module in self._parts:
            if isinstance(
                module, ColumnParallelLinear | RowParallelLinear | TransposedLinear | Experts
            ):
                yield from module.weight_shards(path)
                continue
            if isinstance(module, ExpertMatrix):
                continue  # a part of `Experts`
            persistent = [
                (name, buffer)
                for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            ]
            for name, tensor in [*module._parameters.items(), *persistent]:
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield replicated_shard(f"{path}.{name}".lstrip("."), tensor)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor | None, incoming: torch.Tensor | None
    ) -> torch.Tensor:
        """ids, positions [T]; incoming [T, hidden] on later stages -> [T, hidden]

        Without positions, transformers computes them.
        """
        inputs: dict[str, torch.Tensor] = {"input_ids": ids[None].long()}
        if incoming is not None:
            # `StageBoundary` replaces the values again right before this stage's first layer, after
            # everything that the model does to embeddings.
            self._stage_boundary.incoming = incoming[None]
            inputs = {"inputs_embeds": incoming[None]}
        if positions is not None:
            inputs["position_ids"] = positions[None].long()
        out = self.base(use_cache=False, **inputs)
        hidden = out.last_hidden_state if self.mesh.is_last_stage else self._stage_boundary.outgoing
        self._stage_boundary.incoming = self._stage_boundary.outgoing = None
        assert hidden is not None, "the stage's last layer did not pass its output on"
        return hidden[0]

    @torch.no_grad()
    def _trace(self) -> None:
        """Runs two tokens through the stage, to record the shape and the mask of each attention
        layer.

        Then runs them without masks, as in steps, up to the logits; and without positions, which
        transformers then computes: they must be the same as ours.
        """
        ids = torch.tensor([1, 0], device=self.device).clamp(max=self.vocab_size - 1)
        pad = getattr(self.base.config, "pad_token_id", None)
        if isinstance(pad, int) and 0 <= pad < self.vocab_size and pad != 1:
            ids[1] = pad  # a model that treats it specially has other masks or positions
        positions = torch.arange(2, device=self.device)
        first = self.mesh.is_first_stage
        incoming = None if first else self.make_empty_intermediate(2).hidden_states.zero_()
        calls = self._calls
        try:
            modules = [module for _, module in self._parts]
            with self.mesh.tensor.dry_run(), probe.constant_weights(modules, self.device):
                with masks.recording(self.base):
                    calls.mode = Mode.TRACE
                    given = probe.trace_integers(self.base, self._run, ids, positions, incoming)
                    calls.mode = Mode.DRY_RUN
                    found = probe.trace_integers(self.base, self._run, ids, None, incoming)
                mixed = probe.mixes_tokens(self.base, self._run, ids, positions, incoming)
                hidden = self._run(ids, positions, incoming)
                if not self.mesh.is_last_stage and hidden.shape != (2, self.hidden):
                    raise UnsupportedMaskError(
                        f"its layers return hidden states of the shape {list(hidden.shape)}"
                    )
                if self.mesh.is_last_stage:
                    self.width = hidden.shape[1]
                    logits = self.compute_logits(hidden)
                    assert logits.shape[1] == self.vocab_size, (
                        f"its logits have the shape {list(logits.shape)}"
                    )
                    if not self._is_plain(self._plain_head):
                        self._plain_head = None
        except UnsupportedMaskError as unfit:
            calls.refuse(f"{unfit}{_unsplit_hint(self.mesh)}")
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise ValueError(
                f"architecture {calls.architecture!r} cannot be served: its forward fails on two "
                f"tokens: {type(error).__name__}: {first_line(error)}{_unsplit_hint(self.mesh)}"
            ) from error
        calls.mode = Mode.COMPUTE
        silent = [i for i in self.range if i not in calls.layers]
        if silent:
            calls.refuse(
                f"its layer {silent[0]} does not call transformers' attention interface (it has an "
                "attention of its own, or a recurrent state)"
            )
        if mixed:
            calls.refuse("its tokens affect each other outside attention (a recurrent state?)")
        part = probe.first_difference(given, found)
        if part:
            calls.refuse(f"its {part} does not use the positions 0, 1, 2, ... for all tokens")


class _Body:
    """The output of a model's body for its head: all attributes except hidden states are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _HeadInput(nn.Module):
    """Replaces the body of a model, and each part of the body, and returns given hidden states. It
    has those attributes of the body that are not modules, because a head may read a table of tokens
    there."""

    hidden: torch.Tensor | None = None

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        own = vars(self)
        own.update({name: value for name, value in vars(body).items() if name not in own})

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("_") else self

    def forward(self, *args: Any, **kwargs: Any) -> _Body:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return _Body(hidden)


def refuse_config(config: Any, max_positions: int) -> None:
    """Raises `ValueError` for a config that cannot be served, before the model is built.

    `max_positions`: tokens of the longest sequence that will be served.
    """
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    text = config.get_text_config()
    why = None
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENTION_KINDS
    if getattr(config, "is_encoder_decoder", False):
        why = "it is an encoder-decoder"
    elif config.model_type in UNSUPPORTED_TYPES:
        why = UNSUPPORTED_TYPES[config.model_type]
    elif kinds:
        why = f"its layer_types include {sorted(kinds)[0]!r}"
    if why:
        raise ValueError(f"architecture {name!r} cannot be served: {why}")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [ropes, *(r for r in ropes.values() if isinstance(r, dict))]:
        kind = rope.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = getattr(text, "max_position_embeddings", None) or 0
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or limit
        if max_positions > limit:
            raise ValueError(
                f"architecture {name!r}: rope_type={kind!r} changes all angles beyond {limit} "
                f"tokens, which makes cached keys invalid; set model.max_model_len={limit} or less"
            )


def _drop_head(causal: nn.Module, base: nn.Module) -> None:
    """Removes the head: only the last stage computes logits."""
    for name, child in list(causal.named_children()):
        if base not in child.modules():
            setattr(causal, name, nn.Identity())


def _unsplit_hint(mesh: Mesh) -> str:
    """Returns the hint for an error that may be caused only by the split."""
    split = {"pipeline": mesh.pipeline.size, "tensor": mesh.tensor.size}
    ways = [f"parallel.{key}=1" for key, size in split.items() if size > 1]
    return f"; set {' and '.join(ways)}" if ways else ""
