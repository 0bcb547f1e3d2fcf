"""What the environment says of the launcher that started this process. Imports nothing heavy: every verb asks it."""

from __future__ import annotations

from collections.abc import Mapping


def size_variable(environ: Mapping[str, str]) -> str | None:
    """Returns the variable that says that this process is one of several; None if none does. WORLD_SIZE comes first:
    scripts set it inside `srun`, which gives each process the variables of MPI as well."""
    names = ["WORLD_SIZE", *mpi_variables(environ)]
    return next((name for name in names if (environ.get(name) or "1") != "1"), None)


def mpi_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns the variables in which launchers of MPI say how many processes they started: those of Open MPI, of MPICH
    and Intel MPI, and of srun with --mpi=pmix."""
    return ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *(["SLURM_STEP_NUM_TASKS"] if "PMIX_RANK" in environ else [])]


def nested(environ: Mapping[str, str]) -> str | None:
    """Returns the variable of mpiexec that says, inside torchrun, that there are several processes; otherwise None. A
    script that mpiexec starts may set the same ranks in torch's variables, for gloo. srun is left out, because it sets
    the variables of MPI for programs without MPI as well."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return None
    for name in ("OMPI_COMM_WORLD", *([] if "SLURM_PROCID" in environ else ["PMI"])):
        size, rank = environ.get(f"{name}_SIZE", "1"), environ.get(f"{name}_RANK")
        same = (size, rank) == (environ["WORLD_SIZE"], environ.get("RANK")) and "TORCHELASTIC_RUN_ID" not in environ
        if size != "1" and not same:
            return f"{name}_SIZE"
    return None
