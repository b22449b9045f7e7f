"""torchensemble: members in turn, each for an epoch (its jobs run in this process, which has one core)."""

from torch import nn

from league.jobs import (
    CNN_MOMENTUM,
    CNN_RATE,
    NUM_CLASSES,
    Sizes,
    Timed,
    classification,
    images,
    regression,
)
from league.networks import MLP, SmallCNN, loader, tensors

QUIET = {"log_interval": 10**9, "save_model": False}


def ensemble(sizes: Sizes) -> Timed:
    from torchensemble import VotingRegressor

    batches = loader(*tensors(regression(sizes.rows)), sizes.batch_size)

    def train(epochs: int) -> None:
        model = VotingRegressor(estimator=MLP, n_estimators=sizes.members, cuda=False)
        model.set_criterion(nn.MSELoss())
        model.set_optimizer("Adam", lr=1e-3)
        model.fit(batches, epochs=epochs, **QUIET)

    return Timed(lambda: train(sizes.epochs), lambda: train(1))


def cnn_ensemble(sizes: Sizes) -> Timed:
    from torchensemble import VotingClassifier

    batches = loader(*tensors(images(sizes.rows)), sizes.batch_size)

    def run() -> None:
        model = VotingClassifier(estimator=SmallCNN, n_estimators=sizes.members, cuda=False)
        model.set_criterion(nn.CrossEntropyLoss())
        model.set_optimizer("SGD", lr=CNN_RATE, momentum=CNN_MOMENTUM)
        model.fit(batches, epochs=sizes.epochs, **QUIET)

    return Timed(run)


def prediction(sizes: Sizes) -> Timed:
    from torchensemble import VotingClassifier

    options = {"estimator_args": {"num_outputs": NUM_CLASSES}, "cuda": False}
    model = VotingClassifier(estimator=MLP, n_estimators=sizes.members, **options)
    model.set_optimizer("Adam", lr=1e-3)
    model.fit(loader(*tensors(classification(sizes.rows)), sizes.batch_size), epochs=1, **QUIET)
    x, _ = tensors(classification(sizes.points))

    def run() -> None:
        for _ in range(sizes.calls):
            model.predict(x)

    return Timed(run)
