"""The shape of the house: imports point down, importing does nothing, heavy or optional packages wait until called."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from loops import looped

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hotrow"

# The table "Rooms" in CONTRIBUTING.md, from the top down: a module imports from its own room and from rooms below it.
# A folder is a room; each module in the package's root is one of its own.
CONTRIBUTING = SOURCE.parents[1] / "CONTRIBUTING.md"
TABLE = re.findall(r"^\| `([a-z_/]+)` \| ([\d,]+) \|", CONTRIBUTING.read_text(encoding="utf-8"), re.MULTILINE)
ROOMS = [room for room, _ in reversed(TABLE)]
CEILINGS = dict(re.findall(r"^\| ([a-z ]+) \| ([\d,]+) \|$", CONTRIBUTING.read_text(encoding="utf-8"), re.MULTILINE))
LEVELS = {room: level for level, room in enumerate(ROOMS)}
MAY_IMPORT_NATIVE = {"kernels/ops.py", "data/native.py"}
MODULES = sorted(
    path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in ("__init__.py", "__main__.py")
)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> set[str]:
    """Dotted names below hotrow that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            base = node.module or ""
            names |= {base} if base != "hotrow" else {f"hotrow.{alias.name}" for alias in node.names}
    return {name.removeprefix("hotrow.") for name in names if name.startswith("hotrow.")}


def room_of(name: str) -> str:
    path = SOURCE / name.replace(".", "/")
    folder = path if path.is_dir() else path.parent
    return name.partition(".")[0] if folder == SOURCE else folder.relative_to(SOURCE).as_posix()


@looped("path", MODULES)
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    own = room_of(".".join(relative.with_suffix("").parts).removesuffix(".__init__"))
    assert own in LEVELS, f"{relative} is in no room; add it to ROOMS"
    for name in imported(parsed(path)):
        top = name.split(".")[0]
        if top == "_native":
            assert relative.as_posix() in MAY_IMPORT_NATIVE, f"{relative} imports the native module"
        else:
            assert LEVELS[room_of(name)] <= LEVELS[own], f"{relative} imports {name}, of a higher room"


def test_rooms_are_below_their_ceilings() -> None:
    """A ceiling rises only if another falls by as much in the same commit."""
    above = {}
    for room, stated in TABLE:
        path = SOURCE / room
        files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        found = sum(len(each.read_text(encoding="utf-8").splitlines()) for each in files)
        if found > int(stated.replace(",", "")):
            above[room] = f"{found:,} lines, of {stated}"
    assert not above


def test_all_is_below_its_ceiling() -> None:
    """Lines of the package, of its tests and of the native code; options, verbs, and words of docs."""
    from hotrow.cli.app import app
    from hotrow.config.load import options_of, sections

    root = SOURCE.parents[1]
    tree = [path for path in (root / "native").rglob("*") if path.suffix in (".cpp", ".h")]
    measured = set((root / "docs" / "measurements").glob("*.md"))
    found = {
        "lines of the package": total(SOURCE.rglob("*.py")),
        "lines of tests": total((root / "tests").rglob("*.py")),
        "lines of native code": total(tree),
        "options": len({path + name for _, path, section in sections() for name in options_of(section)}),
        "verbs": len(app.registered_commands),
        "words of docs": total({*(root / "docs").rglob("*.md")} - measured, str.split),
        "words of measurements": total(measured, str.split),
    }
    assert found.keys() == CEILINGS.keys()
    assert not {name: n for name, n in found.items() if n > int(CEILINGS[name].replace(",", ""))}


def total(paths: Iterable[Path], parts: Callable[[str], list[str]] = str.splitlines) -> int:
    return sum(len(parts(path.read_text(encoding="utf-8"))) for path in paths)


@looped("name", ["embedding", "optim", *(p.stem for p in SOURCE.glob("run/checkpoint*.py"))])
def test_what_asks_a_placement_knows_none(name: str) -> None:
    path = next(path for path in MODULES if path.stem == name)
    below = {name for name in imported(parsed(path)) if name.startswith("placement")}
    assert below <= {"placement", "placement.base"}, "ask through the protocol; add to it what is missing"


