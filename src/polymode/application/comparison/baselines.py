"""What scikit-learn makes of the same rows, to stand beside neural methods.

Every baseline answers with a distribution. Those of numbers are Gaussian: their one noise level comes from
residuals of rows that were held out, since trees all but repeat the rows that they have seen; a Gaussian
process has its own. Those of classes give every class a positive probability, so that no single test row
costs an infinite log loss.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.errors import InputError, require, require_whole, unknown_name

REGRESSION_BASELINES = ("constant", "ridge", "gaussian_process", "random_forest", "boosting")
CLASSIFICATION_BASELINES = ("prior", "logistic", "random_forest", "boosting")

GP_ROWS = 1000  # the price of a Gaussian process grows with the third power of them
TREE_ROWS = 50_000
LINEAR_CELLS = 50_000_000  # 400 MB in double precision, of which scikit-learn makes copies
FEWEST_ROWS = 4
FOLDS = 5
# Beyond so many rows one held-out fold has residuals enough: the noise is known to 1/sqrt(2 * 2,000) = 1.6 %.
FOLDED_ROWS = 10_000
NOISE_FLOOR = 1e-3  # in standard deviations of the training targets
TREES = 100
RIDGE_PENALTIES = tuple(10.0**power for power in np.arange(-3, 6.5, 0.5).tolist())
LOGISTIC_STRENGTHS = (0.01, 0.1, 1.0, 10.0)
PREDICTED_ROWS = 10_000  # at once: a Gaussian process makes a matrix of them by its training rows


@dataclass(frozen=True)
class Fitted:
    """A trained baseline.

    model: scikit-learn's; of numbers it predicts (target - centre) / scale.
    noise: the one standard deviation of its predictions, in units of the targets; None for classes and for a
        Gaussian process, which has one for each row.
    seconds: what the training took, held-out folds included.
    num_parameters: numbers that are kept.
    remark: how the training differed from what was asked for; empty where it did not.
    towards, share: class probabilities [C] that the model's own are mixed with, and with what share.
    """

    name: str
    model: Any
    noise: float | None
    seconds: float
    num_parameters: int
    remark: str
    num_columns: int
    centre: float = 0.0
    scale: float = 1.0
    towards: Tensor | None = None
    share: float = 0.0

    def moments(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the predicted numbers, [N] each, in double precision."""
        require(
            self.towards is None,
            f"The baseline {self.name!r} of classes has no moments: ask for its probabilities.",
        )
        self._check_columns(inputs)
        means, stds = [], []
        with _quietly_on_one_thread():
            for rows in _pieces(inputs):
                if self.noise is None:
                    mean, std = self.model.predict(rows, return_std=True)
                    stds.append(np.maximum(std, NOISE_FLOOR) * self.scale)
                else:
                    mean = self.model.predict(rows)
                    stds.append(np.full(len(rows), self.noise))
                means.append(self.centre + self.scale * mean)
        return _joined(means), _joined(stds)

    def probabilities(self, inputs: Tensor) -> Tensor:
        """Probabilities of all classes, [N, C], in double precision: positive, and each row sums to one."""
        if self.towards is None:
            raise InputError(
                f"The baseline {self.name!r} of numbers has no probabilities: ask for its moments."
            )
        self._check_columns(inputs)
        num_classes = len(self.towards)
        with _quietly_on_one_thread():
            own = [_own_probabilities(self.model, rows, num_classes) for rows in _pieces(inputs)]
        return _mixed(_joined(own, num_classes), self.towards, self.share)

    def _check_columns(self, inputs: Tensor) -> None:
        _check_inputs(inputs)
        require(
            inputs.shape[1] == self.num_columns,
            f"The baseline {self.name!r} was fitted to {self.num_columns} columns, got {inputs.shape[1]}.",
        )


