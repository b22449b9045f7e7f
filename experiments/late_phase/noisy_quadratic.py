"""The noisy quadratic problem: where late-phase weights can be calculated (von Oswald et al. 2021, §3.1)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vecdot

from polymode.errors import require, require_positive, require_whole
from polymode.seeds import derive_generator

CHUNK = 2**20  # random numbers drawn at once: one call serves many steps, and they stay in the cache


@dataclass(frozen=True)
class NoisyQuadratic:
    """L(w) = ½ (w − w*)ᵀ H (w − w*) with H_ii = 1/i, w* = 1, whose gradients are H (w − w* + ε).

    ε ~ N(0, H⁻¹) is new at every step and for every model, so that a gradient's noise has the covariance H.

    Three descents with a constant rate η, from w* on, return the loss of the mean of K models' weights,
    averaged over the second half of the steps, [len(members), num_seeds]:

    plain: independent models w ← w − η g, with g the gradient at w.
    factored: independent models w = θ φ with a number φ: θ ← θ − η φ g, φ ← φ − η θᵀg.
    late_phase: one θ for all, w_k = θ φ_k: θ ← θ − η γ Σ_k φ_k g_k, φ_k ← φ_k − η θᵀg_k.

    ``plain_loss``, ``factored_loss`` and ``late_phase_loss`` are what to expect of them. Arguments of all
    three: rate, η; members, the numbers K; num_steps, four times ``steps_to_rest`` unless given; num_seeds,
    independent repetitions; generator, a fixed one unless given.
    """

    dim: int = 100

    def __post_init__(self) -> None:
        require_whole("dim", self.dim)

    @property
    def curvature(self) -> Tensor:
        """The diagonal of H, [dim]."""
        return 1 / torch.arange(1, self.dim + 1, dtype=torch.float64)

    def loss(self, weights: Tensor) -> Tensor:
        """The loss without noise of weights [..., dim]."""
        return 0.5 * ((weights - 1).square() @ self.curvature)

    def steps_to_rest(self, rate: float) -> int:
        """Steps in which the slowest weight forgets where it began, up to 1/e: 1/(η λ_min)."""
        return max(1, round(self.dim / require_positive("rate", rate)))

    # --- simulations ----------------------------------------------------------------------------

    def plain(
        self,
        rate: float,
        members: Sequence[int],
        *,
        num_steps: int | None = None,
        num_seeds: int = 5,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Losses of independent models that are descended in w itself."""
        self._check(rate, members, num_seeds, self.curvature.max())
        walk = _Plain(num_seeds * max(members), self, rate)
        generator = derive_generator(0, "plain") if generator is None else generator
        return self._mean_loss(walk, _apart(self, members, num_seeds), rate, num_steps, generator)

    def factored(
        self,
        rate: float,
        members: Sequence[int],
        *,
        num_steps: int | None = None,
        num_seeds: int = 5,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Losses of independent models w = θ φ."""
        self._check(rate, members, num_seeds, self._rates(1.0).max())
        walk = _Factored([1], num_seeds * max(members), self, rate, None)
        generator = derive_generator(0, "factored") if generator is None else generator
        return self._mean_loss(walk, _apart(self, members, num_seeds), rate, num_steps, generator)

    def late_phase(
        self,
        rate: float,
        members: Sequence[int],
        *,
        num_steps: int | None = None,
        num_seeds: int = 5,
        base_scale: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Losses of late-phase weights w_k = θ φ_k. base_scale: γ, 1/K unless given."""
        self._check(rate, members, num_seeds, self._rates(1.0).max())
        if base_scale is not None:
            require_positive("base_scale", base_scale)
        walk = _Factored(members, num_seeds, self, rate, base_scale)
        generator = derive_generator(0, "late phase") if generator is None else generator
        shape = len(members), num_seeds
        return self._mean_loss(walk, lambda w: self.loss(w).reshape(shape), rate, num_steps, generator)

    def _check(self, rate: float, members: Sequence[int], num_seeds: int, steepest: Tensor) -> None:
        require_positive("rate", rate)
        require(len(members) > 0, "members must name at least one number of members.")
        for count in members:
            require_whole("A number of members", count)
        require_whole("num_seeds", num_seeds)
        _check_stable(rate, steepest)

    def _mean_loss(
        self,
        walk: "_Plain | _Factored",
        losses: Callable[[Tensor], Tensor],
        rate: float,
        num_steps: int | None,
        generator: torch.Generator,
    ) -> Tensor:
        """Walk, and average what ``losses`` says about the weights [rows, dim] over the second half."""
        steps = (
            4 * self.steps_to_rest(rate) if num_steps is None else require_whole("num_steps", num_steps, 2)
        )
        # Neighbouring steps say the same: even the fastest direction takes some 1/(5 η) of them to change.
        every = max(1, int(0.1 / rate))
        seen = []
        for step, noise in enumerate(_noise(steps, walk.num_rows, walk.num_columns, generator)):
            walk.step(noise)
            if step >= steps // 2 and (steps - 1 - step) % every == 0:
                seen.append(losses(walk.weights()))
        mean = torch.stack(seen).mean(0)
        require(bool(mean.isfinite().all()), f"The descent diverges at rate={rate}: take a smaller one.")
        return mean

    # --- what to expect -------------------------------------------------------------------------

    def plain_loss(self, rate: float, num_members: int = 1) -> float:
        """The expected loss of ``plain`` at rest, exactly: ½ Σ_i η h_i/(2 − η h_i) / K.

        A weight of curvature h is an autoregression with the factor 1 − η h and noise of variance η² h.
        """
        require_whole("num_members", num_members)
        return _resting_loss(require_positive("rate", rate), self.curvature) / num_members

    def factored_loss(self, rate: float, num_members: int = 1) -> float:
        """The expected loss of ``factored``, up to terms of order η²/K and η³.

        Around w* a step of θ and φ moves w by −η P g with P = φ² + θ θᵀ: this is ``plain`` with eigenvalues
        of H^½ P H^½ in place of h, about η (φ² tr H + θᵀHθ)/(4 K). To second order the mean of w is off by
        the b of ``late_phase_loss`` for K = 1, which averaging over models does not lessen.
        """
        require_whole("num_members", num_members)
        spread = _resting_loss(require_positive("rate", rate), self._rates(1.0)) / num_members
        return spread + self._bias_loss(rate, 1, 1.0)

    def late_phase_loss(self, rate: float, num_members: int = 1, *, square: float = 1.0) -> float:
        """The expected loss of ``late_phase`` with γ = 1/K, up to terms of order η²/K and η³.

        The spread of θ · mean φ is that of ``factored``, since θ moves along the mean of K gradients. But the
        factors have a variance of η/2 about their mean whatever K is, which pulls it to w* + b with
        P H b = −(η/2) (H + tr H/K) w*.

        square: φ². θ c and φ/c have the same weights, and nothing but noise moves c: |θ|² − mean φ² grows by
        η² (φ² tr H/K − θᵀHθ) a step. φ² = 1, where the descent begins, is at rest for K = 1 only; for others
        it drifts to √K within some (dim + K)/(η² tr H) steps, and K times the loss to (√K + 1/√K)/2 of one's.
        """
        require_whole("num_members", num_members)
        rates = self._rates(require_positive("square", square))
        spread = _resting_loss(require_positive("rate", rate), rates) / num_members
        return spread + self._bias_loss(rate, num_members, square)

    def _rates(self, square: float) -> Tensor:
        """Eigenvalues of H^½ (φ² 1 + θ θᵀ) H^½ where θ φ = w*."""
        root = self.curvature.sqrt()
        return torch.linalg.eigvalsh(square * torch.diag(self.curvature) + torch.outer(root, root) / square)

    def _bias_loss(self, rate: float, num_members: int, square: float) -> float:
        """½ bᵀHb."""
        ones = torch.ones(self.dim, self.dim, dtype=torch.float64)
        pull = self.curvature + self.curvature.sum() / num_members
        moved = square * torch.eye(self.dim, dtype=torch.float64) + ones / square
        slope = -0.5 * rate * torch.linalg.solve(moved, pull)  # H b
        return float(0.5 * (slope.square() / self.curvature).sum())


def _resting_loss(rate: float, rates: Tensor) -> float:
    _check_stable(rate, rates.max())
    return float(0.5 * (rate * rates / (2 - rate * rates)).sum())


def _check_stable(rate: float, steepest: Tensor) -> None:
    bound = 2 / float(steepest)
    require(rate < bound, f"rate={rate} makes the descent diverge; it must be below {bound:.3g}.")


def _noise(num_steps: int, num_rows: int, num_columns: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield standard normal numbers [num_rows, num_columns] for every step."""
    at_once = max(1, CHUNK // (num_rows * num_columns))
    for start in range(0, num_steps, at_once):
        number = min(at_once, num_steps - start)
        # Drawn in 32 bits, which is twice as fast; added up in 64, as the steps are tiny.
        yield from torch.randn(number, num_rows, num_columns, generator=generator).double()


def _apart(problem: NoisyQuadratic, members: Sequence[int], num_seeds: int) -> Callable[[Tensor], Tensor]:
    """Losses [len(members), num_seeds] of means over K of the independent models [num_seeds · most, dim].

    The models of a seed are cut into as many groups of K as they are enough for.
    """

    def losses(weights: Tensor) -> Tensor:
        of_seed = weights.unflatten(0, (num_seeds, -1))
        rows = []
        for count in members:
            groups = of_seed[:, : of_seed.shape[1] // count * count].unflatten(1, (-1, count))
            rows.append(problem.loss(groups.mean(2)).mean(1))
        return torch.stack(rows)

    return losses


class _Plain:
    """Models w [rows, dim]."""

    def __init__(self, num_models: int, problem: NoisyQuadratic, rate: float) -> None:
        self.num_rows, self.num_columns = num_models, problem.dim
        self.keep = 1 - rate * problem.curvature
        self.noise_scale = rate * problem.curvature.sqrt()  # of η H ε
        self.distance = torch.zeros(num_models, problem.dim, dtype=torch.float64)

    def step(self, noise: Tensor) -> None:
        self.distance.mul_(self.keep).addcmul_(self.noise_scale, noise)

    def weights(self) -> Tensor:
        return 1 + self.distance


class _Factored:
    """Bases θ [rows, dim] with factors φ [rows, most members], zero where a row has fewer.

    Of the noise z_k = H^½ ε_k ~ N(0, 1) a step needs Σ_k φ_k z_k and the numbers yᵀz_k only, where y = H^½ θ.
    The yᵀz_k/|y| are independent standard normal numbers; what of Σ_k φ_k z_k is orthogonal to y does not
    depend on them and has the variance Σ_k φ_k². So dim + K random numbers do for dim · K.
    """

    def __init__(
        self,
        members: Sequence[int],
        num_seeds: int,
        problem: NoisyQuadratic,
        rate: float,
        scale: float | None,
    ) -> None:
        self.counts = torch.tensor(members, dtype=torch.float64).repeat_interleave(num_seeds)
        self.most, self.num_rows = max(members), len(self.counts)
        self.num_columns = self.most + problem.dim
        places = torch.arange(self.most)
        self.taking_part = (places < self.counts[:, None]).double()
        self.root = problem.curvature.sqrt()
        self.scaled = self.root.repeat(self.num_rows, 1)  # y
        self.factors = self.taking_part.clone()
        gamma = 1 / self.counts if scale is None else torch.full_like(self.counts, scale)
        self.base_rate = rate * gamma[:, None] * problem.curvature
        self.factor_rate = rate * self.taking_part

    def step(self, noise: Tensor) -> None:
        along, across = noise[:, : self.most], noise[:, self.most :]
        y, factors = self.scaled, self.factors
        steep = vecdot(y, y)  # θᵀHθ
        length, squares = steep.sqrt(), vecdot(factors, factors)
        width = squares.sqrt()
        towards = vecdot(factors, along) / length - width * vecdot(y, across) / steep
        # H^-½ Σ_k φ_k g_k = y Σ φ² − H^½ w* Σ φ + Σ φ z
        pull = (squares + towards)[:, None] * y
        pull.addcmul_(width[:, None], across).addcmul_(factors.sum(1)[:, None], self.root, value=-1)
        # θᵀg_k = θᵀHθ φ_k − θᵀHw* + yᵀz_k
        turn = steep[:, None] * factors - (y @ self.root)[:, None]
        turn.addcmul_(length[:, None], along)
        y.addcmul_(self.base_rate, pull, value=-1)
        factors.addcmul_(self.factor_rate, turn, value=-1)

    def weights(self) -> Tensor:
        return self.scaled / self.root * (self.factors.sum(1) / self.counts)[:, None]
