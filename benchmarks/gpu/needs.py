"""What this machine lacks of the packages that the library and its tests need, and wheels to carry there.

    python -m benchmarks.gpu.needs                                              # names what is missing
    python -m benchmarks.gpu.needs --download build/gpu/wheels --python 3.12    # where there is a network
    python -m benchmarks.gpu.needs --install build/gpu/wheels --into build/gpu/site

Wheels are those of a complete installation (the one that runs this) without what a machine with torch, transformers and
lightning has anyway. They are installed beside, into a folder of their own, and only where something is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import ROOT

TESTS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
PRESENT = (
    "torch", "transformers", "lightning", "torchmetrics", "accelerate", "peft", "pandas", "pyarrow", "matplotlib",
    "tensorboard", "aiohttp", "xxhash", "sympy", "setuptools", *TESTS,
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def wanted() -> list[str]:
    """Requirements of the library, its tests and the models that they use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["gguf"], *TESTS]


def installed(requirement: Requirement) -> metadata.Distribution | None:
    """The package, None if it is not there."""
    try:
        return metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return None


def needed_by(requirements: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Name and version of all packages that these bring, and what is missing; only their own versions are compared."""
    versions: dict[str, str] = {}
    missing: list[str] = []
    waiting = [(Requirement(text), True) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, is_own = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        package = installed(requirement)
        if package is None or (is_own and not requirement.specifier.contains(package.version, prereleases=True)):
            missing.append(str(requirement))
            continue
        versions[name] = package.version
        for text in package.requires or []:
            further = Requirement(text)
            extras = requirement.extras or {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((further, False))
    return versions, sorted(set(missing))


def download(folder: Path, python: str) -> None:
    """Wheels for another machine with this version of Python."""
    complete, missing = needed_by(wanted())
    if missing:
        sys.exit(f"This installation is not complete itself: {', '.join(missing)} missing. Run make install.")
    present, _ = needed_by(PRESENT)
    names = [f"{name}=={version}" for name, version in sorted(complete.items()) if name not in present]
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version"]
    subprocess.run([*pip, python, "--implementation", "cp", *platforms, "-d", str(folder), *names], check=True)
    size = sum(path.stat().st_size for path in folder.glob("*.whl")) / 2**20
    print(f"{len(names)} wheels, {size:.1f} MiB, in {folder}: {', '.join(names)}")


def install(wheels: Path, into: Path) -> None:
    """Install what is missing, and what that needs, until nothing is missing or there is no wheel for it."""
    sys.path.insert(0, str(into))
    tried: set[str] = set()
    while missing := needed_by(wanted())[1]:
        names = {canonicalize_name(Requirement(text).name) for text in missing}
        new = [
            path for path in sorted(wheels.glob("*.whl"))
            if (name := canonicalize_name(path.name.split("-")[0])) in names and name not in tried
        ]  # fmt: skip
        if not new:
            sys.exit(
                f"Missing: {', '.join(missing)}. Fill {wheels} on a machine with a network by make gpu-carry and "
                "bring it here, or install them."
            )
        tried |= {canonicalize_name(path.name.split("-")[0]) for path in new}
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*pip, str(into), *map(str, new)], check=True)
    print("Nothing is missing." if not tried else f"Installed into {into}: {', '.join(sorted(tried))}")


def main() -> None:
    """Name, download or install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--download", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="version on the machine that the wheels are for")
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="folder of wheels")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "gpu" / "site")
    args = parser.parse_args()
    if args.download:
        download(args.download, args.python)
    elif args.install:
        install(args.install, args.into)
    else:
        print("\n".join(needed_by(wanted())[1]) or "Nothing is missing.")


if __name__ == "__main__":
    main()
