"""Figure 3 of Chang et al. (2019): functions of one hidden layer from the prior, through dropout and EMP.

    python experiments/model_patching/prior_functions.py --out FOLDER

y = B + Σ_h W_h sign(b_h + w_h x) with H = 100 units, B and b ~ N(0, 20), W and w ~ N(0, 5), read as
variances. Left: each w and W is dropped with probability 0.5. Right: each weight and bias comes from one of
K = 5 such draws, chosen for each layer (EMP), or for each scalar (ECMP). The steps of every function are in
prior-functions-replicates.csv.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from polymode.application.comparison import add_result
from polymode.networks.surgery import trainable_names
from polymode.weights.mixtures import Family, family_of, mixture_over

UNITS, POINTS = 100, 801
FAMILIES = {
    "dropout, p = 0.5": Family("scalar", 1, drop=0.5),  # one input, one output: a weight is a unit
    "EMP, K = 5": family_of("emp", 5),
    "ECMP, K = 5": family_of("ecmp", 5),
}


class Sign(nn.Module):
    """sign(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


def network() -> nn.Sequential:
    """One hidden layer of sign units."""
    return nn.Sequential(nn.Linear(1, UNITS), Sign(), nn.Linear(UNITS, 1))


def functions(family: Family, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Functions [number, points], every one from components of its own."""
    module = network()
    mixture = mixture_over(module, "Linear", family, trainable_names(module))
    x = torch.linspace(-5, 5, POINTS)[:, None]
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for index in range(number):
        weights = {}
        for name, parameter in module.named_parameters():
            count = family.num_components if name in mixture.shapes else 1
            scale = math.sqrt(20 if name.endswith("bias") else 5)
            components = scale * torch.randn(count, *parameter.shape, generator=generator)
            weights[name] = components if name in mixture.shapes else components[0]
        weights |= mixture.realise(weights, torch.tensor(1000 * seed + index))
        if family.drop:  # they drop weights as they are, without dividing by what is kept
            weights |= {name: weights[name] * (1 - family.drop) for name in mixture.shapes}
        drawn.append(torch.func.functional_call(module, weights, (x,)).flatten())
    return x.flatten(), torch.stack(drawn)


def main() -> None:
    """Draw the figure."""
    from plotly.subplots import make_subplots

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    figure = make_subplots(1, len(FAMILIES), subplot_titles=list(FAMILIES), shared_yaxes=True)
    for column, (label, family) in enumerate(FAMILIES.items(), 1):
        x, drawn = functions(family, 3, seed=column)
        steps = (drawn.diff(dim=1) != 0).sum(1).tolist()
        each = {index: {"steps": float(number)} for index, number in enumerate(steps)}
        table = options.out / "prior-functions.csv"
        row = add_result(table, {"family": label}, "function", each, digits=1)
        print(f"{label}: {row['steps']} ±{row['steps_se']} steps between -5 and 5")
        for y, colour in zip(drawn, ("#0072B2", "#D55E00", "#009E73"), strict=True):
            figure.add_scatter(
                x=x.tolist(),
                y=y.tolist(),
                mode="lines",
                line={"color": colour, "width": 1.5},
                row=1,
                col=column,
            )
    axis = {"showline": True, "linecolor": "#999", "ticks": "outside", "gridcolor": "#e6e6e6"}
    figure.update_xaxes(title="x", **axis)
    figure.update_yaxes(zeroline=False, **axis)
    figure.update_layout(showlegend=False, height=380, width=1100, plot_bgcolor="white")
    figure.write_html(options.out / "prior-functions.html", include_plotlyjs=True)


if __name__ == "__main__":
    main()
