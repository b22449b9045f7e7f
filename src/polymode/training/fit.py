"""``fit``: the one training loop. It alone owns the device, the clock, checkpoints and the budget."""

import hashlib
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polymode._version import __version__
from polymode.data import ArrayData, Data, as_data
from polymode.errors import CannotVectorise, CheckpointError, InputError, NonFiniteLoss, unknown_name
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.members import BACKENDS, Backend, Members, forward_members
from polymode.posteriors import Posterior, load_posterior, merge
from polymode.posteriors.base import Network
from polymode.posteriors.particles import MemberStore
from polymode.schedules import Progress
from polymode.seeds import derive_generator
from polymode.storage import FORMAT_VERSION, read_json, write_json
from polymode.surgery import Model, normalisation_and_bias_names, trainable_names
from polymode.training.batches import Batch, Batches
from polymode.training.checkpoint import Checkpoints
from polymode.training.method import KeepBest, Method, Phase, Problem, State, describe
from polymode.training.objective import Execution, Precision
from polymode.training.optimizers import MemberOptimizer
from polymode.training.progress import ProgressBar
from polymode.training.start import Start, make_template, own_names, probe
from polymode.training.validation import validate
from polymode.trees import leaves, map_tree

AnyData = Data | DataLoader


@dataclass(frozen=True)
class Epoch:
    """What an observer is told at the end of every epoch; losses and scores are [M]."""

    phase: str
    epoch: int
    losses: Tensor
    validation: dict[str, Tensor]
    labels: Tensor
    rate: float


@overload
def fit(method: Method, model: Model, data: AnyData, **options: Any) -> Posterior: ...
@overload
def fit(method: Method, model: Model, data: Sequence[AnyData], **options: Any) -> list[Posterior]: ...
def fit(
    method: Method,
    model: Model,
    data: AnyData | Sequence[AnyData],
    *,
    likelihood: str | Likelihood,
    epochs: int,
    validation: AnyData | Sequence[AnyData] | None = None,
    seed: int | Sequence[int] = 0,
    run_dir: str | Path | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    backend: Backend | Literal["auto"] = "auto",
    precision: Precision = "full",
    shared_order: bool = False,
    extend: Posterior | None = None,
    observer: Callable[[Epoch], None] | None = None,
    progress: bool = True,
    checkpoint_seconds: float = 60.0,
) -> Posterior | list[Posterior]:
    """Fit a method to data and return its posterior; a list of data sets gives a list of posteriors.

    model: a module, or better a function that builds one; it is copied, never changed.
    data: ``ArrayData`` or a ``DataLoader``; a list of ``ArrayData`` is trained side by side.
    epochs: epochs of each chain. validation: held-out data, needed by ``keep="best"``.
    seed: determines everything; a list gives each data set its own.
    run_dir: folder for checkpoints and the finished posterior; with ``resume=True`` an interrupted
        run goes on to the same bits, a finished one is read back.
    backend: "vmap", "loop", or "auto" to measure both on the first batch and take the faster.
    precision: "bfloat16" runs the forward pass in mixed precision where the device has it.
    shared_order: all chains see one order of the data instead of their own.
    extend: a finished ensemble to which the new chains are added.
    observer: called with an ``Epoch`` after every epoch.
    """
    many = isinstance(data, list | tuple)
    sources = [as_data(part) for part in (data if many else [data])]
    if not sources:
        raise InputError("The list of data sets is empty.")
    run = _Run(
        method=method,
        model=model,
        sources=sources,
        validation=_validation_list(validation, len(sources), many=many),
        likelihood=make_likelihood(likelihood),
        epochs=_check_epochs(epochs),
        seeds=_seed_list(seed, len(sources)),
        first_chain=_first_chain(extend, many=many),
        device=_device(device, model),
        precision=precision,
        shared_order=shared_order,
    )
    _check_precision(precision, run.device)
    folder = None if run_dir is None else Path(run_dir)
    finished = _open_run_folder(folder, model, resume=resume)
    posteriors = finished or run.execute(
        folder, backend, observer, show=progress, checkpoint_seconds=checkpoint_seconds
    )
    if extend is not None:
        posteriors = [merge([extend, posteriors[0]])]
    return posteriors if many else posteriors[0]


# --- reading the arguments --------------------------------------------------------------------


def _check_epochs(epochs: int) -> int:
    if not isinstance(epochs, int) or epochs < 1:
        raise InputError(f"epochs must be a whole number of at least 1, got {epochs!r}.")
    return epochs


