"""laplace-torch: a Gaussian with diagonal curvature around a network; every call draws its members anew."""

from torch import nn

from league.jobs import NUM_CLASSES, Sizes, Timed, classification
from league.networks import MLP, loader, tensors


def prediction(sizes: Sizes) -> Timed:
    from laplace import Laplace

    module: nn.Module = MLP(NUM_CLASSES).eval()
    posterior = Laplace(module, "classification", subset_of_weights="all", hessian_structure="diag")
    posterior.fit(loader(*tensors(classification(sizes.rows)), sizes.batch_size))
    x, _ = tensors(classification(sizes.points))

    def run() -> None:
        for _ in range(sizes.calls):
            posterior(x, pred_type="nn", link_approx="mc", n_samples=sizes.members)

    return Timed(run)
