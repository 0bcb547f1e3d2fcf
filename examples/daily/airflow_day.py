"""Every day on Airflow 3: train on the logs that are new. Servers take the new model by themselves.

Put this file into Airflow's folder of DAGs, and hotrow where its tasks run. Change the constants below. Each server is
`hotrow serve CHAIN/model --follow`, which sees the chain's folder. That folder is its owner's alone: if a server runs
as another user, as in a container, say once `chmod a+x CHAIN`.

A task that fails or is killed is tried again and goes on where it was. Days that were missed are done in order.
"""

import os
from datetime import datetime, timedelta

from airflow.sdk import dag, task

LOGS = os.environ.get("HOTROW_LOGS", "/data/logs")
CHAIN = os.environ.get("HOTROW_CHAIN", "/data/chain")
COLUMNS = "--label click --time ts"


@dag(
    schedule="0 3 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=5)},
)
def hotrow_day() -> None:
    @task.bash
    def train() -> str:
        return f"hotrow days '{LOGS}' {COLUMNS} --out '{CHAIN}'"

    train()


hotrow_day()
