"""The contract of a posterior, and everything that follows from its draws."""

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from polymode.data import as_tree, check_finite
from polymode.errors import InputError, require, require_whole, unknown_name
from polymode.likelihoods import Likelihood, Predictive
from polymode.networks.members import Backend, Members, Tensors, forward_members
from polymode.networks.surgery import match_precision, structure_of
from polymode.posteriors.network import Network, compiled_prediction
from polymode.storage import CheckedFile, write_document, write_tensors
from polymode.trees import Tree, leaves, length, map_tree

if TYPE_CHECKING:
    from polymode.posteriors.separate import Separate

# A block of drawn weights, and the member outputs computed at once, stay below this many bytes.
BLOCK_BYTES = 2**28

# Points that members see at once, unless said otherwise. Activations of a convolution on more points than the
# second number exceed what the system's allocator keeps: every pass gets new memory, and takes twice as long.
ROWS, CONVOLUTION_ROWS = 1024, 256
ACTIVATION_BYTES = 2**27  # of the largest layer, for all members that run at once
DRAWS = 100  # of a posterior that can be drawn from without end, unless told otherwise
MANIFEST = "manifest.json"  # of the folder of a run
CONSTANTS = "constants.safetensors"  # file of what members do not own

# What the mean over members is taken of: what they predict, which gives their mixture, or what they put out,
# such as logits.
Averaged = Literal["predictions", "outputs"]