@dataclass(frozen=True)
class _Rows:
    """Training rows: labels, or standardised numbers; how often each of them counts."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: np.ndarray) -> "_Rows":
        return _Rows(self.inputs[rows], self.targets[rows], self.weights[rows], self.seed)

    def train(self, model: Any) -> Any:
        # Boosting looks for its bins ten times as long where rows have weights, even if all are one.
        plain = bool((self.weights == 1).all())
        return model.fit(self.inputs, self.targets, sample_weight=None if plain else self.weights)


def left_out(name: str, num_rows: int) -> str | None:
    """Why a baseline is not run for so many training rows; None where it is."""
    known = dict.fromkeys((*REGRESSION_BASELINES, *CLASSIFICATION_BASELINES))
    if name not in known:
        raise unknown_name("baseline", name, known)
    require_whole("num_rows", num_rows, 0)
    if num_rows < FEWEST_ROWS:
        return f"baselines need at least {FEWEST_ROWS} training rows, there are {num_rows}"
    if name == "gaussian_process" and num_rows > GP_ROWS:
        return f"it is fitted to at most {GP_ROWS:,} training rows, there are {num_rows:,}"
    return None


def fit_baseline(
    name: str,
    inputs: Tensor,
    targets: Tensor,
    num_classes: int | None = None,
    *,
    seed: int = 0,
    weights: Tensor | None = None,
) -> Fitted:
    """Train one of scikit-learn's baselines.

    inputs: [N, D], standardised. targets: [N], numbers, or labels where num_classes is given.
    weights: [N], non-negative multiplicities: a row counts that often.
    """
    known = REGRESSION_BASELINES if num_classes is None else CLASSIFICATION_BASELINES
    if name not in known:
        raise unknown_name("baseline", name, known)
    _check_installed()
    _check_inputs(inputs)
    _check_targets(targets, len(inputs), num_classes)
    require_whole("seed", seed, 0)
    if weights is not None:
        _check_weights(weights, len(inputs))
        counting = weights > 0
        inputs, targets, weights = inputs[counting], targets[counting], weights[counting]
    reason = left_out(name, len(inputs))
    if reason is not None:
        raise InputError(f"The baseline {name!r} is left out: {reason}.")

    started = time.perf_counter()
    remarks: list[str] = []
    if weights is not None and name == "gaussian_process" and weights.min() != weights.max():
        remarks.append("sample weights are not used")
    multiplicities = torch.ones(len(targets)) if weights is None else weights
    values, often = _numbers(targets.reshape(-1)), _numbers(multiplicities)
    seed %= 2**32  # all that scikit-learn takes
    taken = _subsample(name, len(inputs), inputs.shape[1], seed)
    if taken is not None:
        remarks.append(f"fitted to {len(taken):,} of {len(inputs):,} rows, drawn at random")
    here = slice(None) if taken is None else taken
    matrix = _matrix(inputs if taken is None else inputs[torch.from_numpy(taken).to(inputs.device)])

    with _quietly_on_one_thread():
        if num_classes is None:
            centre, scale = _location_and_scale(values, often)
            rows = _Rows(matrix, ((values - centre) / scale)[here], often[here], seed)
            model = _fit_numbers(name, rows)
            noise = None if name == "gaussian_process" else scale * _noise(name, rows)
            law: dict[str, Any] = {"centre": centre, "scale": scale, "noise": noise}
        else:
            rows = _Rows(matrix, values.astype(np.int64)[here], often[here], seed)
            if name != "prior" and len(np.unique(rows.targets)) == 1:
                remarks.append("one class only in the training rows, hence the prior")
            model = _fit_classes(name, rows, num_classes)
            towards, share = _uniform_row(num_classes, float(rows.weights.sum()))
            if name == "random_forest":
                # An average of so many votes knows nothing of probabilities below 1 / votes: one more tree,
                # which votes by the frequencies of the classes, stands for what it cannot resolve.
                counts = np.bincount(values.astype(np.int64), often, num_classes)
                towards, share = torch.from_numpy((counts + 1) / (counts + 1).sum()), 1 / (TREES + 1)
            law = {"towards": towards, "share": share, "noise": None}
    return Fitted(
        name=name,
        model=model,
        seconds=time.perf_counter() - started,
        num_parameters=_num_parameters(model, inputs.shape[1], num_classes),
        remark="; ".join(remarks),
        num_columns=inputs.shape[1],
        **law,
    )


def _fit_numbers(name: str, rows: _Rows) -> Any:
    from sklearn.dummy import DummyRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.linear_model import RidgeCV

    if name == "gaussian_process":
        num_columns = rows.inputs.shape[1]
        model = GaussianProcessRegressor(
            _kernel(num_columns),
            normalize_y=True,
            # A second search costs as much as the first: too much where distances are over many columns.
            n_restarts_optimizer=int(num_columns <= 100),
            random_state=rows.seed,
        )
        return model.fit(rows.inputs, rows.targets)
    makers: dict[str, Callable[[], Any]] = {
        "constant": DummyRegressor,
        "ridge": lambda: RidgeCV(RIDGE_PENALTIES),
        # A third of the columns at each split, as Breiman proposed for regression: small tables gain from it.
        "random_forest": lambda: RandomForestRegressor(
            TREES,
            max_features=1 / 3,
            min_samples_leaf=max(1, min(5, len(rows) // 100)),
            random_state=rows.seed,
        ),
        "boosting": lambda: HistGradientBoostingRegressor(**_boosting_options(rows, len(rows) >= 1000)),
    }
    return rows.train(makers[name]())


def _fit_classes(name: str, rows: _Rows, num_classes: int) -> Any:
    from sklearn.dummy import DummyClassifier
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

    counts = np.unique(rows.targets, return_counts=True)[1]
    if name == "prior" or len(counts) == 1:
        model: Any = DummyClassifier(strategy="prior")
    elif name == "logistic":
        return _fit_logistic(rows, _logistic_strength(rows, num_classes))
    elif name == "random_forest":
        model = RandomForestClassifier(TREES, random_state=rows.seed)
    else:
        # Early stopping holds out a tenth of the rows, some of every class: not for a class of one row.
        stopping = len(rows) >= max(1000, 10 * len(counts)) and int(counts.min()) > 1
        model = HistGradientBoostingClassifier(**_boosting_options(rows, stopping))
    return rows.train(model)


def _fit_logistic(rows: _Rows, strength: float) -> Any:
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression

    model: Any = LogisticRegression(C=strength, max_iter=1000)
    if len(np.unique(rows.targets)) == 1:  # of a fold; scikit-learn refuses it
        model = DummyClassifier(strategy="prior")
    return rows.train(model)


def _logistic_strength(rows: _Rows, num_classes: int) -> float:
    """The inverse penalty with the least log loss on rows that are held out."""
    # The penalty does not grow with the rows, so one that suits some of them suits all.
    if len(rows) > FOLDED_ROWS:
        rows = rows[_drawn(len(rows), FOLDED_ROWS, rows.seed)]
    losses = np.zeros(len(LOGISTIC_STRENGTHS))
    for rest, held in _folds(rows):
        row_mixture = _uniform_row(num_classes, float(rest.weights.sum()))
        for i, strength in enumerate(LOGISTIC_STRENGTHS):
            own = _own_probabilities(_fit_logistic(rest, strength), held.inputs, num_classes)
            given = _mixed(torch.from_numpy(own), *row_mixture).numpy()[np.arange(len(held)), held.targets]
            losses[i] -= (held.weights * np.log(given)).sum()
    return LOGISTIC_STRENGTHS[int(losses.argmin())]


def _boosting_options(rows: _Rows, stopping: bool) -> dict[str, Any]:
    """Small trees and small steps for small tables; where rows suffice, some of them say when to stop."""
    few = len(rows) < 1000
    return {
        "learning_rate": 0.05,
        "max_iter": 500 if stopping else 100,
        "max_leaf_nodes": 8 if few else 31,
        "min_samples_leaf": max(2, min(20, len(rows) // 20)),
        "l2_regularization": 1.0,
        "early_stopping": stopping,
        "random_state": rows.seed,
    }


def _kernel(num_columns: int) -> Any:
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    # Standardised rows are sqrt(2 D) apart: the search starts where they know of each other. One length for
    # all columns, since one for each takes many times as long.
    smooth = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(max(1, num_columns) ** 0.5, (1e-2, 1e3))
    return smooth + WhiteKernel(0.1, (NOISE_FLOOR**2, 10.0))


def _noise(name: str, rows: _Rows) -> float:
    """The root mean square of held-out residuals; of the constant, the targets' standard deviation."""
    if name == "constant":
        squares, often = rows.targets**2, rows.weights
    else:
        found = [
            ((held.targets - _fit_numbers(name, rest).predict(held.inputs)) ** 2, held.weights)
            for rest, held in _folds(rows)
        ]
        squares, often = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return max(float(np.average(squares, weights=often)) ** 0.5, NOISE_FLOOR)


