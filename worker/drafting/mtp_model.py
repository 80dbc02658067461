"""The layer for multi-token prediction (MTP) that comes with a model (DeepSeek-V3,
arXiv:2412.19437, section 2.2).

It is one more layer of the target model: f are the target model's normed hidden states, and x is
the next token.

    y = eh_proj([enorm(embed(x)), hnorm(f)]);   own = norm(layer(y));   logits = head(own)

After the first pass, `own` of the position before replaces f. The layer is built as the second
pipeline stage of a model with two layers, whose first layer is omitted. So every model that can be
split into stages, natively or through transformers, can have an MTP layer. If a checkpoint has
several such layers, one for each token to propose, the first one makes all proposals.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.drafting.draft_runner import StepHidden
from swell.worker.drafting.eagle_model import EMBEDDING, HEAD
from swell.worker.layers.attention import Attention
from swell.worker.layers.embedding import VocabParallelEmbedding
from swell.worker.layers.linear import ReplicatedLinear
from swell.worker.layers.moe import MoE
from swell.worker.layers.norm import RMSNorm
from swell.worker.layers.weight_shard import WeightShard, materialize
from swell.worker.model_interfaces import TextGenerationModel, moe_layers
from swell.worker.models import build_model
from swell.worker.step.intermediate import IntermediateTensors

if TYPE_CHECKING:
    from swell.worker.step.input_batch import InputBatch

_LAYER, _NORM = "model.layers.1", "model.norm"
_NOT_PLAIN = (
    "the model's norms are not plain RMSNorms, or its embedding does more than a lookup; layers "
    "for multi-token prediction of such models are not supported"
)
_OF_TOKENS = ("lm_head.weight", "model.embed_tokens.weight")
"""The names that the LM head's weights may have in a model of two layers."""


@dataclass(frozen=True)
class Layout:
    """The names in a checkpoint, without `.weight`. {n} is the number of the model's own layers."""

    layer: str
    embed_norm: str
    hidden_norm: str
    projection: str
    norm: str
    embedding: str
    """The layer's own embedding, if it is stored; otherwise the layer uses the target model's. The
    same holds for `head`."""
    head: str

    def of(self, num_layers: int) -> Layout:
        names = dataclasses.asdict(self).items()
        return Layout(**{key: name.format(n=num_layers) for key, name in names})


_APPENDED = Layout(
    layer="model.layers.{n}",
    embed_norm="model.layers.{n}.enorm",
    hidden_norm="model.layers.{n}.hnorm",
    projection="model.layers.{n}.eh_proj",
    norm="model.layers.{n}.shared_head.norm",
    embedding="model.layers.{n}.embed_tokens",
    head="model.layers.{n}.shared_head.head",
)
LAYOUTS = (
    _APPENDED,  # DeepSeek-V3, GLM-4.5 and later
    dataclasses.replace(_APPENDED, norm="model.layers.{n}.final_layernorm"),  # HY3
    Layout(  # EXAONE-MoE, Mellum
        layer="mtp.layers.0",
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        embedding="mtp.embed_tokens",
        head="mtp.lm_head",
    ),
)


def find_layout(stored: Collection[str], num_layers: int) -> Layout:
    """Returns the layout of a checkpoint with tensors of these names; the first one for random
    weights, whose list of names is empty. Raises `ValueError` if there is no such layer."""
    layouts = [layout.of(num_layers) for layout in LAYOUTS]
    if not stored:
        return layouts[0]
    found = [layout for layout in layouts if f"{layout.projection}.weight" in stored]
    if found:
        whole = (layout for layout in found if f"{layout.norm}.weight" in stored)
        return next(whole, found[0])
    names = " or ".join(sorted({repr(f"{layout.projection}.weight") for layout in layouts}))
    raise ValueError(
        f"the weights have no layer for multi-token prediction (no tensor {names}); set "
        "drafts.method=ngram, or set drafts.model.path to a folder that has the layer"
    )