def _seed_list(seed: int | Sequence[int], count: int) -> list[int]:
    seeds = [seed] * count if isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise InputError(f"{len(seeds)} seeds for {count} data sets: give one seed, or one for each.")
    return seeds


def _validation_list(validation: Any, count: int, *, many: bool) -> list[Data] | None:
    if validation is None:
        return None
    sources = [as_data(part) for part in (validation if many else [validation])]
    if len(sources) != count:
        raise InputError(f"{len(sources)} validation sets for {count} data sets: give one for each.")
    return sources


def _device(device: torch.device | str | None, model: Model) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _check_precision(precision: str, device: torch.device) -> None:
    if precision not in ("full", "bfloat16"):
        raise unknown_name("precision", precision, ("full", "bfloat16"))
    if precision == "bfloat16" and not torch.amp.is_autocast_available(device.type):
        raise InputError(f"Device {device.type!r} has no mixed precision: use precision='full'.")


def _first_chain(extend: Posterior | None, *, many: bool) -> int:
    if extend is None:
        return 0
    if many or extend.num_members is None:
        raise InputError("extend=... takes one finite posterior and one data set.")
    return 1 + max(int(block.labels[:, 1].max()) for block in extend.draw())


def _open_run_folder(folder: Path | None, model: Model, *, resume: bool) -> list[Posterior] | None:
    """Read back a finished run, or make sure that none is overwritten."""
    if folder is None:
        if resume:
            raise InputError("resume=True needs run_dir, the folder of the run to go on with.")
        return None
    if not resume:
        if folder.exists() and any(folder.iterdir()):
            raise InputError(
                f"{folder} is not empty. Pass resume=True to go on with the run in it, or choose "
                "another run_dir."
            )
        return None
    if not (folder / "run.json").exists():
        return None
    names = read_json(folder / "run.json", "finished run")["posteriors"]
    return [load_posterior(folder / name, model) for name in names]


# --- the run ----------------------------------------------------------------------------------


@dataclass
class _Position:
    """Where a run stands: the next step to take, counted from 0, and epochs done in all phases."""

    phase: int = 0
    epoch: int = 0
    step: int = 0
    epochs_done: int = 0
    entered: bool = False


