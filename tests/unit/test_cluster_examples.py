"""examples/cluster: what can be tried of them without a cluster, with stand-ins for what a cluster has."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import yaml
from torch.distributed.run import get_args_parser

from forked import COMMAND, run_forked
from hotrow.parallel.communicator import Communicator
from rank_pool import RankPool

pytestmark = pytest.mark.package
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
SAYS = """#!/bin/bash
{ printf '%s ' "$RANK" "${WORLD_SIZE:-$MPI}" "$LOCAL_RANK" "$LOCAL_WORLD_SIZE" "$MASTER_ADDR" "$MASTER_PORT" "$@"
  echo; } >> "$SAID"
exit "${HOTROW_ENDS:-0}"
"""
SRUN = """#!/bin/bash
worst=0
while [ "${1#--}" != "$1" ]; do
  if [ "$1" = --mpi=pmix ]; then export MPI=pmix; fi
  shift
done
for rank in 0 1 2 3; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@" || worst=$?
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node07; echo node08; else echo "$@" >> "$SAID"; fi
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not there")
@pytest.mark.parametrize("over", ["", "mpi"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("ends", "restarts", "requeued"),
    [
        (0, 0, False),
        (128 + signal.SIGUSR1, 0, True),
        (128 + signal.SIGUSR1, 99, True),
        (128 + signal.SIGTERM, 0, False),  # as after scancel
        (3, 0, True),
        (137, 19, True),
        (137, 20, False),
        (2, 0, False),
    ],
)
def test_slurm(tmp_path: Path, *, ends: int, restarts: int, requeued: bool, begun: bool, over: str) -> None:
    """Every task becomes a rank; a run that has begun goes on; a job that was stopped goes back into the queue."""
    for name, text in {"hotrow": SAYS, "srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    run = tmp_path / "run"
    if begun:
        run.mkdir()
        (run / "config.yaml").touch()
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": f"{tmp_path / 'said'}", "HOTROW_ENDS": str(ends)}
    environ["SLURM_RESTART_COUNT"] = str(restarts)
    command = ["bash", str(FOLDER / "slurm.sbatch"), "recipe.yaml", str(run), *over.split()]
    done = subprocess.run(command, env=environ | job, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (ends, "")
    *ranks, last = (tmp_path / "said").read_text().splitlines() + ([] if requeued else [""])
    assert last == ("requeue 17" if requeued else "")
    command = f"train --resume {run}" if begun else f"train recipe.yaml --set run={run}"
    assert ranks == [f"{rank} {'pmix' if over else 4} {rank % 2} 2 node07 29500 {command} " for rank in range(4)]


def test_slurm_asks_for_time_to_save() -> None:
    """As many ranks to a node as the script says elsewhere, and the signal for which hotrow saves."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE))
    assert asked["signal"].startswith("USR1@") and "requeue" in asked and int(asked["ntasks-per-node"]) > 1


def test_kubernetes() -> None:
    """The command is one that torchrun takes, and names are those of the Service and the Job."""
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    text = container["args"][0].replace("\\\n", " ")
    given = text[text.index("torchrun ") :].split()[1:]
    options = get_args_parser().parse_args(given)
    assert options.module and options.training_script == "hotrow" and options.training_script_args == ["train", '"$@"']
    assert int(options.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert options.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and pod["subdomain"] == "hotrow"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


class _Options:
    """Keeps what it is given."""

    made: ClassVar[dict[str, Any]] = {}

    def __init__(self, *given: Any, **options: Any) -> None:
        self.given, self.options = given, options

    def fit(self) -> None:
        self.made.update(self.options)


def worker(comm: Communicator, folder: str, given: dict[str, Any]) -> None:
    os.chdir(folder)
    runpy.run_path(str(FOLDER / "ray_train.py"))["train"](given)


def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers train a run together; started again, as after a failure, they go on in the same folder."""
    for name in ("ray", "ray.train", "ray.train.torch"):
        module = ModuleType(name)
        for option in ("FailureConfig", "RunConfig", "ScalingConfig", "TorchConfig", "TorchTrainer"):
            setattr(module, option, _Options)
        monkeypatch.setitem(sys.modules, name, module)
    rows = [f"u{k * 7 % 30},i{k % 7},{1_700_000_000 + 60 * k},{k * 7919 % 97 % 2}" for k in range(300)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,ts,click", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    prepare = ["prepare", "csv", "clicks.csv", "--out", "data", "--label", "click", "--time", "ts"]
    assert run_forked(COMMAND, *prepare).returncode == 0
    (tmp_path / "recipe.yaml").write_text(
        "data: data\ntrain: {batch_size: 32, max_steps: 4}\nmodel: {embedding_dim: 4, bottom_mlp: [4], top_mlp: [4]}\n"
    )
    runpy.run_path(str(FOLDER / "ray_train.py"))["main"]("recipe.yaml", "run", 2)
    assert _Options.made["scaling_config"].options["num_workers"] == 2
    with RankPool(2) as pool:
        for _ in range(2):
            pool.run(worker, str(tmp_path), _Options.made["train_loop_config"], num_ranks=2, micro_batches=2)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["ranks"]["num_ranks"]) == ("finished", 2)
