"""Every day on Airflow 3: train on the logs that are new, then hand what changed to the servers.

Put this file into Airflow's folder of DAGs, and hotrow where its tasks run. Change the constants below. Each server is
`hotrow serve model --deltas CHAIN/deltas`, which sees the chain's folder; the model that it starts with is a copy of
CHAIN/model. The chain's folder is its owner's alone: if a server runs as another user, as in a container, say once
`chmod a+x CHAIN`.

A task that fails or is killed is tried again and goes on where it was. Days that were missed are done in order. A
server that was away gets all deltas that it has missed.
"""

import json
import os
import urllib.request
from datetime import datetime, timedelta
from pathlib import Path

from airflow.sdk import dag, task

LOGS = os.environ.get("HOTROW_LOGS", "/data/logs")
CHAIN = os.environ.get("HOTROW_CHAIN", "/data/chain")
SERVERS = os.environ.get("HOTROW_SERVERS", "http://clicks:8080").split()
COLUMNS = "--label click --time ts"


def call(server: str, path: str, body: dict[str, str] | None = None) -> str:
    """Returns the version that a server has after a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(json.load(answer)["version"])


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

    @task
    def serve() -> None:
        after = {}
        for told in Path(CHAIN, "deltas").glob("*/delta.json"):
            after[json.loads(told.read_text())["exports"][-1][:12]] = told.parent.name
        for server in SERVERS:
            version = call(server, "/health")
            while version in after:
                version = call(server, "/apply", {"delta": after[version]})

    train() >> serve()


hotrow_day()
