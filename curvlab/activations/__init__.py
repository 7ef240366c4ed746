"""Element-wise activations: σ, σ' and σ'', and the Lipschitz constant sup |σ'|."""

from curvlab.activations.base import Activation
from curvlab.activations.elementwise import Elementwise, elementwise
from curvlab.activations.lookup import (
    FUNCTIONS,
    NAMES,
    activation_of,
    by_name,
    module_of,
    register_activation,
)
from curvlab.activations.piecewise_linear import (
    Hardsigmoid,
    Hardtanh,
    Identity,
    LeakyReLU,
    PiecewiseLinear,
    ReLU,
)
from curvlab.activations.smooth import ELU, GELU, Mish, Sigmoid, SiLU, Softplus, Tanh, TanhGELU

__all__ = [
    "ELU",
    "FUNCTIONS",
    "GELU",
    "NAMES",
    "Activation",
    "Elementwise",
    "Hardsigmoid",
    "Hardtanh",
    "Identity",
    "LeakyReLU",
    "Mish",
    "PiecewiseLinear",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
    "TanhGELU",
    "activation_of",
    "by_name",
    "elementwise",
    "module_of",
    "register_activation",
]
