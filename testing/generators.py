"""The generators of random models, by name: each makes model `number` of a seed."""

from collections.abc import Callable, Mapping

from testing.random_cells import random_cells
from testing.random_decisions import random_decisions
from testing.random_models import RandomModel
from testing.random_steps import random_model
from testing.random_windows import random_windows

GENERATORS: Mapping[str, Callable[[int, int], RandomModel]] = {
    "any": random_model,
    "cells": random_cells,
    "decisions": random_decisions,
    "windows": random_windows,
}
