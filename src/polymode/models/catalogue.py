"""Networks by name, built for the shape of the examples and the outputs that a task needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from polymode.errors import InputError, UnknownName, unknown_name
from polymode.imports import call, check_keywords, import_object, is_import
from polymode.models.alexnet import AlexNet
from polymode.models.cnn import MediumCNN, SmallCNN
from polymode.models.frn import resnet20_frn
from polymode.models.imagenet import resnet18
from polymode.models.lenet import LeNet, LeNet5
from polymode.models.mlp import MLP
from polymode.models.pyramidnet import pyramidnet110
from polymode.models.resnet import resnet8, resnet20, resnet32, resnet56
from polymode.models.text import CNNLSTM, CharacterLSTM, MeanEmbedding
from polymode.models.wideresnet import wrn16_2, wrn28_10, wrn28_14


@dataclass(frozen=True)
class Architecture:
    """A network that can be named.

    takes: the kind of examples, "table", "images" or "tokens". square: built for one size of image.
    """

    name: str
    takes: str
    summary: str
    build: Callable[..., nn.Module]
    square: bool = False

    def factory(
        self, example_shape: Sequence[int], num_outputs: int, options: Mapping[str, Any]
    ) -> Callable[[], nn.Module]:
        """A function that builds the network for examples of a shape."""
        shape = tuple(example_shape)
        if self.takes == "images":
            return partial(self.build, **self._image_options(shape, num_outputs, options))
        if self.takes == "tokens":
            given = {"num_outputs": num_outputs} | dict(options)
        else:
            given = {"num_inputs": math.prod(shape), "num_outputs": num_outputs} | dict(options)
        check_keywords(self.build, given, f"the model {self.name}")
        return partial(self.build, **given)

    def _image_options(
        self, shape: tuple[int, ...], num_outputs: int, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        if len(shape) != 3:
            raise InputError(
                f"The model {self.name} takes images [channels, height, width]; these examples are "
                f"{list(shape)}. Use the model mlp, or one of your own (package.module:callable)."
            )
        channels, height, width = shape
        given: dict[str, Any] = {"num_classes": num_outputs, "in_channels": channels} | dict(options)
        if self.square:
            if height != width:
                raise InputError(
                    f"The model {self.name} takes square images, these are {height}×{width}. resnet20 takes "
                    "any size."
                )
            given = {"image_size": height} | given
        check_keywords(self.build, given, f"the model {self.name}")
        return given


MODELS: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "mlp",
            "table",
            "fully connected; options hidden, batch_norm, input_norm, norm_scale, dropout, input_dropout, "
            "output_bias",
            MLP,
        ),
        Architecture(
            "smallcnn",
            "images",
            "three convolutions, 16-32-32 channels; options dropout, initialisation",
            SmallCNN,
            square=True,
        ),
        Architecture(
            "mediumcnn",
            "images",
            "four convolutions, 64-128-256-256 channels; options dropout, initialisation",
            MediumCNN,
            square=True,
        ),
        Architecture(
            "resnet8", "images", "residual, BatchNorm, 1 block a stack; options dropout, activation", resnet8
        ),
        Architecture(
            "resnet20",
            "images",
            "residual, BatchNorm, 3 blocks a stack; options dropout, activation",
            resnet20,
        ),
        Architecture(
            "resnet32",
            "images",
            "residual, BatchNorm, 5 blocks a stack; options dropout, activation",
            resnet32,
        ),
        Architecture(
            "resnet56",
            "images",
            "residual, BatchNorm, 9 blocks a stack; options dropout, activation",
            resnet56,
        ),
        Architecture("resnet18", "images", "residual, BatchNorm, for large images; option dropout", resnet18),
        Architecture(
            "pyramidnet110",
            "images",
            "residual, BatchNorm, widened from 16 to 16 + alpha; options alpha, dropout",
            pyramidnet110,
        ),
        Architecture("wrn16_2", "images", "wide residual, depth 16, width 2; option dropout", wrn16_2),
        Architecture("wrn28_10", "images", "wide residual, depth 28, width 10; option dropout", wrn28_10),
        Architecture("wrn28_14", "images", "wide residual, depth 28, width 14; option dropout", wrn28_14),
        Architecture("resnet20_frn", "images", "residual, no BatchNorm (FRN), swish", resnet20_frn),
        Architecture("alexnet", "images", "five convolutions, swish", AlexNet, square=True),
        Architecture("lenet", "images", "two 5×5 convolutions, 6-16 channels", LeNet, square=True),
        Architecture("lenet5", "images", "LeNet-5 with BatchNorm; option batch_norm", LeNet5, square=True),
        Architecture("text", "tokens", "mean of embeddings, one hidden layer", MeanEmbedding),
        Architecture("cnn_lstm", "tokens", "embeddings, one convolution, an LSTM", CNNLSTM),
        Architecture(
            "char_lstm",
            "tokens",
            "embeddings, an LSTM; outputs for every symbol; options width, hidden, initial_range",
            CharacterLSTM,
        ),
    )
}


def make_model(
    spec: str, example_shape: Any, num_outputs: int, options: Mapping[str, Any]
) -> Callable[[], nn.Module] | nn.Module:
    """The network that a name, or ``package.module:callable``, stands for: a factory, or a module.

    The user's callable is called with the options and returns a module; a name that is a module itself
    takes none.
    """
    if is_import(spec):
        found = import_object(spec, "The model")
        if isinstance(found, nn.Module):
            return found
        if not callable(found):
            raise InputError(
                f"{spec} is a {type(found).__name__}: name a function that returns an nn.Module, or a module."
            )
        check_keywords(found, options, f"the model {spec}")
        return partial(_checked, found, dict(options), spec)
    if spec not in MODELS:
        error = unknown_name("model", spec, MODELS)
        raise UnknownName(f"{error} A network of your own is package.module:callable.")
    if not isinstance(example_shape, tuple):
        raise InputError(
            f"The model {spec} takes one tensor; these examples have several inputs. Give a network of your "
            "own: package.module:callable."
        )
    return MODELS[spec].factory(example_shape, num_outputs, options)


def _checked(function: Callable[..., Any], options: Mapping[str, Any], spec: str) -> nn.Module:
    module = call(function, options, spec)
    if not isinstance(module, nn.Module):
        raise InputError(f"{spec} returned a {type(module).__name__}: it must return an nn.Module.")
    return module
