"""Initial weights: of Haiku's layers (Delaunoy and Louppe 2021), of residual networks, of plain ones."""

import math

from torch import Tensor, nn

# The standard deviation of a standard normal variable kept within ±2.
_TRUNCATED_STD = 0.87962566103423978


def truncated_normal_(tensor: Tensor, std: float) -> None:
    """Fill with N(0, std²) cut at ±2 std; the values have the standard deviation 0.88 std."""
    nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)


def initialise(module: nn.Module, convolution_variance: float | None = None) -> None:
    """Draw the linear layers, convolutions and embeddings inside a module; biases are zero.

    Weights are truncated normal with std 1/√fan_in before truncation, embeddings with 1.
    convolution_variance: convolutions have this variance over fan_in after truncation instead (He: 2).
    """
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            truncated_normal_(part.weight, 1.0)
        elif isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
            std = 1 / math.sqrt(part.weight[0].numel())
            if convolution_variance is not None and not isinstance(part, nn.Linear):
                std *= math.sqrt(convolution_variance) / _TRUNCATED_STD
            truncated_normal_(part.weight, std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def initialise_by_fan_out(module: nn.Module) -> None:
    """Draw convolutions from N(0, 2/fan_out) (He et al. 2015); other layers as PyTorch draws them."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.Linear | nn.BatchNorm2d):
            part.reset_parameters()


def initialise_by_xavier(module: nn.Module) -> None:
    """Draw linear layers and convolutions from U(−b, b), b² = 6/(fan_in + fan_out) (Glorot and Bengio 2010).

    So are biases, whose fans are both their length, as in the code of Fort et al. (2019).
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                bound = math.sqrt(3 / len(part.bias))
                nn.init.uniform_(part.bias, -bound, bound)