@dataclass(frozen=True)
class Posterior(ABC):
    """A distribution over networks that can be drawn from, predicts, collapses and is saved.

    record: what ``fit`` wrote down about the run (method, seed, budget, seconds, backend, history).
    """

    kind: ClassVar[str]
    network: Network
    record: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    @abstractmethod
    def num_members(self) -> int | None:
        """How many members there are; None when any number can be drawn."""

    @abstractmethod
    def draw(
        self, num_draws: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Members]:
        """Yield members in blocks of bounded memory; None means all that a finite posterior holds.

        One that has no end gives ``DRAWS`` of them. Without a generator the draws are always the same.
        """

    @abstractmethod
    def collapse(self) -> nn.Module:
        """Give one ordinary module that is equal to this posterior, or raise ``NotCollapsible``."""

    @abstractmethod
    def merged(self, others: "Sequence[Posterior]") -> "Posterior":
        """The union of this posterior and others over the same network; every member keeps its weight."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        """Yield (file name, tensors) for everything that has to be saved."""

    def options(self) -> dict[str, Any]:
        """What is needed beside tensors to rebuild the posterior, as JSON values."""
        return {}

    @classmethod
    @abstractmethod
    def from_files(
        cls, network: Network, files: Sequence[CheckedFile], constants: Tensors, options: Mapping[str, Any]
    ) -> Self:
        """Rebuild the posterior from the files of ``tensors()`` and its ``options()``.

        constants: what all members have in common. Files that do not hold the rest of the network are an
        error.
        """

    @property
    def num_parameters(self) -> int:
        """Numbers that have to be kept: trained weights of all members, shared ones once."""
        weights = {name for name, _ in self.network.module.named_parameters()}
        return sum(
            tensor.numel()
            for _, tensors in self.tensors()
            for name, tensor in tensors.items()
            if name.split("/", 1)[-1] in weights
        )

    def check_num_draws(self, num_draws: int | None) -> None:
        if num_draws is not None:
            require_whole("num_draws", num_draws)
        available = self.num_members
        if available is not None and num_draws is not None and num_draws > available:
            raise InputError(
                f"num_draws={num_draws} asked for, this posterior holds {available}. "
                "Ask for fewer, or None for all."
            )

    def with_backend(self, backend: Backend) -> Self:
        """The same posterior, run another way."""
        return replace(self, network=replace(self.network, backend=backend))

    def with_likelihood(self, likelihood: Likelihood) -> Self:
        """The same members, whose outputs mean something else."""
        return replace(self, network=replace(self.network, likelihood=likelihood))

    def calibrated(
        self, data: Any, num_draws: int | None = None, generator: torch.Generator | None = None
    ) -> Self:
        """The same posterior, calibrated on held-out data that it was not trained on.

        Labels: the temperature, and numbers: the scale of the noise, with the lowest held-out NLL; quantiles
        of numbers then hold what they say by conformal prediction. Predictions, scores and files are
        those of the calibrated posterior; ``record["calibration"]`` tells what was learned.
        """
        from polymode.posteriors.calibration import calibrated  # it is about posteriors itself

        return calibrated(self, data, num_draws, generator)

    def to(self, device: torch.device | str) -> "Posterior":
        """The same posterior on another device; draws follow its network."""
        module = copy.deepcopy(self.network.module).to(device)
        return replace(self, network=replace(self.network, module=module))

    def one_network(self) -> "Posterior":
        """The same members over the one network that all of them are, if it is one: they can be stacked."""
        return self

    def compact(self, num_draws: int | None = 1, seed: int = 0) -> "Separate":
        """Draw networks and take out of each the units and channels without weights.

        Each becomes as small as it can be; predictions are those of the draws, the same as those of
        ``predict(..., generator=torch.Generator().manual_seed(seed))``. num_draws: None takes all members of
        a finite posterior.
        """
        from polymode.posteriors.separate import compacted_draws  # it is a posterior itself

        return compacted_draws(self, num_draws, seed)

    # --- predicting -------------------------------------------------------------------------

    def outputs(
        self,
        inputs: Tree,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
        *,
        batch_size: int | None = None,
        first_example: int = 0,
        average: Averaged = "predictions",
    ) -> Iterator[tuple[slice, Tree, Tensor]]:
        """Yield (rows, outputs [m, b, ...], weights [m]) until every member has seen every row.

        Members are the outer loop, so that a draw is made once and never kept. first_example: the place
        of the first row among all that are predicted, which noise per example depends on. average: "outputs"
        gives their mean over all members, as if it were one member's.
        """
        if average not in get_args(Averaged):
            raise unknown_name("average", average, get_args(Averaged))
        every = self._outputs(inputs, num_draws, generator, batch_size, first_example)
        return every if average == "predictions" else _averaged(every)

    def _outputs(
        self,
        inputs: Tree,
        num_draws: int | None,
        generator: torch.Generator | None,
        batch_size: int | None,
        first_example: int,
    ) -> Iterator[tuple[slice, Tree, Tensor]]:
        inputs = as_tree(inputs)
        num_points, batch_size = length(inputs), self._rows_at_once(batch_size)
        mass = 0.0
        for block in self.draw(num_draws, generator):
            for part in self._at_once(block.to(self.network.device), inputs, batch_size):
                mass += float(part.log_weights.exp().sum())
                for start in range(0, num_points, batch_size):
                    rows = slice(start, min(start + batch_size, num_points))
                    batch = map_tree(lambda x, rows=rows: x[rows].to(self.network.device), inputs)
                    with torch.no_grad():  # never across a yield: it would hold for the caller, too
                        outputs = self._forward(part, batch, first_example + start)
                    yield rows, outputs, part.log_weights.exp()
        if mass == 0:
            raise InputError(
                "The networks that were drawn have no weight beside the heaviest member: draw more of them."
            )

    def _rows_at_once(self, batch_size: int | None) -> int:
        """Points of a pass: as many as is wanted, or as suits the network."""
        if batch_size is None:
            on_cpu = self.network.channels_last and self.network.device.type == "cpu"
            return CONVOLUTION_ROWS if on_cpu else ROWS
        require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}.")
        return batch_size

    def _at_once(self, block: Members, inputs: Tree, batch_size: int) -> Iterator[Members]:
        """Cut a block so that the activations of members that run side by side stay bounded."""
        if self.network.backend == "loop" or block.num_members == 1 or block.num_groups > 1:
            yield block
            return
        row = map_tree(lambda x: x[:1].to(self.network.device), inputs)
        each = self.network.activation_bytes(block.between(0, 2), row) * min(batch_size, length(inputs))
        number = max(1, ACTIVATION_BYTES // max(1, each))
        for start in range(0, block.num_members, number):
            yield block.between(start, min(start + number, block.num_members))

    def _forward(self, block: Members, inputs: Tree, first_example: int) -> Tree:
        network = self.network

        def run(members: Members, backend: Backend) -> Tree:
            arranged = network.arrange(inputs)
            return forward_members(
                network.module, members, arranged, backend=backend, first_example=first_example
            )

        try:
            return network.run_members(run, block, network.backend)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = map_tree(lambda t: f"{list(t.shape)} {t.dtype}", inputs)
            raise InputError(
                f"The network cannot run on a batch of these inputs, {shapes}: {error} Inputs must look "
                "like those it was fitted to, with a leading axis of points."
            ) from error

    def predict(
        self,
        inputs: Tree,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
        *,
        quantiles: Sequence[float] = (),
        batch_size: int | None = None,
        average: Averaged = "predictions",
        first_example: int = 0,
    ) -> Predictive:
        """Stream over the members and return what they say together.

        inputs: a tree of tensors [N, ...]. quantiles: levels of the mixture's distribution function
        to invert (likelihoods of numbers); this replays the draws once per chunk of points. average: what
        the mean over members is taken of; "outputs" takes that of logits. first_example: points that were
        predicted before these, where all come in parts; draws are those of all if the generator is.
        """
        require(length(inputs := as_tree(inputs)) > 0, "There are no points to predict.")
        check_finite(match_precision(self.network.dtype, inputs))  # as the network will see them
        state = None if generator is None else generator.get_state()
        predictive = None
        plain = average == "predictions" and num_draws is None and first_example == 0
        if self.network.backend == "compiled" and plain:
            predictive = self._compiled_prediction(inputs, self._rows_at_once(batch_size))
        parts = {"average": average, "first_example": first_example, "batch_size": batch_size}
        draws_again = generator is None or (self.num_members is not None and num_draws is None)
        if predictive is None and quantiles and draws_again:
            return self._with_quantiles(inputs, num_draws, quantiles, parts)
        if predictive is None:
            accumulator = self.network.likelihood.accumulator(length(inputs))
            for rows, outputs, weights in self.outputs(inputs, num_draws, generator, **parts):
                accumulator.update(outputs, weights, rows)
            predictive = accumulator.result()
        if not quantiles:
            return predictive
        found = [
            self.network.likelihood.quantiles(outputs, weights, quantiles).to(next(leaves(outputs)).dtype)
            for _, outputs, weights in self.by_points(inputs, num_draws, generator, state, **parts)
        ]
        return predictive.with_quantiles(dict(zip(quantiles, torch.cat(found, 1), strict=True)))

    def _with_quantiles(
        self, inputs: Tree, num_draws: int | None, levels: Sequence[float], parts: Mapping[str, Any]
    ) -> Predictive:
        """A prediction and its quantiles, for which the outputs of all members are at hand anyway."""
        likelihood = self.network.likelihood
        accumulator, found = likelihood.accumulator(length(inputs)), []
        for rows, outputs, weights in self.by_points(inputs, num_draws, **parts):
            accumulator.update(outputs, weights, rows)
            values = likelihood.quantiles(outputs, weights, levels)
            found.append(values.to(next(leaves(outputs)).dtype))
        return accumulator.result().with_quantiles(dict(zip(levels, torch.cat(found, 1), strict=True)))

    def _compiled_prediction(self, inputs: Tree, batch_size: int) -> Predictive | None:
        """A whole prediction as one graph, where all members run side by side on all points at once."""
        network, count = self.network, length(inputs)
        if self.num_members is None or self.num_members < 2 or count > batch_size:
            return None
        blocks = list(itertools.islice(self.draw(), 2))
        parts = list(self._at_once(blocks[0].to(network.device), inputs, batch_size))
        if len(blocks) + len(parts) > 2:
            return None
        [block] = parts
        inputs = network.arrange(map_tree(lambda x: x.to(network.device), inputs))

        def predict(stacked: Tensors, shared: Tensors, inputs: Tree, weights: Tensor) -> Predictive:
            members = replace(block, stacked=stacked, shared=shared)
            outputs = forward_members(network.module, members, inputs, backend="vmap")
            accumulator = network.likelihood.accumulator(count)
            accumulator.update(outputs, weights, slice(0, count))
            return accumulator.result()

        return compiled_prediction(
            network, predict, (block.stacked, block.shared, inputs, block.log_weights.exp())
        )

    def by_points(
        self,
        inputs: Tree,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
        state: Tensor | None = None,
        *,
        batch_size: int | None = None,
        average: Averaged = "predictions",
        first_example: int = 0,
    ) -> Iterator[tuple[slice, Tree, Tensor]]:
        """Yield (rows, outputs [M, b, ...] of *all* members, weights [M]) for chunks of points.

        The draws are replayed for each chunk from the generator's state, so memory stays bounded
        whatever the number of draws.
        """
        num_points = length(inputs)
        if generator is not None and state is None:
            state = generator.get_state()
        self.check_num_draws(num_draws)
        count = num_draws or self.num_members or DRAWS
        probe = next(self.outputs(map_tree(lambda x: x[:1], inputs), 1, _copy(generator, state)))[1]
        row_bytes = sum(8 * leaf[0].numel() for leaf in leaves(probe)) * count
        chunk = max(1, min(num_points, BLOCK_BYTES // (8 * row_bytes)))
        for start in range(0, num_points, chunk):
            rows = slice(start, min(start + chunk, num_points))
            part = map_tree(lambda x, rows=rows: x[rows], inputs)
            draws = _copy(generator, state)
            blocks: list[Tree] = []  # of members, with room for all points: many small tensors, held among
            masses: list[Tensor] = []  # large ones that come and go, would keep the memory of those
            for batch, outputs, weights in self.outputs(
                part,
                num_draws,
                draws,
                batch_size=batch_size,
                first_example=first_example + start,
                average=average,
            ):
                if batch.start == 0:
                    size = length(part)
                    blocks.append(map_tree(lambda t, n=size: t.new_empty(len(t), n, *t.shape[2:]), outputs))
                    masses.append(weights)
                map_tree(lambda room, t, at=batch: room[:, at].copy_(t), blocks[-1], outputs)
            outputs = blocks[0] if len(blocks) == 1 else map_tree(lambda *t: torch.cat(t), *blocks)
            yield rows, outputs, torch.cat(masses)

    def log_prob(
        self,
        inputs: Tree,
        targets: Tensor,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
        *,
        batch_size: int | None = None,
        average: Averaged = "predictions",
    ) -> Tensor:
        """The log predictive density log Σ_m w_m p(y_n | x_n, θ_m) of each target: [N], of tokens [N, T].

        Tokens that are ignored have 0.
        """
        likelihood = self.network.likelihood
        inputs, targets = as_tree(inputs), as_tree(targets, "Targets")
        require(len(targets) == length(inputs), f"{len(targets)} targets for {length(inputs)} inputs.")
        total: Tensor | None = None
        mass = 0.0
        for rows, outputs, weights in self.outputs(
            inputs, num_draws, generator, batch_size=batch_size, average=average
        ):
            chunk = targets[rows].to(weights.device)
            first = map_tree(lambda t: t[0], outputs)
            likelihood.check_outputs(first, chunk)
            likelihood.check_targets(chunk, first)
            each = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, chunk).double()
            weighted = each + weights.double().log().reshape(-1, *[1] * (each.ndim - 1))
            block = torch.logsumexp(weighted, 0)
            if total is None:
                total = block.new_full((length(inputs), *block.shape[1:]), -torch.inf)
            total[rows] = torch.logaddexp(total[rows], block)
            mass += float(weights.double().sum()) if rows.start == 0 else 0.0
        assert total is not None
        return total - math.log(mass)

    # --- saving -----------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write the posterior as JSON and safetensors; ``load_posterior`` reads it back."""
        folder = Path(folder)
        if (folder / "posterior.json").exists():
            raise InputError(f"{folder} holds a posterior already: choose another folder.")
        files = {}
        names_of_members: set[str] = set()
        for name, tensors in self.tensors():
            files[name] = write_tensors(folder / name, tensors)
            names_of_members |= names_in(tensors)
        files[CONSTANTS] = write_tensors(folder / CONSTANTS, self.network.constants(names_of_members))
        manifest = {
            "kind": self.kind,
            "likelihood": self.network.likelihood.config(),
            "backend": self.network.backend,
            "network": self.network.fingerprint,
            "structure": {"torch": torch.__version__, "parts": structure_of(self.network.module)},
            "files": files,
            "options": self.options(),
            "adaptations": [adaptation.config() for adaptation in self.network.adaptations],
            "record": self.record,
        }
        write_document(folder / "posterior.json", "posterior", manifest)
        return folder

    @property
    def weight_offset(self) -> float:
        """What the log weights of draws are short of those that members have."""
        return 0.0

    def in_memory(self) -> Self:
        """The same, with everything that is still in files read."""
        return self

    def held(self) -> Self:
        """The same, to predict with again and again: what is in files is read now if it fits into a block."""
        return self

    def read_from(self, folder: Path) -> Self:
        """The same, having been saved there: what it reads when it is drawn from is read from there."""
        return self


