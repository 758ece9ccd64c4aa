"""Checks of what is published: content, metadata and platform tag of sdist and wheel, and the README's example.

    python -m build --no-isolation && python .ci/check_dist.py [--release] dist

A wheel with native libraries gets the ``manylinux`` tag of the oldest glibc that has all symbols they need. libtorch is
never packed: the libraries load the one of the installed torch. The example runs in an environment made from the wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "sparse_rl_lightning"
PACKAGES = (PACKAGE, "exact_answers")
BESIDE = {
    "cuda_ext": (".cpp", ".cu", ".cuh", ".h", ".md", ".py"), "configs": (".yaml", ".json", ".txt"),
    "examples": (".py",),
}  # fmt: skip
"""Folders that only the sdist has, and what of them."""
SOURCE_ONLY = (*(f"{folder}/" for folder in BESIDE), f"{PACKAGE}.egg-info/")
SOURCE_FILES = {
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "MIGRATION.md", "PKG-INFO", "README.md", "SECURITY.md",
    "constraints.txt", "pyproject.toml", "setup.cfg", "setup.py",
}  # fmt: skip
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def here(folder: str, *suffixes: str) -> set[str]:
    """Files of the checkout below ``folder`` by their path from its root; what was built or compiled is left out."""
    names = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
    names = {name for name in names if not {"__pycache__", "tests"} & set(name.split("/")) and not name.endswith(".so")}
    return {name for name in names if not suffixes or name.endswith(suffixes)}


def compare(what: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Stop unless both name the same files."""
    found, wanted = set(found), set(wanted)
    if found != wanted:
        sys.exit(f"error: {what} lacks {sorted(wanted - found)} and has {sorted(found - wanted)}")


def check_source(archive: Path) -> bytes:
    """Packages, native sources and configurations, and no tests, runs or libraries; returns the metadata."""
    with tarfile.open(archive) as files:
        names = {m.name.partition("/")[2]: m for m in files.getmembers() if m.isfile()}
        metadata = files.extractfile(names["PKG-INFO"])
        assert metadata
        content = metadata.read()
    rest = {name for name in names if not name.startswith(SOURCE_ONLY)}
    compare(archive.name, rest, SOURCE_FILES.union(*map(here, PACKAGES)))
    for folder, suffixes in BESIDE.items():
        own = {name for name in names if name.startswith(f"{folder}/")}
        compare(f"{folder} of {archive.name}", own, here(folder, *suffixes))
    return content


def check_wheel(wheel: Path) -> tuple[bytes, bytes]:
    """The two packages and nothing else; returns the metadata and all that its native libraries are made of."""
    with zipfile.ZipFile(wheel) as files:
        info = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        own = {name for name in files.namelist() if not name.startswith(info.partition("/")[0])}
        libraries = {name for name in own if name.endswith(".abi3.so")}
        compare(wheel.name, own - libraries, set().union(*map(here, PACKAGES)))
        return files.read(info), b"".join(map(files.read, sorted(libraries)))


def check_metadata(content: bytes, name: str, version: str) -> None:
    """What an index asks for: valid fields, the version of the file's name, no dependency by address."""
    metadata = Metadata.from_email(content)  # raises on what is not valid
    assert (metadata.name, str(metadata.version)) == (name, version), f"{metadata.name} {metadata.version}"
    assert (metadata.license_expression, metadata.description_content_type) == ("Apache-2.0", "text/markdown")
    wanted = ("summary", "description", "requires_python", "keywords", "classifiers", "author", "license_files")
    missing = [field for field in wanted if not getattr(metadata, field)]
    assert missing == [], f"the metadata lacks {missing}"
    assert not any(requirement.url for requirement in metadata.requires_dist or ())


def check_release(content: bytes) -> None:
    """A release is what git has under its tag, says no ``.dev``, and where the project lives."""
    metadata = Metadata.from_email(content)
    tag = f"v{metadata.version}"
    wrong = {
        "files that git does not have as they are": bool(_git("status", "--porcelain") or _ignored()),
        f"no tag {tag} on this commit": tag not in _git("tag", "--points-at", "HEAD").split(),
        f"{metadata.version} is no release": not metadata.version or metadata.version.is_prerelease,
        "no address, see CONTRIBUTING.md, A release": not metadata.project_urls
        or "git clone ADDRESS" in content.decode(),
    }
    if any(wrong.values()):
        sys.exit(f"error: not to be published: {'; '.join(fault for fault, is_so in wrong.items() if is_so)}")


def _ignored() -> list[str]:
    """Files that git leaves out and that would be packed; what was built or compiled is left out."""
    names = _git("ls-files", "--others", "--ignored", "--exclude-standard", "--", *PACKAGES, *BESIDE).splitlines()
    return [name for name in names if "__pycache__" not in name and not name.endswith(".so")]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def tagged(wheel: Path, libraries: bytes) -> Path:
    """The wheel with its platform tag: ``any`` without libraries, else the oldest glibc on which they load."""
    tags = {str(tag) for tag in parse_wheel_filename(wheel.name)[3]}
    if not libraries:
        assert tags == {"py3-none-any"}, tags
        return wheel
    assert all(tag.startswith("cp311-abi3-") for tag in tags), tags
    machine = re.search(r"-linux_(\w+)\.whl$", wheel.name)
    if machine is None:
        return wheel
    major, minor = max((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", libraries))
    platform = f"manylinux_{major}_{minor}_{machine[1]}"
    call = [sys.executable, "-m", "wheel", "tags", "--remove", f"--platform-tag={platform}", wheel]
    printed = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    return wheel.parent / printed.split()[-1]


def try_out(wheel: Path, native: bool) -> str:
    """What the README's Python blocks print in an environment that has only the wheel and what it depends on.

    The command must be there too.
    """
    code = "\n".join(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert code, "the README has no Python block"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)

        def run(*call: str | Path) -> str:
            python = Path(folder) / "venv" / "bin" / "python"
            call = (python, *call)
            return subprocess.run(
                call, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        run("-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel.absolute())
        run("-m", "pip", "check")
        if native:
            run("-c", "from sparse_rl_lightning import ops; assert not ops.MISSING['cpu'], ops.MISSING")
        subprocess.run([Path(folder) / "venv" / "bin" / "sparse-rl", "--version"], env=environment, check=True)
        return run("-c", code)


def main() -> None:
    """Check everything in the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with one sdist and one wheel")
    parser.add_argument("--no-install", action="store_true", help="files only, no environment")
    parser.add_argument("--release", action="store_true", help="refuse what is not to be published")
    given = parser.parse_args()
    (archive,), (wheel,) = given.folder.glob("*.tar.gz"), given.folder.glob("*.whl")
    name, version = parse_sdist_filename(archive.name)
    metadata, libraries = check_wheel(wheel)
    check_metadata(check_source(archive), name, str(version))
    check_metadata(metadata, name, str(version))
    if given.release:
        check_release(metadata)
    wheel = tagged(wheel, libraries)
    for path in (archive, wheel):
        print(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB")
    if not given.no_install:
        print(f"The README's example, in an empty environment:\n{try_out(wheel, native=bool(libraries))}", end="")


if __name__ == "__main__":
    main()
