"""Multi-layer perceptrons."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from polymode.errors import InputError, require, require_positive
from polymode.models.dropout import require_rate


class MLP(nn.Sequential):
    """Linear layers with an activation between them: [B, num_inputs] -> [B, num_outputs].

    Inputs with more axes are flattened. batch_norm: "before" (or true) puts BatchNorm before each activation,
    "after" behind it, as Chang et al. (2019) do. input_norm: BatchNorm of the inputs as well. norm_scale: the
    scale γ that BatchNorm starts at. dropout: its rate behind each activation, directly before a BatchNorm
    "after". input_dropout: the inputs are dropped too. output_bias: whether the last layer has a bias.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        hidden: Sequence[int] = (50,),
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        batch_norm: bool | Literal["before", "after"] = False,
        input_norm: bool = False,
        norm_scale: float = 1.0,
        dropout: float = 0.0,
        input_dropout: bool = False,
        output_bias: bool = True,
    ) -> None:
        if batch_norm not in (False, True, "before", "after"):
            raise InputError(f'batch_norm must be false, true, "before" or "after", got {batch_norm!r}.')
        for name, switch in (
            ("input_norm", input_norm),
            ("input_dropout", input_dropout),
            ("output_bias", output_bias),
        ):
            require(isinstance(switch, bool), f"{name} must be true or false, got {switch!r}.")
        require_rate(dropout)
        require_positive("norm_scale", norm_scale)
        require(
            norm_scale == 1 or bool(batch_norm) or input_norm,
            f"norm_scale={norm_scale} is the scale of BatchNorm, which this network lacks: set batch_norm or "
            "input_norm.",
        )
        layers: list[nn.Module] = [
            nn.Flatten(),
            *_noise_and_norm(num_inputs, dropout if input_dropout else 0.0, input_norm),
        ]
        width = num_inputs
        for size in hidden:
            layers.append(nn.Linear(width, size))
            if batch_norm in (True, "before"):
                layers.append(nn.BatchNorm1d(size))
            layers += [activation(), *_noise_and_norm(size, dropout, batch_norm == "after")]
            width = size
        super().__init__(*layers, nn.Linear(width, num_outputs, bias=output_bias))
        self.norm_scale = norm_scale
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        # The layers draw their own weights, and BatchNorm resets its scale to 1.
        for part in self:
            if isinstance(part, nn.BatchNorm1d):
                nn.init.constant_(part.weight, self.norm_scale)


def _noise_and_norm(width: int, dropout: float, norm: bool) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    return [*layers, nn.BatchNorm1d(width)] if norm else layers