def test_a_model_needs_torch_and_two_modules() -> None:
    """An export copies its file, and has what stands for these two."""
    for path in (SOURCE / "models").glob("*.py"):
        if path.stem not in ("__init__", "spec", "layers"):
            assert imported(parsed(path)) <= {"models.layers", "models.spec"}, path


@looped("path", sorted((SOURCE / "data" / "transforms").glob("[!_]*.py")))
def test_a_transform_needs_numpy_alone(path: Path) -> None:
    """An export copies its file."""
    imports = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
    assert not imported(parsed(path)), path
    assert {(node.module or "").partition(".")[0] for node in imports} <= {"numpy", *sys.stdlib_module_names}, path


SUMS = """
    matmul mm mv bmm dot vdot inner outer addmm addmv addbmm baddbmm chain_matmul einsum tensordot linear bilinear sum
    nansum mean nanmean prod var std norm normalize softmax log_softmax softmin logsumexp cdist cosine_similarity
    scaled_dot_product_attention cumprod logcumsumexp trapezoid layer_norm batch_norm group_norm conv1d index_add
    index_add_ scatter_add scatter_add_ scatter_reduce segment_reduce embedding embedding_bag index_select expand
    expand_as broadcast_to repeat repeat_interleave tile sigmoid logsigmoid softplus silu gelu Linear Bilinear
    LayerNorm BatchNorm1d MultiheadAttention Softmax Sigmoid Embedding EmbeddingBag
"""
"""torch's products and sums, what adds up in backward, and what computes the end of a thread's share in another way: on
some processor and for some size, each depends on an address or on the number of threads."""
EXACT = {("tbsm", "repeat_interleave"), ("dlrm", "index_select")}
"""Of numbers of samples, not of floats; of dense inputs, which need no gradient."""


def test_models_take_products_and_sums_from_layers() -> None:
    """layers.py says why. Add to it what a model needs; tests/laws/test_model_laws.py measures."""
    for path in (SOURCE / "models").glob("*.py"):
        tree = parsed(path)
        assert not any(isinstance(n, ast.MatMult) for n in ast.walk(tree)), f"{path.name} has a product by @"
        if path.stem not in ("__init__", "spec", "layers"):
            assert {(path.stem, name) for name in torchs_sums(tree)} <= EXACT


def torchs_sums(tree: ast.AST) -> set[str]:
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    # Names of a module are its own, such as an option called layer_norm.
    found = {node.attr for node in attributes if ast.unparse(node.value) != "self"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {alias.name for alias in node.names}
    return found & set(SUMS.split())


@looped("text", ["x.sum(1)", "torch.bmm(x, y)", "from torch.nn.functional import softmax as s", "nn.Linear(3, 1)"])
def test_torchs_sums_are_found(text: str) -> None:
    assert torchs_sums(ast.parse(text))


RIVALS = {"rocksdict", "fbgemm_gpu", "torchrec", "polars", "benchmarks"}


@looped("path", MODULES)
def test_comparisons_with_others_stay_out_of_the_package(path: Path) -> None:
    """Other people's stores and engines are for benchmarks/, which the package does not know."""
    found = set[str]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # a name for importlib
    assert not found & RIVALS


HEAVY = [
    "tensorboard", "torch.utils.tensorboard", "plotly", "sklearn", "pandas", "polars", "pyarrow.dataset", "jinja2",
    "fbgemm_gpu", "triton", "optuna",
]  # fmt: skip
LEAN = """
import os, sys, threading, torch
threads, state, files = threading.active_count(), torch.get_rng_state(), set(os.listdir())
num_threads = torch.get_num_threads()
import hotrow, hotrow.cli
assert threading.active_count() == threads, "a thread was started"
assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
assert torch.get_num_threads() == num_threads
assert set(os.listdir()) == files, "a file was made"
print([name for name in sys.argv[1:] if name in sys.modules])
"""


def test_import_is_lean(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN, *HEAVY], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", "import hotrow pulls these in"
    assert done.stderr == ""


def test_public_names() -> None:
    import hotrow

    assert all(hasattr(hotrow, name) for name in hotrow.__all__)
    assert len(set(hotrow.__all__)) == len(hotrow.__all__)
