"""scikit-learn estimators: any method of the library behind ``fit``, ``predict`` and ``predict_proba``.

What they learn of a table, and how they train, is what ``polymode compare`` does: columns are encoded, rows
are held out, every member keeps its best epoch, the noise of numbers is chosen on held-out rows.
"""

# ruff: noqa: N803  # scikit-learn calls rows X

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from polymode.application.comparison.pilot import settle_likelihood
from polymode.application.datasets.frames import as_frame, is_frame
from polymode.application.datasets.new_rows import read_table
from polymode.application.datasets.tables import encoded_split, recipe
from polymode.application.datasets.targets import likelihoods_for
from polymode.application.recipes import held_out, suited
from polymode.data import Preprocessing, Task
from polymode.data.encoding import Column, NumberColumn, laid_out, pandas
from polymode.data.sources import ArrayData
from polymode.data.task import num_outputs_for
from polymode.errors import InputError, require
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.methods import make_method
from polymode.models import MODELS
from polymode.posteriors import Posterior, load_posterior
from polymode.posteriors.calibration import FEWEST_POINTS
from polymode.storage import read_document, refuse_links, well_formed, write_document
from polymode.training import fit
from polymode.training.contract import Method
from polymode.training.keeping.progress import Silent

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError:
    raise InputError("The estimators need scikit-learn: pip install 'polymode[data]'.") from None

ESTIMATOR_FILE = "estimator.json"
# Checks of scikit-learn's ``check_estimator`` that these estimators do not pass, and why.
EXPECTED_FAILED_CHECKS = {
    "check_sample_weight_equivalence_on_dense_data": "networks see rows in minibatches of a random order, "
    "and some rows are held out: repeated rows and weights are the same in expectation only",
    "check_methods_subset_invariance": "networks compute in 32 bits, and kernels round by the number of "
    "rows: the check asks for 7 digits",
    "check_methods_sample_order_invariance": "the same, by the place of a row in its batch",
}
# Rows below which nothing is held out: too few would decide.
FEWEST_TO_HOLD_OUT = 40