def _folds(rows: _Rows) -> Iterator[tuple[_Rows, _Rows]]:
    """The other rows and those held out, fold after fold; of many rows, one fold only."""
    from sklearn.model_selection import KFold

    splits = KFold(min(FOLDS, len(rows)), shuffle=True, random_state=rows.seed).split(rows.targets)
    for rest, held in splits:
        yield rows[rest], rows[held]
        if len(rows) > FOLDED_ROWS:
            return


def _subsample(name: str, num_rows: int, num_columns: int, seed: int) -> np.ndarray | None:
    """The rows that a baseline is fitted to; None for all of them."""
    if name in ("random_forest", "boosting"):
        most = TREE_ROWS
    elif name in ("ridge", "logistic"):
        most = max(TREE_ROWS, LINEAR_CELLS // max(1, num_columns))
    else:
        return None
    return None if num_rows <= most else _drawn(num_rows, most, seed)


def _drawn(num_rows: int, most: int, seed: int) -> np.ndarray:
    """Some rows without repeats, in their order."""
    return np.sort(np.random.default_rng(seed).choice(num_rows, most, replace=False))


def _location_and_scale(values: np.ndarray, often: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation; of targets that are all the same the scale is one."""
    if values.min() == values.max():
        return float(values[0]), 1.0
    centre = float(np.average(values, weights=often))
    return centre, float(np.average((values - centre) ** 2, weights=often)) ** 0.5


def _uniform_row(num_classes: int, total: float) -> tuple[Tensor, float]:
    """Laplace's rule as a mixture: one row more of each class, (N p + 1) / (N + C)."""
    return torch.full((num_classes,), 1 / num_classes, dtype=torch.float64), num_classes / (
        total + num_classes
    )


def _mixed(own: Tensor, towards: Tensor, share: float) -> Tensor:
    mixture = (1 - share) * own + share * towards
    return mixture / mixture.sum(-1, keepdim=True)


def _own_probabilities(model: Any, rows: np.ndarray, num_classes: int) -> np.ndarray:
    """What a model says of the classes that it has seen, with zeros for the others."""
    wide = np.zeros((len(rows), num_classes))
    wide[:, model.classes_] = model.predict_proba(rows)
    return wide


def _num_parameters(model: Any, num_columns: int, num_classes: int | None) -> int:
    noise = int(num_classes is None)
    if hasattr(model, "X_train_"):
        return model.X_train_.shape[0] * num_columns
    if hasattr(model, "coef_"):
        classes = 1 if num_classes is None else len(model.intercept_)
        return classes * (num_columns + 1) + noise
    if hasattr(model, "estimators_"):
        return 3 * sum(tree.tree_.node_count for tree in model.estimators_) + noise
    if hasattr(model, "_predictors"):  # the only place where boosting keeps its trees
        return 3 * sum(len(tree.nodes) for stage in model._predictors for tree in stage) + noise
    return 1 + noise if num_classes is None else num_classes


def _matrix(inputs: Tensor) -> np.ndarray:
    """Inputs for scikit-learn, which refuses tables without columns: those get one that says nothing."""
    matrix = _numbers(inputs)
    return matrix if matrix.shape[1] else np.zeros((len(matrix), 1))


def _numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()


def _pieces(inputs: Tensor) -> Iterator[np.ndarray]:
    return (_matrix(rows) for rows in inputs.split(PREDICTED_ROWS) if len(rows))


def _joined(pieces: list[np.ndarray], *columns: int) -> Tensor:
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros((0, *columns)))


@contextmanager
def _quietly_on_one_thread() -> Iterator[None]:
    """Run scikit-learn on one core, and without warnings that its user could do nothing about."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # scikit-learn brings it

    # Beside PyTorch's threads, and on small tables, more cores are several times slower than one.
    with threadpool_limits(1), warnings.catch_warnings():
        # A Gaussian process warns where a hyper-parameter ends at its bound, as the length of constant
        # columns must; a logistic regression where unscaled columns need more steps than it has. Both still
        # predict, and test scores show how well.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Rounding may put the variance beside a training row below zero: the floor of the noise replaces it.
        warnings.filterwarnings("ignore", "Predicted variances smaller than 0", UserWarning)
        yield


def _check_installed() -> None:
    try:
        import sklearn

        # Loading them now keeps it out of the time that the first baseline is said to take.
        import sklearn.ensemble
        import sklearn.gaussian_process  # noqa: F401
    except ImportError:
        raise InputError(
            "Baselines need scikit-learn: pip install 'polymode[data]', or --baselines none."
        ) from None


def _check_inputs(inputs: Tensor) -> None:
    require(
        inputs.ndim == 2 and inputs.is_floating_point(),
        f"Baselines take inputs [N, D] of floats, got {inputs.dtype} of shape {tuple(inputs.shape)}.",
    )
    _check_finite("Inputs", inputs)


def _check_targets(targets: Tensor, num_rows: int, num_classes: int | None) -> None:
    require(
        tuple(targets.shape) == (num_rows,),
        f"Baselines of {num_rows} rows take targets [{num_rows}], got {tuple(targets.shape)}.",
    )
    if num_classes is None:
        require(
            targets.is_floating_point(),
            f"Targets of a regression are floats, got {targets.dtype}; labels need num_classes.",
        )
        _check_finite("Targets", targets)
        return
    require_whole("num_classes", num_classes)
    require(targets.dtype == torch.int64, f"Labels are int64, got {targets.dtype}.")
    bad = (targets < 0) | (targets >= num_classes)
    if bad.any():
        raise InputError(
            f"Labels must be in range({num_classes}), got {targets[bad][0].item()} in row "
            f"{int(bad.nonzero()[0, 0])}."
        )


def _check_weights(weights: Tensor, num_rows: int) -> None:
    require(
        tuple(weights.shape) == (num_rows,),
        f"Sample weights of {num_rows} rows have shape [{num_rows}], got {tuple(weights.shape)}.",
    )
    bad = ~((weights >= 0) & weights.isfinite())
    if bad.any():
        raise InputError(
            f"Sample weights must be finite and not negative, got {weights[bad][0].item()} in row "
            f"{int(bad.nonzero()[0, 0])}."
        )


def _check_finite(what: str, values: Tensor) -> None:
    bad = ~values.isfinite()
    if bad.any():
        raise InputError(
            f"{what} of baselines must be finite, got {values[bad][0].item()} in row "
            f"{int(bad.nonzero()[0, 0])}."
        )
