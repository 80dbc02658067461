"""Captures the inputs of decoder layers, for a draft head that reads them (EAGLE-3)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class LayerTaps:
    """The taps of one pipeline stage. The layer loop of a decoder records the inputs of the layers
    in `tapped`, and each stage passes the inputs so far on to the next one, in layer order:

        layers        0  1 | 2  3 | 4  5      three stages; the selected layers are 1, 4 and 2
        stage 0          1                    passes on [1]
        stage 1               2               passes on [1, 2]
        stage 2                     4         `take` returns [1, 4, 2]
    """

    def __init__(self, layers: range) -> None:
        """`layers`: the layers of this stage."""
        self._layers = layers
        self._selected: Sequence[int] = ()
        self.tapped: frozenset[int] = frozenset()
        """The layers of this stage whose inputs are captured."""
        self._inputs: list[Tensor] = []
        """[T, hidden] each: the inputs of this step so far, in layer order."""

    def select(self, layers: Sequence[int]) -> None:
        """Captures the inputs of these layers, of any stage, from now on."""
        self._selected = layers
        self.tapped = frozenset(layers).intersection(self._layers)

    @property
    def num_earlier(self) -> int:
        """Number of inputs that the earlier stages pass on."""
        return sum(layer < self._layers.start for layer in {*self._selected})

    def begin(self, earlier: Sequence[Tensor]) -> None:
        """Starts a step with the inputs of the earlier stages."""
        self._inputs = list(earlier)

    def record(self, x: Tensor) -> None:
        """Captures x [T, hidden], the input of the next layer in `tapped`."""
        self._inputs.append(x)

    def leaving(self) -> list[Tensor]:
        """Returns the inputs for the next stage; then drops them."""
        inputs, self._inputs = self._inputs, []
        return inputs

    def take(self) -> list[Tensor]:
        """Returns the inputs of the last step on the last stage, in the order of `select`; then
        drops them."""
        if not self._selected:
            return []
        by_layer = dict(zip(sorted({*self._selected}), self.leaving(), strict=True))
        return [by_layer[layer] for layer in self._selected]


NO_TAPS = LayerTaps(range(0))
"""The taps of a model that has none."""