def names_in(keys: Iterable[str]) -> set[str]:
    """The names of the network's tensors in a file, where they stand under prefixes."""
    return {key.split("/", 1)[-1] for key in keys}


def _averaged(every: Iterator[tuple[slice, Tree, Tensor]]) -> Iterator[tuple[slice, Tree, Tensor]]:
    """The weighted mean over members of outputs that come member by member, in batches of rows."""
    sums: dict[tuple[int, int], tuple[Tree, Tensor]] = {}
    kinds: Tree = ()
    for rows, outputs, weights in every:
        part = map_tree(lambda t, w=weights: torch.einsum("m...,m->...", t.double(), w.double()), outputs)
        total, mass = sums.get((rows.start, rows.stop), (map_tree(torch.zeros_like, part), 0.0))
        added = map_tree(torch.add, total, part)
        sums[rows.start, rows.stop] = added, mass + weights.double().sum()
        kinds = map_tree(lambda t: t.new_empty(0), outputs)
    for (start, stop), (total, mass) in sums.items():
        mean = map_tree(lambda t, kind, mass=mass: (t / mass).to(kind)[None], total, kinds)
        yield slice(start, stop), mean, torch.ones_like(mass)[None]


def _copy(generator: torch.Generator | None, state: Tensor | None) -> torch.Generator | None:
    if generator is None or state is None:
        return None
    copy = torch.Generator(generator.device)
    copy.set_state(state)
    return copy


POSTERIORS: dict[str, type[Posterior]] = {}
AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


def register_posterior(posterior: type[AnyPosterior]) -> type[AnyPosterior]:
    """Make a kind of posterior known to ``load_posterior``."""
    POSTERIORS[posterior.kind] = posterior
    return posterior


def merge(posteriors: Sequence[Posterior]) -> Posterior:
    """The union of posteriors of one kind over one network; every member keeps its weight."""
    require(len(posteriors) > 0, "There are no posteriors to merge.")
    if len({str(posterior.network.likelihood.config()) for posterior in posteriors}) > 1:
        posteriors = [_uncalibrated(posterior) for posterior in posteriors]  # one mixture has one calibration
    first, *others = posteriors
    return first.merged(others) if others else first


def _uncalibrated(posterior: Posterior) -> Posterior:
    record = {name: value for name, value in posterior.record.items() if name != "calibration"}
    return replace(posterior.with_likelihood(posterior.network.likelihood.uncalibrated), record=record)
