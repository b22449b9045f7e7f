"""A trained WRN-28-10 for CIFAR-100 from a file: the model of ``cifar100-pretrained.yaml``."""

from torch import nn

import polymode as pm


def network(num_classes: int = 100, path: str = "") -> nn.Module:
    """The network with the weights in ``path`` (safetensors), such as those of ``collapse()``."""
    from safetensors.torch import load_file

    module = pm.models.wrn28_10(num_classes)
    module.load_state_dict(load_file(path))
    return module
