"""One run on a Ray cluster:   python ray_train.py recipe.yaml /shared/runs/clicks 4

Ray starts the workers and joins them; hotrow finds the process group and trains on all of them. The run folder must be
on a file system that all of Ray's machines share. After a failure Ray starts the workers again, and the run goes on
from its newest checkpoint. Paths in the recipe must be absolute, because workers run elsewhere.
"""

import sys
from pathlib import Path
from typing import Any


def train(given: dict[str, Any]) -> None:
    """What each worker does."""
    from hotrow.config.load import load_config
    from hotrow.parallel.agreement import everyone
    from hotrow.parallel.launch import joined
    from hotrow.run import runs

    with joined() as comm:
        begun = everyone(comm, (Path(given["run"]) / "config.yaml").is_file())
        if begun[0]:  # what the first worker sees
            runs.resume(given["run"], comm=comm)
        else:
            runs.train(load_config(given["config"], [f"run={given['run']}"]), comm=comm)


def main(config: str, run: str, num_workers: int) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"config": str(Path(config).resolve()), "run": str(Path(run).resolve())},
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 8}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
