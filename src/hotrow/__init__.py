"""hotrow trains recommendation models whose embedding tables are larger than memory, at the speed of that memory."""

from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.tables import TableConfig, Uniform

__version__ = "0.1.0"

__all__ = ["Batch", "KeyedJaggedTensor", "TableConfig", "Uniform", "__version__"]
