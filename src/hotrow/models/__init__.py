"""Models: dense inputs and embedding rows in, logits out. One file per model, and the one list of them."""

from __future__ import annotations

from hotrow.models.dcn import DCNSpec
from hotrow.models.deepfm import DeepFMSpec
from hotrow.models.din import DINSpec
from hotrow.models.dlrm import DLRMSpec
from hotrow.models.finalmlp import FinalMLPSpec
from hotrow.models.mmoe import MMoESpec
from hotrow.models.spec import ModelSpec
from hotrow.models.tbsm import TBSMSpec
from hotrow.models.two_tower import TwoTowerSpec

MODELS: dict[str, type[ModelSpec]] = {
    spec.model_fields["name"].default: spec
    for spec in (DLRMSpec, TBSMSpec, DCNSpec, DeepFMSpec, DINSpec, TwoTowerSpec, FinalMLPSpec, MMoESpec)
}
"""By the name that `model.name` selects; the first is the default."""
