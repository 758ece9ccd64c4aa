"""``make gpu``: what has succeeded is not run again, what failed fails the call, and nothing begins too late."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import carried, kernels, learning, needs, paired
from benchmarks.gpu import ledger as ledgers
from benchmarks.gpu.ledger import REFUSED, Ledger, Step
from benchmarks.gpu.steps import PIECES, steps
from sparse_rl_lightning import __version__
from sparse_rl_lightning.errors import UserError
from tests.gpu_files import GPU_TESTS, in_no_group


def run_all(chosen: list[Step], ledger: Ledger, minutes: float) -> bool:
    return command.run_all(chosen, ledger, minutes, after_each=lambda: None)


def python(name: str, code: str, minutes: float = 1) -> Step:
    return Step(name, (sys.executable, "-c", code), minutes)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path, "cpu")


def test_what_has_succeeded_is_not_run_again(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But a build, which looks itself at what is there, and what has other sources now."""
    step = python("count", f"print('again', file=open({str(tmp_path / 'count')!r}, 'a'))")
    build = replace(python("build", f"print('again', file=open({str(tmp_path / 'builds')!r}, 'a'))"), is_needed=True)
    for _ in range(2):
        assert run_all([build, step], ledger, minutes=25)
    assert (tmp_path / "count").read_text() == "again\n"
    assert (tmp_path / "builds").read_text() == "again\n" * 2
    monkeypatch.setenv("SPARSE_RL_OVERLAP", "1")
    assert not Ledger(tmp_path, "cpu").is_done(step)
    monkeypatch.delenv("SPARSE_RL_OVERLAP")
    monkeypatch.setattr(ledgers, "fingerprint", lambda folders: "other sources")
    assert run_all([step], Ledger(tmp_path, "cpu"), minutes=25)
    assert (tmp_path / "count").read_text() == "again\n" * 2


