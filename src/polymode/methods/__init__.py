"""The methods, one file each. What ``registry.py`` lists is here, too."""

from polymode.methods.configuration import make_method as make_method
from polymode.methods.counting import ParameterCount as ParameterCount
from polymode.methods.counting import network_count as network_count
from polymode.methods.counting import parameter_counts as parameter_counts
from polymode.methods.registry import *  # noqa: F403  # one line there is all that a method needs
from polymode.methods.sequential_anchored import split_budget as split_budget
