"""What a model is made of: its Linear layers, and whether they form a chain.

A model that is no chain is still analysed layer by layer; `why_no_chain` then says what stands in the
way of the recursions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from curvlab.chain import DROPOUTS, Chain, NoChain, chain_of
from curvlab.exceptions import ProblemError
from curvlab.layers import Layer, linear_layers, unwrap

__all__ = ["Chain", "Layer", "Network", "unwrap"]


@dataclass(frozen=True, eq=False)
class Network:
    """The Linear layers of a model, as it registers them, and their chain if they form one.

    >>> network = Network.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> [layer.name for layer in network.selected], network.chain.activations
    (['0', '2'], (ReLU(),))
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    chain: Chain | None
    why_no_chain: str

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[str] | None = None) -> Network:
        """Analyse `model`, with blocks for all trainable layers or for those named in `layers`."""
        model = unwrap(model)
        found = linear_layers(model, layers)
        network = cls(model, found, None, "")
        network.check_modes()
        try:
            chain = chain_of(model, found)
        except NoChain as reason:
            return cls(model, found, None, str(reason))
        for layer in found:
            if layer.selected and layer not in chain.layers:
                raise layer.unused([used.name for used in chain.layers])
        return cls(model, found, chain, "")

    @property
    def selected(self) -> tuple[Layer, ...]:
        """The layers that have blocks, from input to output where they form a chain."""
        layers = self.layers if self.chain is None else self.chain.layers
        return tuple(layer for layer in layers if layer.selected)

    def check_modes(self) -> None:
        """Refuse layers whose output is random, mixes the examples of a batch or changes their buffers."""
        for name, module in self.model.named_modules():
            if module.training and (isinstance(module, nn.RReLU) or _drops(module)):
                raise _in_training_mode(f"layer `{name}` ({type(module).__name__})")
            if isinstance(module, nn.modules.batchnorm._NormBase) and _uses_batch(module):
                raise ProblemError(
                    f"layer `{name}` ({type(module).__name__}) uses the statistics of the batch: examples "
                    f"depend on each other, or its running statistics would change. Call model.eval() first "
                    f"(with track_running_stats=True)"
                )
        if self.chain is not None and self.chain.eval_only and self.model.training:
            raise _in_training_mode("the functional dropout in the model's forward")

    def require_chain(self, who: str) -> Chain:
        """The chain, or an error that says why `who` cannot go on without one."""
        if self.chain is None:
            raise ProblemError(
                f"`{who}` follows a recursion from layer to layer and needs Linear layers in a chain with "
                f"element-wise activations, but {self.why_no_chain}. `fisher`, `hessian` and "
                f"`gauss-newton[kind=exact]` need no chain"
            )
        return self.chain


def _drops(module: nn.Module) -> bool:
    return isinstance(module, DROPOUTS) and module.p > 0


def _uses_batch(module: nn.modules.batchnorm._NormBase) -> bool:
    """Batch normalisation without running statistics always does; instance normalisation then does not."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training or not module.track_running_stats
    return module.training and module.track_running_stats


def _in_training_mode(what: str) -> ProblemError:
    return ProblemError(
        f"{what} is in training mode: its output is random, so the curvature would be that of one random "
        f"draw. Call model.eval() first"
    )
