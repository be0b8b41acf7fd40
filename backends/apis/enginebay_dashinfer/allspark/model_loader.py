"""The names of DashInfer's module allspark.model_loader."""

from __future__ import annotations

from enginebay_dashinfer.model_loader import DashInferModel, HuggingFaceModel

__all__ = ["DashInferModel", "HuggingFaceModel"]
