"""The interfaces of models. Every model is a `Model`; `TextGenerationModel` and `PoolingModel` are
the two kinds; the other protocols are optional capabilities.

A model object is one tensor rank's part of one pipeline stage. Code that needs a capability asks
for it with `isinstance` when it is built, not in each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, device, nn

if TYPE_CHECKING:
    from swell.worker.comm.mesh import Mesh
    from swell.worker.layers.attention import Attention
    from swell.worker.layers.linear import LinearLayer
    from swell.worker.layers.lora import ActiveAdapters
    from swell.worker.layers.moe import ExpertTraits, MoE, PlainExpert
    from swell.worker.layers.weight_shard import WeightShard
    from swell.worker.step.input_batch import InputBatch
    from swell.worker.step.intermediate import IntermediateTensors
    from swell.worker.step.layer_taps import LayerTaps


@runtime_checkable
class HoldsTensors(Protocol):
    """The part of `torch.nn.Module` that loading, packing and sleeping need."""

    def modules(self) -> Iterator[nn.Module]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...


class HasKVCache(HoldsTensors, Protocol):
    """A model, or a draft head, with attention."""

    def attention_layers(self) -> list[Attention]:
        """Returns the attention layers of this stage, in order: each needs a KV cache."""


class Model(HasKVCache, Protocol):
    """The part of any model that one worker computes."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    def __call__(
        self, batch: InputBatch, intermediate: IntermediateTensors | None = None, /
    ) -> Any:
        """Computes the stage's layers for T tokens. Returns the hidden states of
        `batch.hidden_indices`, or of all tokens, [T, hidden] on the last stage, otherwise
        `IntermediateTensors`."""

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Returns the shards to read from a checkpoint that has the tensors named `stored`."""


@runtime_checkable
class ComputesLogits(Protocol):
    """A model with a head that computes logits."""

    def compute_logits(self, hidden: Tensor, /) -> Tensor:
        """hidden [S, hidden] of the last stage -> [S, vocab] float32, on every tensor rank"""

    def argmax(self, hidden: Tensor, /) -> tuple[Tensor, Tensor]:
        """hidden [S, hidden] of the last stage -> the tokens of the largest logits, [S] int64, and
        these logits, [S] float32 (see `swell.kernels.sample.greedy_sample`), on every tensor
        rank"""


@runtime_checkable
class ComputesWithTorch(Protocol):
    """A model in which torch may compute any operation, so that its bits depend on the features of
    the processor."""

    transformers_model: str
    """The name of the class that computes it."""


@runtime_checkable
class SupportsPP(Protocol):
    """A model that pipeline stages divide."""

    def make_empty_intermediate(self, tokens: int) -> IntermediateTensors:
        """Returns buffers for the activations of the previous stage, for `tokens` tokens."""


@runtime_checkable
class SupportsLayerTaps(Protocol):
    """A decoder that captures the inputs of its layers, for a draft head that reads them."""

    @property
    def taps(self) -> LayerTaps: ...

    def tap_layers(self, layers: Sequence[int]) -> None:
        """Captures the inputs of these layers, in any stage, from now on. Raises `ValueError` if
        the layers cannot be found."""


@runtime_checkable
class SupportsPromptEmbeds(Protocol):
    """A model whose prompts may be given as embeddings."""

    @property
    def embedding_width(self) -> int:
        """The size of one embedding."""


@runtime_checkable
class SupportsMTP(Protocol):
    """A model whose checkpoint may have a layer for multi-token prediction."""

    @property
    def embeds_plainly(self) -> bool:
        """Whether the embedding of a token is a row of the table, without anything added."""


@runtime_checkable
class SupportsLoRA(Protocol):
    """A model whose linear layers adapters may adapt."""

    @property
    def takes_adapters(self) -> bool:
        """Whether all linear layers are adaptable: those of experts are not."""

    @property
    def device(self) -> device: ...

    @property
    def active_adapters(self) -> ActiveAdapters: ...

    def linear_layers(self) -> Iterator[tuple[LinearLayer, tuple[str, ...]]]:
        """Yields the linear layers of this stage, each with its matrices' names in the
        checkpoint."""

    def linear_modules(self) -> list[str]:
        """Returns the checkpoint's names of all linear layers' matrices, in all stages."""


class TextGenerationModel(
    Model,
    ComputesLogits,
    SupportsPP,
    SupportsLayerTaps,
    SupportsPromptEmbeds,
    SupportsMTP,
    Protocol,
):
    """A model that samples tokens."""

    @property
    def mesh(self) -> Mesh: ...

    @staticmethod
    def tied_pairs(config: Any, stored: Collection[str]) -> list[tuple[str, str]]:
        """Returns pairs of names in `stored` that the config ties."""


@runtime_checkable
class HasMesh(HoldsTensors, Protocol):
    """A model that knows its place among the workers, so saved shards can be loaded into it."""

    @property
    def mesh(self) -> Mesh: ...


class PoolingModel(Model, Protocol):
    """A model that pools (`swell.worker.pooling`)."""

    @property
    def hidden(self) -> int:
        """The size of a hidden state."""

    @property
    def classifier(self) -> nn.Module | None:
        """Maps pooled hidden states [P, hidden] to scores [P, classes]; None: the model does not
        classify."""


@runtime_checkable
class HasSegments(Protocol):
    """A model that pools, with embeddings for the two texts of a pair."""

    @property
    def segment_starts(self) -> dict[int, int]:
        """Slot -> position of the second text."""


@runtime_checkable
class HasPositionTable(Protocol):
    """A model with an embedding for each position."""

    @property
    def max_positions(self) -> int:
        """Tokens of the longest text."""


@runtime_checkable
class HasMoELayers(Protocol):
    """A model, or a draft head, with layers that have experts."""

    def moe_layers(self) -> list[MoE]:
        """Returns the layers of this stage that have experts, in order. Every worker of the stage
        must compute each of them in every step."""


@runtime_checkable
class MixtureOfExperts(HasMoELayers, SupportsPP, Protocol):
    """A model whose experts engines can share."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def range(self) -> range:
        """The layers of this stage."""

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts, in all stages."""

    @property
    def expert_traits(self) -> ExpertTraits: ...

    def expert_weight_shards(
        self, expert: int, weights: Mapping[int, PlainExpert]
    ) -> Iterator[WeightShard]:
        """Returns the shards that fill an expert's weights; `weights`: index of the layer among
        `moe_layers` -> the expert's weights."""


def moe_layers(model: object) -> list[MoE]:
    """Returns the layers that have experts; none for a model without such layers."""
    return model.moe_layers() if isinstance(model, HasMoELayers) else []
