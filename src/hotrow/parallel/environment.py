"""What the environment says of the launcher that started this process. Imports nothing heavy: every verb asks it."""

from __future__ import annotations

from collections.abc import Mapping


def size_variable(environ: Mapping[str, str]) -> str | None:
    """Returns the variable that says that this process is one of several; None if none does.

    WORLD_SIZE comes first: scripts set it inside `srun`, which gives each process the variables of MPI as well.
    """
    names = ["WORLD_SIZE", *mpi_variables(environ)]
    return next((name for name in names if environ.get(name, "1") != "1"), None)


def mpi_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns the variables in which launchers of MPI say how many processes they started: those of Open MPI, of MPICH
    and Intel MPI, and of srun with --mpi=pmix."""
    return ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *(["SLURM_STEP_NUM_TASKS"] if "PMIX_RANK" in environ else [])]


def nested(environ: Mapping[str, str]) -> str | None:
    """Returns the variable of mpiexec that says "several" inside another launcher that says so too; otherwise None.

    srun is left out, because it sets the variables of MPI for programs without MPI as well.
    """
    if environ.get("WORLD_SIZE", "1") == "1":
        return None
    names = ["OMPI_COMM_WORLD_SIZE", *([] if "SLURM_PROCID" in environ else ["PMI_SIZE"])]
    return next((name for name in names if environ.get(name, "1") != "1"), None)
