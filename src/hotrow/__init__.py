"""hotrow trains recommendation models whose embedding tables are larger than memory, at the speed of that memory."""

__version__ = "0.1.0"

from hotrow.api import Run, fit, load
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.checkpoint import load_checkpoint, save_checkpoint
from hotrow.config import load_config
from hotrow.config_schema import Config
from hotrow.data.loader import Loader
from hotrow.data.packed import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.gradients import clip_grad_norm_
from hotrow.memory.budget import Memory
from hotrow.memory.device_budget import DeviceMemory
from hotrow.memory.lookahead import lookahead
from hotrow.optim import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad, SplitSGDBF16
from hotrow.plan.solve import plan_by_counts
from hotrow.tables import TableConfig, Uniform

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "Config",
    "DeviceMemory",
    "EmbeddingCollection",
    "KeyedJaggedTensor",
    "Loader",
    "Memory",
    "PackedDataset",
    "RowWiseAdagrad",
    "Run",
    "SplitSGDBF16",
    "TableConfig",
    "Uniform",
    "__version__",
    "clip_grad_norm_",
    "fit",
    "load",
    "load_checkpoint",
    "load_config",
    "lookahead",
    "plan_by_counts",
    "save_checkpoint",
]