class MtpModel(nn.Module):
    block: TextGenerationModel
    """The layer, as the second stage of a model of two layers."""

    def __init__(
        self,
        config: Any,
        served: ModelConfig,
        stored: Collection[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`config`, `served`: those of the target model; `stored`: names of the tensors in the
        checkpoint that has the layer. Raises `ValueError` if the checkpoint lacks the layer, or has
        one that cannot be served."""
        super().__init__()
        text = config.get_text_config()
        self.layout = find_layout(stored, text.num_hidden_layers)
        self.dtype, self._stored = dtype, stored
        # Nothing is sent in the groups of this mesh.
        mesh = Mesh.build(ParallelConfig(pipeline=2), 1, device=device)
        size, eps = text.hidden_size, getattr(text, "rms_norm_eps", None)
        if eps is None:
            raise ValueError(f"{_NOT_PLAIN}; set drafts.method=ngram")
        self.embed = VocabParallelEmbedding(text.vocab_size, size, mesh.tensor)
        self.embed_norm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.projection = ReplicatedLinear(2 * size, size, bias=False)
        materialize(self, device, dtype)
        experts = (name for name in stored if ".experts." in name)
        is_sparse = any(name.startswith(f"{self.layout.layer}.") for name in experts)
        two_layers = _two_layers(config, is_sparse if stored else None)
        try:
            block: Any = build_model(served, two_layers, mesh, device, dtype)
            self.block = block
        except ValueError as error:
            why, _, _ = str(error).partition("; set parallel.")
            raise ValueError(f"one layer of the model cannot be built by itself: {why}") from None

    def select(self, hidden: StepHidden) -> Sequence[Tensor]:
        return [hidden.last]

    def features(self, selected: Sequence[Tensor]) -> Tensor:
        return selected[0].to(self.dtype)

    def forward(self, ids: Tensor, features: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
        read = torch.cat((self.embed_norm(self.embed(ids)), self.hidden_norm(features)), -1)
        own = self.block(batch, IntermediateTensors(self.projection(read)))
        return own, own

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.block.argmax(hidden)[0]

    def attention_layers(self) -> list[Attention]:
        return self.block.attention_layers()

    def moe_layers(self) -> list[MoE]:
        """Returns the MoE layers, like those of the target model."""
        return moe_layers(self.block)

    @torch.no_grad()
    def check(self) -> None:
        """Raises `ValueError` if the target model's norms or its embedding are of another kind than
        those of this layer; called when its weights are loaded."""
        norms = (each for name, each in self.block.named_modules() if _is_norm(name, each))
        if not self.block.embeds_plainly or not any(self._is_plain(norm) for norm in norms):
            raise ValueError(f"{_NOT_PLAIN}; set drafts.method=ngram")

    def _is_plain(self, norm: Any) -> bool:
        weight: Tensor = norm.weight
        x = torch.linspace(-2, 2, len(weight), device=weight.device)[None]
        expected = x * (x.square().mean() + self.embed_norm.eps).rsqrt() * weight.float()
        return torch.allclose(norm(x.to(weight.dtype)).float(), expected, 0.05, 0.05)

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Returns the shards to read from the checkpoint that has the layer. Raises `ValueError` if
        the checkpoint has further tensors of the layer."""
        read = list(self._weight_shards())
        unread = {name for name in stored if name.startswith(f"{self.layout.layer}.")}
        unread -= {shard.name for shard in read}
        if extra := min((name for name in unread if not name.endswith("inv_freq")), default=""):
            raise ValueError(
                f"the weights have the tensor {extra!r}, and this model's layers have nothing of "
                "that name; the layer belongs to another model"
            )
        yield from read

    def _weight_shards(self) -> Iterator[WeightShard]:
        layout = self.layout
        yield from self.embed_norm.weight_shards(layout.embed_norm)
        yield from self.hidden_norm.weight_shards(layout.hidden_norm)
        yield from self.projection.weight_shards(layout.projection)
        for name, fill in self._of_tokens().items():
            if self._has(name):
                yield from fill(name)
        for shard in self._block_shards():
            if shard.name not in _OF_TOKENS:
                yield dataclasses.replace(shard, name=_stored_name(layout, shard.name))

    def borrowed(self) -> dict[str, Callable[[str], Iterable[WeightShard]]]:
        """Returns `EMBEDDING` or `HEAD` -> the shards that fill it from a tensor of the target
        model's checkpoint."""
        kinds = zip((EMBEDDING, HEAD), self._of_tokens().items(), strict=True)
        return {kind: fill for kind, (name, fill) in kinds if not self._has(name)}

    def _of_tokens(self) -> dict[str, Callable[[str], Iterable[WeightShard]]]:
        """Returns the layout's names of the embedding and of the head -> the shards that fill each
        from a tensor."""
        return {
            self.layout.embedding: self.embed.weight_shards,
            self.layout.head: self._head_shards,
        }

    def _has(self, name: str) -> bool:
        return f"{name}.weight" in self._stored

    def _head_shards(self, name: str) -> Iterator[WeightShard]:
        for shard in self._block_shards():
            if shard.name in _OF_TOKENS:
                yield dataclasses.replace(shard, name=f"{name}.weight")

    def _block_shards(self) -> Iterable[WeightShard]:
        """Returns the block's shards, with the names of a model of two layers."""
        prefix = f"{self.layout.layer}."
        layer = (name.removeprefix(prefix) for name in self._stored if name.startswith(prefix))
        try:
            return list(self.block.weight_shards([f"{_LAYER}.{name}" for name in layer]))
        except ValueError as error:
            raise ValueError(str(error).replace(f"{_LAYER}.", prefix)) from None


def _stored_name(layout: Layout, name: str) -> str:
    """Returns the checkpoint's name of a tensor of the two-layer model."""
    for prefix, own in ((_LAYER, layout.layer), (_NORM, layout.norm)):
        if name.startswith(f"{prefix}."):
            return own + name.removeprefix(prefix)
    return name


def _is_norm(name: str, module: nn.Module) -> bool:
    """Whether the module is the norm of a layer's hidden states."""
    return name.endswith(("attention_norm", "input_layernorm")) and hasattr(module, "weight")


def _two_layers(config: Any, is_sparse: bool | None) -> Any:
    """Returns the config of a model whose second layer is this layer, with experts or without.
    Other properties that differ between layers are those of the target model's last layer, unless
    the config says otherwise."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, key, [(getattr(text, f"mtp_{key}", None) or value[-1:])[0]] * 2)
    if is_sparse is None:
        is_sparse = (getattr(text, "mlp_layer_types", None) or ["sparse"])[-1] == "sparse"
    kinds = {
        "mlp_layer_types": ["sparse" if is_sparse else "dense"] * 2,
        "mlp_only_layers": [] if is_sparse else [0, 1],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0 if is_sparse else 2,
    }
    for key, kind in kinds.items():
        if getattr(text, key, None) is not None:
            setattr(text, key, kind)
    text.num_hidden_layers = 2
    return config
