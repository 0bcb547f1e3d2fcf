"""The version of hotrow, which datasets, exports and records of runs carry."""

from __future__ import annotations

__version__ = "0.1.0"