class _Ensemble(BaseEstimator):
    """What both estimators share; parameters are explained there."""

    def __init__(
        self,
        method: str | Method = "deep_ensemble",
        *,
        model: Any = None,
        epochs: int | None = None,
        budget: float | None = None,
        likelihood: Any = "auto",
        validation: float | str | None = "auto",
        calibrate: bool = False,
        batch_size: int | None = None,
        categories: Sequence[str] = (),
        random_state: Any = None,
        run_dir: str | None = None,
        device: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        num_draws: int = 100,
    ) -> None:
        self.method = method
        self.model = model
        self.epochs = epochs
        self.budget = budget
        self.likelihood = likelihood
        self.validation = validation
        self.calibrate = calibrate
        self.batch_size = batch_size
        self.categories = categories
        self.random_state = random_state
        self.run_dir = run_dir
        self.device = device
        self.backend = backend
        self.threads = threads
        self.num_draws = num_draws

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags

    # --- fitting ------------------------------------------------------------------------------

    def _fit(self, frame: Any, targets: Tensor, classes: Sequence[str], weights: Any) -> None:
        require(
            self.run_dir is None or self.random_state is not None,
            "run_dir goes on where a training was cut, with the same seed: set random_state, too.",
        )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        task = self._task(frame, targets, classes, weights)
        method = suited(make_method(self.method), task.training)
        epochs = self.epochs
        if epochs is None:
            budget = self.budget or max(task.suggested_budget, method.least_budget)
            method, epochs = method.for_budget(budget)
        computing: Any = {"device": self.device, "backend": self.backend, "threads": self.threads}
        task = settle_likelihood(
            task,
            partial(self._model_for, task),
            suited(make_method("single"), task.training),
            max(1, min(epochs, round(task.suggested_budget / 5))),
            None,
            Silent(),
            **computing,
        )
        [split] = task.splits
        likelihood = make_likelihood(task.likelihood)
        if self.calibrate:
            known = 0 if split.validation is None else split.validation.num_examples
            require(
                known >= FEWEST_POINTS and bool(likelihood.learned_by_calibration),
                f"calibrate=True takes held-out rows, at least {FEWEST_POINTS}, and a likelihood that can be "
                f"calibrated; there are {known}, and {likelihood.kind!r}. Give more rows, or leave "
                "validation=None out.",
            )
        self.network_ = self._network(task, likelihood)
        posterior = fit(
            method,
            self._build(self.network_),
            split.train,
            likelihood=likelihood,
            epochs=epochs,
            validation=split.validation,
            seed=seed,
            run_dir=self.run_dir,
            resume=self.run_dir is not None,
            progress=False,
            **computing,
        )
        if self.calibrate:
            posterior = posterior.calibrated(split.validation, self._draws(posterior))
        self.posterior_: Posterior = posterior.in_memory()
        self.preprocessing_: Preprocessing = split.preprocessing
        self.n_iter_ = epochs

    def _task(self, frame: Any, targets: Tensor, classes: Sequence[str], weights: Any) -> Task:
        rows = torch.arange(len(targets))
        if self.likelihood == "auto":
            likelihood, others = likelihoods_for(classes, targets, targets)
            if self.model is not None and not isinstance(self.model, str):
                others = ()  # nobody knows how many outputs it can have
        else:
            likelihood, others = make_likelihood(self.likelihood), ()
        columns = tuple(column.fitted(frame[column.name]) for column in self.columns_)
        split = encoded_split(
            frame, columns, "target", targets, classes, rows, rows[:1], likelihood, self.batch_size
        )
        if weights is not None:
            train = split.train
            assert isinstance(train, ArrayData)
            split = replace(
                split,
                train=ArrayData(train.inputs, train.targets, weights=weights, batch_size=train.batch_size),
            )
        task = Task(
            "table",
            [split],
            likelihood,
            num_outputs=len(classes) or num_outputs_for(likelihood, split.train),
            likelihoods=others,
            **recipe(len(rows)),
        )
        share = self.validation
        valid = share is None or share == "auto" or (isinstance(share, float) and 0 < share < 1)
        require(valid, f"validation={share!r}: give a share between 0 and 1, 'auto' or None.")
        if share is None or (share == "auto" and len(rows) < FEWEST_TO_HOLD_OUT):
            return replace(task, likelihoods=())
        return held_out(task, "auto" if share == "auto" else str(float(share)))

    def _network(self, task: Task, likelihood: Likelihood) -> dict[str, Any]:
        [width] = task.example_shape
        outputs = len(task.splits[0].preprocessing.classes) or num_outputs_for(
            likelihood, task.splits[0].train
        )
        return {"num_inputs": width, "num_outputs": outputs, "options": dict(task.model_options)}

    def _model_for(self, task: Task, likelihood: Likelihood) -> Any:
        return self._build(self._network(task, likelihood))

    def _build(self, network: dict[str, Any]) -> Any:
        """The network: the table's own, or what ``model`` gives for so many inputs and outputs."""
        if isinstance(self.model, nn.Module):
            return self.model
        if self.model is not None and not isinstance(self.model, str):
            return partial(self.model, network["num_inputs"], network["num_outputs"])
        name = self.model or "mlp"
        require(name in MODELS and MODELS[name].takes == "table", f"model={name!r}: no network for tables.")
        return MODELS[name].factory(
            (network["num_inputs"],), network["num_outputs"], network["options"] if name == "mlp" else {}
        )

    # --- rows ---------------------------------------------------------------------------------

    def _first_frame(self, X: Any) -> Any:
        """Rows to fit, as a frame with names; remembers what its columns become."""
        if is_frame(X):
            validate_data(self, X, skip_check_array=True)
            frame = as_frame(X, "X")
            columns = [
                laid_out(frame[name], name, as_category=name in self.categories) for name in frame.columns
            ]
            require(any(column.features for column in columns), "X has no column that says anything.")
            self.columns_: tuple[Column, ...] = tuple(columns)
            return frame
        values: Any = validate_data(
            self, X, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=2
        )
        frame = self._named(values)
        gaps = np.isnan(values).any(0)
        self.columns_ = tuple(
            NumberColumn(name, has_gaps=bool(gap)) for name, gap in zip(frame.columns, gaps, strict=True)
        )
        return frame

    def _frame(self, X: Any) -> Any:
        """Rows to predict, as a frame with the names of those that were fitted."""
        check_is_fitted(self, "posterior_")
        if is_frame(X):
            validate_data(self, X, skip_check_array=True, reset=False)
            return as_frame(X, "X")
        values: Any = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        frame = self._named(values)
        names = getattr(self, "feature_names_in_", None)
        if names is not None:
            frame.columns = [str(name) for name in names]
        return frame

    def _named(self, values: np.ndarray) -> Any:
        return pandas().DataFrame(values, columns=[f"x{i}" for i in range(values.shape[1])])

    def _predictive(self, X: Any, quantiles: Sequence[float] = ()) -> Any:
        inputs, _ = read_table(self._frame(X), self.preprocessing_)
        generator = torch.Generator().manual_seed(0)  # the same draws for the same rows
        return self.posterior_.predict(inputs, self._draws(self.posterior_), generator, quantiles=quantiles)

    def _draws(self, posterior: Posterior) -> int | None:
        return self.num_draws if posterior.num_members is None else None

    # --- files --------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write what was fitted as JSON and safetensors; ``load`` reads it back, without any pickle."""
        check_is_fitted(self, "posterior_")
        folder = Path(folder)
        if (folder / ESTIMATOR_FILE).exists():
            raise InputError(f"{folder} holds an estimator already: choose another folder.")
        self.posterior_.save(folder / "posterior")
        write_document(folder / ESTIMATOR_FILE, "estimator", self._content())
        return folder

    def _content(self) -> dict[str, Any]:
        names = getattr(self, "feature_names_in_", None)
        return {
            "estimator": type(self).__name__,
            "network": self.network_,
            "preprocessing": self.preprocessing_.config(),
            "feature_names": None if names is None else [str(name) for name in names],
            "num_features": int(self.n_features_in_),
            "num_draws": self.num_draws,
            "epochs": self.n_iter_,
            "classes": self._class_values(),
        }

    def _class_values(self) -> dict[str, Any] | None:
        return None

    @classmethod
    def load(cls, folder: str | Path, model: Any = None) -> Self:
        """Read what ``save`` wrote; model: the one it was fitted with, where that was your own."""
        folder = Path(folder)
        refuse_links(folder)
        content = read_document(folder / ESTIMATOR_FILE, "estimator")
        require(
            content.get("estimator") == cls.__name__,
            f"{folder} holds a {content.get('estimator')!r}, not a {cls.__name__}.",
        )
        with well_formed(folder / ESTIMATOR_FILE):
            made = cls(model=model, num_draws=content["num_draws"])
            made._take_up(content, folder / "posterior")
        return made

    def _take_up(self, content: dict[str, Any], folder: Path) -> None:
        self.network_ = content["network"]
        self.preprocessing_ = Preprocessing.from_config(content["preprocessing"])
        self.columns_ = self.preprocessing_.encoding
        self.n_features_in_ = content["num_features"]
        self.n_iter_ = content["epochs"]
        if content["feature_names"] is not None:
            self.feature_names_in_ = np.array(content["feature_names"], dtype=object)
        if content["classes"] is not None:
            self.classes_ = np.array(content["classes"]["values"], dtype=content["classes"]["dtype"])
        self.posterior_ = load_posterior(folder, self._build(self.network_)).in_memory()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which scikit-learn asks for: parameters, and the files that ``save`` would write."""
        state: Any = super().__getstate__()
        if "posterior_" not in state:
            return state
        with tempfile.TemporaryDirectory() as folder:
            self.posterior_.save(Path(folder) / "posterior")
            files = {path.name: path.read_bytes() for path in (Path(folder) / "posterior").iterdir()}
        return {key: value for key, value in state.items() if key != "posterior_"} | {
            "posterior files": files
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("posterior files", None)
        super().__setstate__(state)
        if files is not None:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    (Path(folder) / name).write_bytes(content)
                self.posterior_ = load_posterior(folder, self._build(self.network_)).in_memory()


class EnsembleClassifier(ClassifierMixin, _Ensemble):
    """Classes from a table, with probabilities that many networks agree on.

    method: a name of ``polymode methods`` or a method. model: the network, a module or a function of the
    numbers of inputs and outputs (default: a perceptron that suits tables). epochs: of each chain, or budget:
    member-epochs in all (default: what suits the rows). validation: share of the rows that are held out to
    choose epochs by, None for none; "auto" holds 15 % out of 40 rows or more. calibrate: temper probabilities
    on those rows. categories: columns of numbers that are names. run_dir: a folder in which training can go
    on where it was cut. num_draws: of methods that draw networks without end.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to rows X (an array or a data frame) with labels y [N]."""
        frame = self._first_frame(X)
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        labels = column_or_1d(y, warn=True)
        check_consistent_length(frame, labels)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Classifier can't train when only one class is present: {self.classes_[0]!r}.")
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, frame)
        names = [str(value) for value in self.classes_.tolist()]
        self._fit(frame, torch.from_numpy(numbers.astype(np.int64)), names, weights)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities [N, C]."""
        probabilities = self._predictive(X).mean.double().cpu().numpy()
        return probabilities / probabilities.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels [N]."""
        check_is_fitted(self, "posterior_")
        return self.classes_[self.predict_proba(X).argmax(1)]

    def predict_uncertainty(self, X: Any) -> dict[str, np.ndarray]:
        """Doubt of every row in nats: the entropy, and how much of it is disagreement of the members."""
        found = self._predictive(X)
        return {
            "entropy": found.entropy.cpu().numpy(),
            "mutual_information": found.mutual_information.cpu().numpy(),
        }

    def _class_values(self) -> dict[str, Any]:
        return {"values": self.classes_.tolist(), "dtype": self.classes_.dtype.str}


class EnsembleRegressor(RegressorMixin, _Ensemble):
    """Numbers from a table, with intervals that many networks agree on.

    likelihood: what the targets mean; "auto" tries noise of one level, noise that depends on the inputs and
    heavy tails on the held-out rows. The other parameters are those of ``EnsembleClassifier``.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to rows X (an array or a data frame) with targets y [N]."""
        frame = self._first_frame(X)
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        values = column_or_1d(y, warn=True)
        check_consistent_length(frame, values)
        if type_of_target(values) == "unknown" or values.dtype.kind not in "biuf":
            values = values.astype(np.float64)
        if not np.isfinite(values.astype(np.float64)).all():
            raise ValueError("Input y contains NaN or infinity.")
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, frame)
        self._fit(frame, torch.from_numpy(values.astype(np.float64)), (), weights)
        return self

    def predict(self, X: Any, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Means [N], and with ``return_std`` the standard deviations of the predictive."""
        found = self._rescaled(self._predictive(X))
        mean = found.mean.double().cpu().numpy().reshape(-1)
        return (mean, found.std.double().cpu().numpy().reshape(-1)) if return_std else mean

    def predict_quantiles(self, X: Any, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles [N, len(levels)] of the predictive."""
        found = self._rescaled(self._predictive(X, tuple(levels)))
        return np.stack([found.quantiles[level].double().cpu().numpy().reshape(-1) for level in levels], 1)

    def _rescaled(self, predictive: Any) -> Any:
        return predictive.rescaled(self.preprocessing_.target_shift, self.preprocessing_.target_scale)
