"""The page of a chain of days: what it says in words."""

from pathlib import Path
from typing import Any

from hotrow.days.page import DoneDay, write_page
from hotrow.objectives.binary import BinaryCrossEntropy


def done(number: int, **late: dict[str, float | None]) -> DoneDay:
    figures: dict[str, Any] = {"metrics": None, "parts": [], "unknown": None, "gone_rows": None, "published_bytes": 9}
    figures |= {"name": f"day_{number}", "files": {}, "prepared_s": 1.0, "rows": 8, "table_rows": 5, "new_rows": 1}
    return DoneDay(seconds={}, late=late, **figures)


def test_a_mean_over_fewer_days_says_so(tmp_path: Path) -> None:
    """Rows of one label, as of a quiet hour, have a LogLoss and no AUC."""
    days = [
        done(3, fresh={"auc": 0.7, "logloss": 0.4}, late={"auc": 0.6, "logloss": 0.5}),
        done(4, fresh={"auc": None, "logloss": 0.2}, late={"auc": None, "logloss": 0.5}),
    ]
    write_page(tmp_path / "report.html", "chain", days, BinaryCrossEntropy())
    page = (tmp_path / "report.html").read_text()
    assert "one that is a day older changes AUC by -0.1000 (1 of them), LogLoss by +0.2000 (mean of 2 days)" in page
