"""The Slurm scripts: their launch lines run, with a srun and a scontrol of our own for Slurm's."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import documents
import pytest

SCRIPTS = sorted((documents.ROOT / "scripts/slurm").glob("*.sh"))
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
[ -n "$FAKE_SRUN" ] && exec bash -c "$FAKE_SRUN"
trap 'again=yes; kill -USR1 "${pids[@]}"' USR1
for ((SLURM_NODEID = 0; SLURM_NODEID < SLURM_NNODES; SLURM_NODEID++)); do
    export SLURM_NODEID
    "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    again=yes
    while [ $again = yes ]; do again=no; wait "$pid"; status=$?; done
    [ $status = 0 ] || exit $status
done
"""
SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && printf '127.0.0.1\\nelsewhere\\n'
[ "$1" = requeue ] && echo "requeued $2"
exit 0
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the root of the checkout, on a node of a job, with srun and scontrol."""
    for name in ("configs", "scripts", "train.py", "flowalign", "rewards", "teachers", "eval"):
        (tmp_path / name).symlink_to(documents.ROOT / name)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    virtual = Path(os.environ.get("VIRTUAL_ENV") or documents.ROOT / ".venv")
    own = {
        "PATH": f"{commands}:{virtual}/bin:{os.environ['PATH']}", "PYTHONPATH": str(documents.ROOT),
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "FLOWALIGN_ACCELERATE": "configs/accelerate/ddp_2cpu.yaml", "FAKE_SRUN": "",
    }  # fmt: skip
    for key, value in own.items():
        monkeypatch.setenv(key, value)
    return tmp_path


CONFIG = ["--config", "configs/tiny/teacher_ocr.yaml", "output=run", "evaluation=null"]
CONFIG += ["rollout.prompts=2", "rollout.group_size=2", "rollout.steps=3", "rollout.window=[0,1]"]


def updates(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row["update"] for row in map(json.loads, lines) if "grad_norm" in row]


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_two_processes_train_and_go_on_when_requeued(script: Path, node: Path, monkeypatch) -> None:
    """One node with two processes, or two launchers with one each; the second run resumes."""
    nodes = 2 if script.stem == "several_nodes" else 1
    monkeypatch.setenv("SLURM_NNODES", str(nodes))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(2 // nodes))
    for count in (1, 2)[: 3 - nodes]:  # the same lines restart both
        done = subprocess.run(
            [str(script), *CONFIG, "train.checkpoint_every=1", f"train.updates={count}"],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert updates(node / "run") == list(range(1, count + 1))
    states = (node / "run/checkpoints").rglob("rng_*.json")
    assert {path.stem for path in states} == {"rng_0", "rng_1"}  # a state of each process


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("step", "signalled", "requeued"),
    [
        ("trap 'exit 75' USR1; touch begun; while true; do sleep 0.1; done", True, True),
        ("trap '' USR1; touch begun; sleep 1; exit 0", True, False),  # it was done in time
        ("trap '' USR1; touch begun; sleep 1; exit 143", True, True),  # killed by the end
        ("touch begun; exit 75", False, True),  # train.max_minutes
        ("touch begun; exit 7", False, False),
    ],
)
def test_a_job_that_is_not_finished_is_requeued(
    script: Path, node: Path, monkeypatch, step: str, signalled: bool, requeued: bool
) -> None:
    monkeypatch.setenv("SLURM_NNODES", "1")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    monkeypatch.setenv("FAKE_SRUN", step)
    job = subprocess.Popen([str(script), "--config", "x"], stdout=subprocess.PIPE, text=True)
    while not (node / "begun").exists():
        assert job.poll() is None
        time.sleep(0.02)
    if signalled:
        os.kill(job.pid, signal.SIGUSR1)
    shown, _ = job.communicate(timeout=60)
    assert (f"requeued {os.getpid()}" in shown) == requeued
    assert (job.returncode != 0) == (step.split()[-1] != "0")  # that of srun


@pytest.mark.parametrize(
    ("name", "nodes", "processes"),
    [
        pytest.param("one_node", 1, 1, marks=pytest.mark.slow),
        pytest.param("one_node", 1, 2, marks=pytest.mark.long),
        pytest.param("several_nodes", 2, 2, marks=pytest.mark.long),
    ],
)
def test_a_job_out_of_time_saves_and_is_requeued(
    node: Path, monkeypatch: pytest.MonkeyPatch, name: str, nodes: int, processes: int
) -> None:
    """SIGUSR1 passes the script, the launchers and the processes; the status comes back."""
    monkeypatch.setenv("SLURM_NNODES", str(nodes))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(processes // nodes))
    script = documents.ROOT / f"scripts/slurm/{name}.sh"
    job = subprocess.Popen(
        [str(script), *CONFIG, "train.checkpoint_every=100", "train.updates=500"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while not (node / "run/metrics.jsonl").exists():
        assert job.poll() is None
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGUSR1)
    shown, _ = job.communicate(timeout=120)
    assert job.returncode == 75 and f"requeued {os.getpid()}" in shown, shown
    (saved,) = (node / "run/checkpoints").iterdir()
    done = int(saved.name.removeprefix("update_"))
    assert f"wrote checkpoint run/checkpoints/{saved.name}" in shown
    assert len(list(saved.glob("rng_*.json"))) == processes
    assert updates(node / "run") == list(range(1, done + 1))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_job_without_gpus_is_refused(script: Path, node: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_NNODES", "1")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    done = subprocess.run([str(script)], capture_output=True, text=True)
    assert done.returncode != 0 and "--gpus-per-node" in done.stderr