@dataclass
class _Run:
    method: Method
    model: Model
    sources: Sequence[Data]
    validation: Sequence[Data] | None
    likelihood: Likelihood
    epochs: int
    seeds: Sequence[int]
    first_chain: int
    device: torch.device
    precision: Precision
    shared_order: bool

    def execute(
        self,
        folder: Path | None,
        backend: Backend | Literal["auto"],
        observer: Callable[[Epoch], None] | None,
        *,
        show: bool,
        checkpoint_seconds: float,
    ) -> list[Posterior]:
        began = time.perf_counter()
        self._prepare(folder)
        checkpoints = None if folder is None else Checkpoints(folder / "checkpoint", self._signature())
        if checkpoints is not None and checkpoints.exist:
            self._restore(checkpoints.load())
        else:
            self._choose_backend(backend)
        self.earlier_seconds, began_training = self.seconds, time.perf_counter()
        total = sum(phase.epochs for phase in self.phases)
        with ProgressBar(self.method.name, total, show=show) as bar:
            saved_at = time.monotonic()
            if checkpoints is not None and not checkpoints.exist:
                self._save(checkpoints)
            for record in self._train():
                self.seconds = self.earlier_seconds + time.perf_counter() - began_training
                due = time.monotonic() - saved_at >= checkpoint_seconds
                if record is not None:
                    if observer is not None:
                        observer(record)
                    loss = record.losses.nanmean().item()
                    bar.update(self.position.epochs_done, f"{record.phase} loss {loss:.4g}")
                if checkpoints is not None and due:
                    self._save(checkpoints)
                    saved_at = time.monotonic()
        self.record["total_seconds"] = round(self.earlier_seconds + time.perf_counter() - began, 3)
        posteriors = self._posteriors()
        if folder is not None:
            self._finish(folder, posteriors)
        return posteriors

    def _prepare(self, folder: Path | None) -> None:
        """Build everything and check all input before any training."""
        seed = self.seeds[0]
        template = make_template(self.model, self.likelihood, seed).to(self.device)
        trainable = trainable_names(template)
        exempt = normalisation_and_bias_names(template)
        chains = range(self.first_chain, self.first_chain + self.method.num_chains)
        self.batches = Batches(self.sources, chains, self.seeds, shared_order=self.shared_order)
        seen = self._check_data(template)
        names = own_names(self.model, template, seen.changed, seed)
        counts = [self._num_observations(self.sources[g.data_set]) for g in self.batches.groups]
        self.execution = Execution(
            self.device,
            torch.tensor(counts, device=self.device),
            precision=self.precision,
            uses_global_random=seen.uses_global_random,
        )
        network = Network(template, self.likelihood)
        start = Start(self.model, self.likelihood, self.device, names)
        self.problem = Problem(network, trainable, exempt, start, self.execution)
        self.phases = list(self.method.phases(self.problem, self.epochs))
        self._check_phases()
        states = []
        for group in self.batches.groups:
            generator = derive_generator(group.seed, "chain", group.chain)
            problem = replace(self.problem, chain=group.chain)
            state = self.method.init(problem, generator)
            states.append(state.begin(generator, group.data_set, group.chain))
        self.state = State.side_by_side(states)
        self.state.finished = MemberStore(None if folder is None else folder / "members")
        self.position = _Position()
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.record: dict[str, Any] = {}
        self.rate = 1.0  # the schedule's factor at the latest step
        self.losses: list[Tensor] = []  # of the epoch's steps so far, [M] each

    def _check_data(self, template: nn.Module) -> Any:
        seen = None
        for data in [*self.sources, *(self.validation or [])]:
            examples = next(iter(data.in_order(data.batch_size))).map(lambda t: t.to(self.device))
            seen_now = probe(template, examples.inputs)
            seen = seen or seen_now
            self.likelihood.check_outputs(seen_now.outputs, examples.targets)
            targets = data.targets if isinstance(data, ArrayData) else examples.targets
            self.likelihood.check_targets(targets.to(self.device), seen_now.outputs)
            self.example_outputs = seen_now.outputs
        for data in self.sources:
            self._check_leftover(template, data)
        return seen

    def _check_leftover(self, template: nn.Module, data: Data) -> None:
        """A last batch of one example is where BatchNorm fails, an epoch into the training."""
        if data.drop_last or data.num_examples % data.batch_size != 1 or not data.replayable:
            return
        examples = next(iter(data.in_order(1))).map(lambda t: t.to(self.device))
        try:
            probe(template, examples.inputs)
        except InputError as error:
            raise InputError(
                f"The last batch of an epoch has one example ({data.num_examples} examples in batches "
                f"of {data.batch_size}), and the network cannot train on one: {error.__cause__} "
                "Pass drop_last=True or another batch_size."
            ) from error

    def _num_observations(self, data: Data) -> int:
        if isinstance(data, ArrayData):
            return int(self.likelihood.num_observations(data.targets))
        # Tokens of a loader are counted by the first batch: reading all data once would cost an epoch.
        examples = next(iter(data.in_order(data.batch_size)))
        each = int(self.likelihood.num_observations(examples.targets)) / len(examples.targets)
        return round(each * data.num_examples)

    def _check_phases(self) -> None:
        for phase in self.phases:
            if phase.keep is not None and self.validation is None:
                raise InputError(
                    f"{self.method.name} keeps the best weights of phase {phase.name!r} by "
                    "validation: pass validation=..., or keep='last'."
                )
            if phase.keep is not None and phase.keep.from_epoch > phase.epochs:
                raise InputError(
                    f"KeepBest(from_epoch={phase.keep.from_epoch}) lies after the last of "
                    f"{phase.epochs} epochs of phase {phase.name!r}."
                )
            if phase.epochs < 1:
                raise InputError(f"Phase {phase.name!r} of {self.method.name} has {phase.epochs} epochs.")

    # --- choosing how to run ------------------------------------------------------------------

    def _choose_backend(self, wanted: Backend | Literal["auto"]) -> None:
        """Measure one step of the method with each backend; the choice holds for the whole run."""
        if wanted not in (*BACKENDS, "auto"):
            raise unknown_name("backend", wanted, (*BACKENDS, "auto"))
        seconds: dict[str, float] = {}
        alone = self.state.members.num_members == 1
        if wanted == "loop" or (wanted == "auto" and (alone or self.execution.uses_global_random)):
            chosen: Backend = "loop"
        elif wanted == "vmap":
            self._time_step("vmap", repeats=0)
            chosen = "vmap"
        else:
            seconds["loop"] = self._time_step("loop")
            try:
                seconds["vmap"] = self._time_step("vmap")
            except CannotVectorise as error:
                warnings.warn(
                    f"Members run one after another, because vmap cannot run this module: {error.reason}",
                    stacklevel=4,
                )
            chosen = min(BACKENDS, key=lambda name: seconds.get(name, float("inf")))
        self.execution.backend = chosen
        self.record["backend"] = chosen
        self.record["step_seconds"] = {name: float(f"{s:.3g}") for name, s in seconds.items()}
        self.record["prediction_backend"] = self._prediction_backend(chosen)

    def _time_step(self, backend: Backend, repeats: int = 3) -> float:
        """Best time of one step on a copy of the state; a slow step is timed once."""
        self.execution.backend = backend
        phase = self.phases[0]
        saved, self.state = self.state, self.state.trial_copy()
        try:
            self._build_optimizers(phase)
            self.problem.network.module.train()
            rounds = next(iter(self._rounds(phase, epoch=0, first_step=0)))
            best = float("inf")
            for repeat in range(repeats + 1):
                began = time.perf_counter()
                with warnings.catch_warnings():
                    # vmap remarks on operations that it runs slowly: this very measurement decides.
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    phase.step(self.state, rounds, phase.objective)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                elapsed = time.perf_counter() - began
                slow = elapsed > 0.1  # then a cold first call tells enough
                best = min(best, elapsed) if repeat or slow else best
                if slow:
                    break
            return best
        except NonFiniteLoss:
            return float("inf")  # training itself will meet it and say where
        finally:
            self.state = saved

    def _prediction_backend(self, chosen: Backend) -> Backend:
        """The same as in training, unless evaluation mode takes a path that cannot be vectorised."""
        if chosen == "loop":
            return "loop"
        examples = next(iter(self.sources[0].in_order(2))).map(lambda t: t.to(self.device))
        self.problem.network.module.eval()
        two = Members({n: t[:2] for n, t in self.state.members.stacked.items()})
        try:
            with torch.no_grad():
                forward_members(self.problem.network.module, two, examples.inputs, backend="vmap")
        except CannotVectorise:
            return "loop"
        return "vmap"

    def _build_optimizers(self, phase: Phase) -> None:
        cohorts, members = self.batches.cohorts, self.state.members
        carried = {n: o for n, o in self.state.optimizers.items() if n in phase.carry}
        self.state.optimizers = carried
        for name, over in phase.optimizers.items():
            if name in carried:
                continue
            wanted = phase.objective.trainable if over.names is None else over.names
            tensors = {n: t for n, t in members.stacked.items() if n in wanted}
            rows = [members.rows(cohort) for cohort in cohorts]
            group_size = members.group_size if over.separate_members else None
            if not tensors:
                tensors = {n: t for n, t in members.shared.items() if n in wanted}
                rows, group_size = cohorts, None
            self.state.optimizers[name] = MemberOptimizer(
                over.optimizer, tensors, self.problem.exempt, rows, group_size
            )

    # --- training -----------------------------------------------------------------------------

    def _train(self):
        """Run all phases from the present position; yields None after steps and records after epochs."""
        position = self.position
        while position.phase < len(self.phases):
            phase = self.phases[position.phase]
            if not position.entered:
                self._build_optimizers(phase)
                phase.enter(self.state)
                self.state.best = self.state.best_scores = None
                position.entered = True
            while position.epoch < phase.epochs:
                yield from self._train_epoch(phase)
                yield self._end_epoch(phase)
            if phase.keep is not None:
                self._take_best()
            phase.leave(self.state)
            position.phase, position.epoch, position.entered = position.phase + 1, 0, False

    def _train_epoch(self, phase: Phase):
        position = self.position
        self.problem.network.module.train()
        cohorts = self.batches.cohorts
        per_epoch = [self.batches.steps_per_epoch(cohort, phase.batches) for cohort in cohorts]
        for rounds in self._rounds(phase, position.epochs_done, position.step):
            factors = [
                phase.schedule(
                    Progress(
                        min(position.epoch * steps + position.step, phase.epochs * steps - 1),
                        phase.epochs * steps,
                        phase.epochs,
                    )
                )
                for steps in per_epoch
            ]
            for optimizer in self.state.optimizers.values():
                optimizer.set_rates(factors)
            self.rate = factors[0]
            try:
                losses = phase.step(self.state, rounds, phase.objective)
            except NonFiniteLoss as error:
                raise self._located(error, phase) from None
            self.losses.append(losses)
            position.step += 1
            yield None

    def _rounds(self, phase: Phase, epoch: int, first_step: int):
        for rounds in self.batches.epoch(epoch, phase.batches, first_step):
            yield [self._on_device(batch) for batch in rounds]

    def _on_device(self, batch: Batch) -> Batch:
        checked = not isinstance(self.batches.source, ArrayData)
        pieces = []
        for piece in batch.pieces:
            move = lambda t: t.to(self.device, non_blocking=True)  # noqa: E731
            targets = move(piece.targets)
            if checked:
                self.likelihood.check_targets(targets, self.example_outputs)
            inputs = map_tree(move, piece.inputs)
            if piece.has_groups and self.problem.network.channels_last:
                flat = map_tree(lambda t: t.flatten(0, 1), inputs)
                count = piece.groups.stop - piece.groups.start
                arranged = self.problem.network.arrange(flat)
                inputs = map_tree(lambda t, n=count: t.unflatten(0, (n, -1)), arranged)
            else:
                inputs = self.problem.network.arrange(inputs)
            weights = None if piece.weights is None else move(piece.weights)
            pieces.append(replace(piece, inputs=inputs, targets=targets, weights=weights))
        return replace(batch, pieces=pieces)

    def _end_epoch(self, phase: Phase) -> Epoch:
        position = self.position
        position.epoch, position.step, position.epochs_done = (
            position.epoch + 1,
            0,
            position.epochs_done + 1,
        )
        phase.end_epoch(self.state)
        scores: dict[str, Tensor] = {}
        if self.validation is not None:
            scores = validate(self.state, phase.objective, self.batches, self.validation)
            if phase.keep is not None and position.epoch >= phase.keep.from_epoch:
                self._keep_better(phase.keep, scores[phase.keep.criterion])
        losses = torch.stack(self.losses).nanmean(0).cpu()
        self.losses.clear()
        self.history.append(
            {"phase": phase.name, "epoch": position.epoch, "loss": losses.mean().item()}
            | {f"validation_{name}": score.mean().item() for name, score in scores.items()}
        )
        return Epoch(
            phase.name, position.epoch, losses, scores, self.state.members.labels, self.rate
        )

    def _keep_better(self, keep: KeepBest, scores: Tensor) -> None:
        """Copy the weights and buffers of every member whose score is the best so far."""
        members = self.state.members
        if members.shared:  # members that share weights are kept or replaced together
            scores = scores.reshape(members.num_groups, -1).mean(1, keepdim=True)
            scores = scores.expand(-1, members.group_size).flatten()
        if self.state.best is None or self.state.best_scores is None:
            self.state.best, self.state.best_scores = members.clone(), scores.clone()
            return
        better = scores < self.state.best_scores
        self.state.best_scores = torch.where(better, scores, self.state.best_scores)
        for name, tensor in members.stacked.items():
            self.state.best.stacked[name][better] = tensor[better]
        better_groups = better.reshape(members.num_groups, -1)[:, 0]
        for name, tensor in members.shared.items():
            self.state.best.shared[name][better_groups] = tensor[better_groups]

    def _take_best(self) -> None:
        best, members = self.state.best, self.state.members
        assert best is not None
        for name, tensor in members.stacked.items():
            tensor.copy_(best.stacked[name])
        for name, tensor in members.shared.items():
            tensor.copy_(best.shared[name])

    def _located(self, error: NonFiniteLoss, phase: Phase) -> NonFiniteLoss:
        located = NonFiniteLoss(
            f"In phase {phase.name!r}, epoch {self.position.epoch + 1}, step {self.position.step + 1}: "
            f"{error}. Training stopped; the last finite weights are in this error's `posterior` and "
            "the last checkpoint is kept. Lower the learning rate, clip gradients "
            "(Optimizer(clip_norm=...)) or check the scale of the inputs."
        )
        posteriors = self._posteriors()
        located.posterior = posteriors if len(posteriors) > 1 else posteriors[0]
        return located

    # --- ending, saving, resuming -------------------------------------------------------------

    def _posteriors(self) -> list[Posterior]:
        """One posterior a data set, in the order the data sets were given."""
        self.problem.network.module.eval()
        network = replace(
            self.problem.network, backend=self.record.get("prediction_backend", "loop")
        )
        problem = replace(self.problem, network=network)
        by_data_set: dict[int, list[Posterior]] = {d: [] for d in range(len(self.sources))}
        for index, group in enumerate(self.batches.groups):
            chain_problem = replace(problem, chain=group.chain)
            posterior = self.method.posterior(chain_problem, self.state.chain(index))
            by_data_set[group.data_set].append(posterior)
        return [
            replace(merge(chains), record=self._record_of(data_set))
            for data_set, chains in by_data_set.items()
        ]

    def _record_of(self, data_set: int) -> dict[str, Any]:
        spent = sum(
            int(self.state.gradient_examples[index]) / group.num_examples
            for index, group in enumerate(self.batches.groups)
            if group.data_set == data_set
        )
        return self.record | {
            "method": self.method.config(),
            "epochs": self.epochs,
            "seed": self.seeds[data_set],
            "num_examples": self.sources[data_set].num_examples,
            "member_epochs": spent,
            "training_seconds": round(self.seconds, 3),
            "precision": self.precision,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "history": self.history,
        }

    def _signature(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        return {
            "method": describe(self.method),
            "likelihood": self.likelihood.config(),
            "epochs": self.epochs,
            "seeds": list(self.seeds),
            "first_chain": self.first_chain,
            "data": [fingerprint(source) for source in self.sources],
            "precision": self.precision,
            "shared_order": self.shared_order,
            "network": self.problem.network.fingerprint,
        }

    def _save(self, checkpoints: Checkpoints) -> None:
        state = self.state
        members = state.members
        content = {
            "position": vars(self.position),
            "stacked": members.stacked,
            "shared": members.shared,
            "own": state.own,
            "common": state.common,
            "generators": state.generators,
            "noise": state.noise,
            "gradient_examples": state.gradient_examples,
            "num_finished": len(state.finished.finished),
            "in_memory": [],
            "optimizers": {name: o.state_dict() for name, o in state.optimizers.items()},
            "best": None
            if state.best is None
            else {
                "stacked": state.best.stacked,
                "shared": state.best.shared,
                "scores": state.best_scores,
            },
            "losses": self.losses,
            "rate": self.rate,
            "record": self.record,
            "history": self.history,
            "seconds": self.seconds,
            "threads": torch.get_num_threads(),
        }
        number = self.position.epochs_done * 1_000_000 + self.position.step
        checkpoints.save(number, content)

    def _restore(self, content: dict[str, Any]) -> None:
        state, members = self.state, self.state.members
        self.position = _Position(**content["position"])
        for kind in ("stacked", "shared"):
            _copy_into(getattr(members, kind), content[kind])
        _copy_into(state.own, content["own"])
        _copy_into(state.common, content["common"])
        state.generators[:] = content["generators"]
        state.noise.copy_(content["noise"])
        state.gradient_examples.copy_(content["gradient_examples"])
        state.finished.restore(content["num_finished"], members.num_groups, members.group_size)
        self.record, self.history = content["record"], content["history"]
        self.seconds = content["seconds"]
        self.losses, self.rate = content["losses"], content["rate"]
        self.execution.backend = self.record["backend"]
        if self.position.entered:
            self._build_optimizers(self.phases[self.position.phase])
            for name, saved in content["optimizers"].items():
                state.optimizers[name].load_state_dict(saved)
        if content["best"] is not None:
            best = content["best"]
            state.best = replace(members.clone(), stacked=best["stacked"], shared=best["shared"])
            state.best = state.best.to(self.device)
            state.best_scores = best["scores"]
        if content["threads"] != torch.get_num_threads():
            warnings.warn(
                f"The run began with {content['threads']} threads and goes on with "
                f"{torch.get_num_threads()}: its last bits may differ from an undisturbed run.",
                stacklevel=4,
            )

    def _finish(self, folder: Path, posteriors: Sequence[Posterior]) -> None:
        names = [f"posterior-{index}" for index in range(len(posteriors))]
        for name, posterior in zip(names, posteriors, strict=True):
            posterior.save(folder / name)
        write_json(
            folder / "run.json",
            {"format_version": FORMAT_VERSION, "what": "finished run", "posteriors": names},
        )


def _copy_into(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    if target.keys() != source.keys():
        raise CheckpointError(
            f"The checkpoint holds {sorted(source)}, this run needs {sorted(target)}."
        )
    for name, tensor in target.items():
        tensor.copy_(source[name])


def versions() -> dict[str, str]:
    return {
        "polymode": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def fingerprint(data: Data) -> str:
    """A digest of a data set: of all its bytes when it is in memory, else of its length."""
    digest = hashlib.sha256(repr((data.num_examples, data.batch_size, data.drop_last)).encode())
    if isinstance(data, ArrayData):
        weights = [] if data.weights is None else [data.weights]
        for tensor in [*leaves(data.inputs), data.targets, *weights]:
            digest.update(repr((tensor.dtype, tensor.shape)).encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