def test_a_failure_fails_the_call_and_is_run_again(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = python("bad", "print('reason | why'); raise SystemExit(3)"), python("good", "print('fine')")
    absent = Step("absent", ("no-such-command",), 1)
    endless = python("endless", "while True: pass", minutes=0.01)
    assert not run_all([bad, good, absent, endless], ledger, minutes=25)
    assert "reason | why" in capsys.readouterr().out
    page = ledger.page([bad, good, absent, endless, python("later", "")])
    assert re.search(r"\| bad \| FAILED \(3\) \| [\d.]+ \| [\d-]+ \| reason \\\| why \|", page)
    assert re.search(r"\| good \| well \| .* \| fine \|", page)
    assert re.search(r"\| absent \| FAILED \(127\) \| .* \| no-such-command is not there \|", page)
    assert "| endless | STOPPED |" in page
    assert "| later | not run |  |  |  |" in page
    assert [ledger.is_done(step) for step in (bad, good, absent, endless)] == [False, True, False, False]


def test_nothing_begins_that_could_end_too_late(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    long, short = python("long", "", minutes=9), python("short", "", minutes=1)
    assert not run_all([long, short], ledger, minutes=8)
    assert "long: needs up to 9 minutes, 8.0 are left: run this again" in capsys.readouterr().out
    assert ledger.is_done(short)
    assert not ledger.is_done(long)
    assert run_all([replace(long, is_needed=True)], ledger, minutes=8), "what all need begins, however long it may take"


def test_steps_together_end_with_the_call(ledger: Ledger, tmp_path: Path) -> None:
    """Both wait for the other; what all need comes first, and what is too slow is stopped."""
    code = "import time; from pathlib import Path; Path({own!r}).touch()\n"
    code += "while not Path({other!r}).exists(): time.sleep(0.02)"
    files = [str(tmp_path / name) for name in ("first", "second")]
    both = [python(name, code.format(own=own, other=other)) for name, own, other in
            zip(("one", "two"), files, files[::-1], strict=True)]  # fmt: skip
    build = replace(python("build", f"open({str(tmp_path / 'built')!r}, 'x')"), is_needed=True)
    needs_build = python("late", f"open({str(tmp_path / 'built')!r})")
    ended: list[object] = []
    chosen = [*both, needs_build, build]
    assert command.run_all(chosen, ledger, 2, after_each=lambda: ended.append(1), together=True)
    assert len(ended) == 4
    endless = python("endless", "while True: pass", minutes=9)
    assert not command.run_all([endless], ledger, 0.02, after_each=lambda: None, together=True)
    assert ledger.read(endless)["status"] == ledgers.STOPPED


def test_nothing_is_run_behind_a_build_that_failed(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Step("build: kernels", (sys.executable, "-c", "raise SystemExit(2)"), 1, is_needed=True)
    later = python("later", "print('run')")
    assert not run_all([broken, later], ledger, minutes=25)
    assert "build: kernels: all other steps need it, so none of them is run." in capsys.readouterr().out
    assert ledger.read(later) == {}


def test_what_a_machine_refuses_is_told_and_no_failure(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    words = "========= Error: Device not supported. Please refer to the list"
    code = f"print({words!r}); print('later line'); raise SystemExit(STATUS)"
    refused, fine = (
        Step(name, (sys.executable, "-c", code.replace("STATUS", status)), 1, refusals=("Device not supported",))
        for name, status in (("refused", "1"), ("fine", "0"))
    )
    failed = Step("failed", (sys.executable, "-c", "raise SystemExit(9)"), 1, refusals=("Device not supported",))
    assert run_all([refused, fine], ledger, minutes=25)
    assert not run_all([failed], ledger, minutes=25)
    assert f"refused: left out, this machine does not let it run: {words}" in capsys.readouterr().out
    page = ledger.page([refused, fine, failed])
    assert f"| refused | left out: the machine refuses it | {ledger.read(refused)['seconds']} |" in page
    assert "| fine | well |" in page
    assert "| failed | FAILED (9) |" in page
    assert ledger.read(refused)["status"] == REFUSED


def test_a_step_is_stopped_with_all_that_it_started(ledger: Ledger, tmp_path: Path) -> None:
    child = f"import time; time.sleep(1.5); open({str(tmp_path / 'alive')!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert not run_all([python("slow", code, minutes=0.01)], ledger, minutes=25)
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


def test_results_are_one_file_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = python("one", "print('first')"), python("two", "raise SystemExit(3)")
    monkeypatch.setattr(command, "steps", lambda *args: [one, two])
    folders = {"--save": "pages", "--state": "state", "--pack": "out/gpu.tgz"}
    arguments = [word for option, name in folders.items() for word in (option, str(tmp_path / name))]
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", *arguments])
    packed, pack = [], Ledger.pack

    def names_of(file: Path) -> set[str]:
        with tarfile.open(file) as archive:
            return {member.name for member in archive if member.isfile()}

    def watched(self: Ledger, file: Path, pages: Path) -> None:
        pack(self, file, pages)
        packed.append(names_of(file))

    monkeypatch.setattr(Ledger, "pack", watched)
    with pytest.raises(SystemExit, match="True"):
        command.main()
    assert packed[0] == {"pages/gpu-run.md", "steps/one.json", "steps/one.log"}
    assert packed[-1] == packed[0] | {"steps/two.json", "steps/two.log"}


def test_every_call_of_the_page_fits_into_nine_minutes(tmp_path: Path) -> None:
    found = steps(PIECES, "cuda", tmp_path, tmp_path)
    assert len({step.name for step in found}) == len(found)
    for step in found:
        for word in step.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists()
    page = (ROOT / "benchmarks" / "gpu" / "README.md").read_text()
    calls = re.findall(r"benchmarks\.gpu ([a-z ]+?) (--together )?--minutes ([\d.]+)", page)
    assert {piece for pieces, _, _ in calls for piece in pieces.split()} == set(PIECES)
    assert sum(float(minutes) for _, _, minutes in calls[:3]) <= 12.3  # with its start and what is carried, 15
    for pieces, together, minutes in calls:
        assert pieces.split()[0] == "build"  # each stands alone
        assert float(minutes) < 9
        if together:  # all begin at once, and are stopped at the end
            continue
        wanted = [step for step in steps(pieces.split(), "cuda", tmp_path, tmp_path) if not step.is_needed]
        if calls.index((pieces, together, minutes)) < 3:  # all of them begin, behind a build with carried kernels
            assert sum(step.minutes for step in wanted) <= float(minutes) - 0.25
        assert max(step.minutes for step in wanted) <= float(minutes) - 1


def test_every_test_for_gpus_is_in_a_group() -> None:
    assert in_no_group(["tests/ops/test_draw.py", "tests/callbacks/test_dry_run.py"]) == []
    assert in_no_group(["tests/new/test_x.py", "tests/operations/test_y.py"]) == [
        "tests/new/test_x.py", "tests/operations/test_y.py",
    ]  # fmt: skip
    marked = re.compile(r"mark\.gpu|gpu: RealGPU|on_each_device|from tests\.native_cases|from native_cases")
    for paths in GPU_TESTS.values():
        for path in map(ROOT.joinpath, paths):
            files = [path] if path.is_file() else list(path.glob("*.py"))
            assert any(marked.search(file.read_text()) for file in files), path


def test_there_is_no_gpu_here_or_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="no nvidia-smi here, so no GPU: --rehearse runs the steps on the CPU"):
        Ledger(tmp_path, "cuda")


def test_missing_packages_are_named() -> None:
    found, missing = needs.needed_by(needs.wanted())
    assert missing == []
    assert {"torch", "jsonargparse", "typeshed-client", "datasets", "dill"} <= set(found)
    found, missing = needs.needed_by(["torch>=99", "no-such-package>=1", "jsonargparse[signatures]"])
    assert missing == ["no-such-package>=1", "torch>=99"]
    assert "typeshed-client" in found  # by the extra alone
    assert "typeshed-client" not in needs.needed_by(["jsonargparse"])[0]


def test_a_rise_is_judged_by_its_error() -> None:
    assert learning.rise(0.25, 0.25, 256) == 0
    assert learning.rise(0.2, 0.5, 100) == pytest.approx(0.3 / (0.16 / 100 + 0.25 / 100) ** 0.5)


def test_pieces_are_joined_in_order_and_those_of_another_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publishers(name: str, scratch: Path) -> Path:
        assert name == "qwen2.5-coder-0.5b-instruct"
        (scratch / "file").write_bytes(bytes(range(23)))
        return scratch / "file"

    monkeypatch.setattr(carried, "gguf_file", publishers)
    sizes = {name: -(-size // carried.MOST) for name, size in (("real", 98_362_432), ("math", 491_400_064))}
    assert sizes == {"real": 2, "math": 10}  # as the README says
    monkeypatch.setattr(carried, "MOST", 8)
    carried.split("math", tmp_path)
    assert [piece.stat().st_size for piece in sorted(tmp_path.glob("math-?/piece"))] == [8, 8, 7]
    with pytest.raises(UserError, match="is not the publisher's file"):
        carried.policy_of("math", tmp_path, "cuda")
    assert (tmp_path / "math.gguf").read_bytes() == bytes(range(23))
    assert not (tmp_path / "math-cuda").exists()


def test_two_checkouts_are_compared_round_by_round() -> None:
    before, now = [{"cell": 2.0}, {"cell": 9.0}, {"cell": 4.0}], [{"cell": 1.0}, {"cell": 3.0}, {"cell": 4.0}]
    assert paired.table_of(before, now, "").rows == [("cell", "4.000", "3.000", "2.000", "1.000", "3.000")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkout_is_paired_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--before", str(ROOT), "--device", "cpu", "--minutes", "0.1", "--save", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["paired", *arguments])
    paired.main()
    assert len(re.findall(r"\| \d+ sequences|, \d+ sequences \|", (tmp_path / "gpu-paired.md").read_text())) == 6


def test_kernels_of_other_sources_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried, package = tmp_path / "kernels", tmp_path / "package"
    package.mkdir()
    built = list[str]()

    def compile_for(folder: Path, archs: str) -> None:
        built.append(archs)
        folder.mkdir(exist_ok=True)
        (folder / "_cuda.abi3.so").write_text(f"made for {archs}")
        (folder / kernels.STAMP).write_text(kernels.sources())

    monkeypatch.setattr(kernels, "build", compile_for)
    monkeypatch.setattr(kernels, "ask_card", lambda what: "9.0")
    for _ in range(2):  # compiled once
        kernels.place(carried, package)
    assert built == ["90"]
    assert (package / "_cuda.abi3.so").read_text() == "made for 90"
    (carried / kernels.STAMP).write_text("of other sources")
    kernels.place(carried, package)
    assert built == ["90", "90"]
    assert kernels.is_current(carried)


@pytest.mark.parametrize("together", [[], ["--together"]], ids=["one", "together"])
def test_who_is_stopped_stops_its_step(together: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.ledger import Step
write = "import os, time; open({str(tmp_path / "step")!r}, 'w').write(str(os.getpid())); time.sleep(60)"
command.steps = lambda *arguments: [Step("endless", (sys.executable, "-c", write), 1)]
command.main()
"""
    arguments = (
        "build",
        "--rehearse",
        "--save",
        str(tmp_path / "pages"),
        "--state",
        str(tmp_path / "state"),
        *together,
    )
    call = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT)
    until = time.monotonic() + 30
    while not (tmp_path / "step").is_file() or not (own := (tmp_path / "step").read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    call.terminate()
    assert call.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(own), 0)


@pytest.fixture(scope="module")
def uninstalled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copy of the tree, and a Python that has every package but this one."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    for name in ("benchmarks", "configs", "cuda_ext", "exact_answers", "examples", "experiments", "sparse_rl_lightning",
                 "tests"):  # fmt: skip
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy2(ROOT / name, tree)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "sparse_rl_lightning" not in path.name and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    made = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (own,) = made.glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{site}\n")
    return tree, str(made / "bin" / "python")


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_every_page_is_written_where_nothing_is_installed(uninstalled: tuple[Path, str], tmp_path: Path) -> None:
    tree, python = uninstalled
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    asked = "import importlib.metadata as m; m.version('sparse-rl-lightning')"
    done = subprocess.run([python, "-c", asked], env=environment, cwd=tree, capture_output=True, text=True)
    assert "PackageNotFoundError" in done.stderr
    pages = tmp_path / "pages"
    wanted = steps(PIECES, "cpu", pages, tmp_path / "state")
    trained = [step.command[1:] for step in wanted if step.name in ("train", "real")]
    runs = [
        subprocess.Popen([python, *arguments], env=environment, cwd=tree, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for arguments in (*trained, ("-m", "tests.rehearsed_pages", str(pages)))
    ]  # fmt: skip
    for run in runs:
        text, _ = run.communicate()
        assert run.returncode == 0, text[-3000:]
    named = [step.command for step in wanted if "--save" in step.command and step.name != "math"]  # has lines alone
    assert len(list(pages.iterdir())) == len(named) == len(set(named))
    for page in pages.iterdir():
        assert f"sparse-rl-lightning {__version__}" in page.read_text()
        assert re.search(r"^\|.*\d", page.read_text(), re.MULTILINE), page


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_steps_run_in_a_rehearsal(uninstalled: tuple[Path, str], tmp_path: Path) -> None:
    tree, python = uninstalled
    where = ["--save", str(tmp_path / "pages"), "--state", str(tmp_path / "state")]
    run = [python, "-m", "benchmarks.gpu", "--rehearse", "--minutes", "60", *where]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(run, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "pages" / "gpu-run.md").read_text()
    assert page.startswith("# benchmarks.gpu\n\nA rehearsal on the CPU in toy sizes")
    assert "FAILED" not in page
    assert "not run" not in page
    assert {path.name for path in (tmp_path / "pages").iterdir()} >= {
        "gpu-run.md", "gpu-profile.md", "gpu-train.md", "gpu-real.md",
    }  # fmt: skip
