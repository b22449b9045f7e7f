"""Multi-layer perceptrons."""

from collections.abc import Callable, Sequence

from torch import nn


class MLP(nn.Sequential):
    """Linear layers with an activation between them: [B, num_inputs] -> [B, num_outputs].

    Inputs with more axes are flattened. ``batch_norm`` puts BatchNorm before each activation.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        hidden: Sequence[int] = (50,),
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        width = num_inputs
        for size in hidden:
            layers.append(nn.Linear(width, size))
            if batch_norm:
                layers.append(nn.BatchNorm1d(size))
            layers.append(activation())
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = size
        super().__init__(*layers, nn.Linear(width, num_outputs))
