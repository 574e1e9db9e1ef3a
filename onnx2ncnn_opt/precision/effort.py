"""How much optional work a large model gets."""

import math
from typing import Literal, TypeAlias

Effort: TypeAlias = Literal["quick", "normal", "thorough"]
# The seconds after which less useful inputs are left out, and a factor for the number of runs to find masks.
EFFORTS: dict[Effort, tuple[float, float]] = {"quick": (0.0, 0.0), "normal": (10.0, 1.0), "thorough": (math.inf, 4.0)}
