"""hotrow trains recommendation models whose embedding tables are larger than memory, at the speed of that memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotrow.base.version import __version__

if TYPE_CHECKING:
    from hotrow.api import Run, fit, load
    from hotrow.batch import Batch, KeyedJaggedTensor
    from hotrow.config.load import load_config
    from hotrow.config.schema import Config
    from hotrow.data.packed.loader import Loader
    from hotrow.data.packed.reader import PackedDataset
    from hotrow.embedding import EmbeddingCollection
    from hotrow.export.delta import apply_delta
    from hotrow.optim import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad, SplitSGDBF16, clip_grad_norm_
    from hotrow.parallel.launch import shard
    from hotrow.parallel.shards import Shard
    from hotrow.placement.budget import DeviceMemory, Memory
    from hotrow.placement.lookahead import lookahead
    from hotrow.run.checkpoint import load_checkpoint, save_checkpoint
    from hotrow.serve.scorer import Scorer
    from hotrow.setup.divide import plan_by_counts
    from hotrow.sklearn import Classifier as Classifier
    from hotrow.sklearn import Regressor as Regressor
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
    "Scorer",
    "Shard",
    "SplitSGDBF16",
    "TableConfig",
    "Uniform",
    "__version__",
    "apply_delta",
    "clip_grad_norm_",
    "fit",
    "load",
    "load_checkpoint",
    "load_config",
    "lookahead",
    "plan_by_counts",
    "save_checkpoint",
    "shard",
]

# torch takes a second to import: it waits until a name that needs it is used, so that the command line answers at once.
_HOMES = {
    "hotrow.api": ("Run", "fit", "load"),
    "hotrow.batch": ("Batch", "KeyedJaggedTensor"),
    "hotrow.run.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "hotrow.config.load": ("load_config",),
    "hotrow.config.schema": ("Config",),
    "hotrow.data.packed.loader": ("Loader",),
    "hotrow.data.packed.reader": ("PackedDataset",),
    "hotrow.embedding": ("EmbeddingCollection",),
    "hotrow.export.delta": ("apply_delta",),
    "hotrow.parallel.launch": ("shard",),
    "hotrow.parallel.shards": ("Shard",),
    "hotrow.serve.scorer": ("Scorer",),
    "hotrow.placement.budget": ("DeviceMemory", "Memory"),
    "hotrow.placement.lookahead": ("lookahead",),
    "hotrow.optim": ("FTRL", "SGD", "Adagrad", "Adam", "RowWiseAdagrad", "SplitSGDBF16", "clip_grad_norm_"),
    "hotrow.setup.divide": ("plan_by_counts",),
    "hotrow.tables": ("TableConfig", "Uniform"),
    "hotrow.sklearn": ("Classifier", "Regressor"),  # not in __all__: scikit-learn is optional, and `import *` needs all
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
