"""Two processes train what one does, and a run outlives each of them: as `torchrun` starts and ends them.

Run: pytest tests/test_workers.py (about 20 s), and with -m slow for those that are killed (a minute).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from small_run import STEPS_PER_EPOCH, as_flags, small, write_pictures

from train import runs, workers
from train.__main__ import main
from train.runs import Run, read_config, read_metrics, read_status
from train.workers import Workers

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
# All that is drawn for a sample of the global batch; dropout alone is drawn by process.
DRAWN = {
    "augment": "randaugment", "cutmix": 0.6, "random_erasing": 0.5, "stochastic_depth": 0.3,
    "keep_patches": 0.5, "full_from": 0.7, "clip": 1.0,
}  # fmt: skip
LONG_EPOCHS = 25
in_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers in /proc")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATCHLIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_pictures(tmp_path_factory.mktemp("data") / "pictures")


class Started:
    """Two workers and the agent that watches them, as a person starts them in a terminal of their own."""

    def __init__(self, run: Run, *words: str):
        self.run, self.log = run, run.root.with_suffix(".txt")
        with self.log.open("wb") as log:
            self.agent = subprocess.Popen(
                [*TORCHRUN, "train", "run", *words, "--out", str(run.root)],
                cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_) -> None:
        if self.agent.poll() is None:
            os.killpg(self.agent.pid, signal.SIGKILL)
        self.agent.wait()

    def ended(self, seconds: float = 100) -> int:
        """The agent's exit code. Well below the 30 minutes after which gloo gives a silent worker up."""
        return self.agent.wait(seconds)

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + 100
        while time.monotonic() < end:
            rows = read_metrics(self.run)
            if rows and rows[-1]["step"] >= step:
                return
            assert self.agent.poll() is None, self.log.read_text()
            time.sleep(0.02)
        pytest.fail(f"no step {step}: {self.log.read_text()}")

    def signal(self, rank: int, number: int) -> None:
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
        environments = {int(child): Path(f"/proc/{child}/environ").read_bytes() for child in children}
        (pid,) = [p for p, said in environments.items() if f"\0RANK={rank}\0".encode() in b"\0" + said]
        os.kill(pid, number)


def steps_of(run: Run) -> list[int]:
    return [row["step"] for row in read_metrics(run)]


def state_in_file(run: Run) -> dict:
    return json.loads(run.status_file.read_text())


def long(pictures: Path) -> list[str]:
    """Long enough to be met under way: some seconds of steps."""
    return as_flags(small(pictures, epochs=LONG_EPOCHS, evaluations=1, checkpoint_steps=10, **DRAWN))


def finish(run: Run, resume, step: int) -> None:
    """Resumed, a run ends as if it had not been broken off at `step`; every step is told once."""
    last = LONG_EPOCHS * STEPS_PER_EPOCH
    assert 0 < step < last, "it was to be met under way"
    resume()
    said = run.log_file.read_text()
    resumed_at = int(said.rpartition("Resuming from step ")[2].split("\n")[0])
    assert step - 10 <= resumed_at <= step + 1  # a line may lag behind its checkpoint
    assert resumed_at > 0
    status = read_status(run)
    assert (status.state, status.step, status.progress) == ("finished", last, 1.0)
    assert steps_of(run) == list(range(1, last + 1))


# --- two as one -------------------------------------------------------------------------------------------


def test_two_processes_train_what_one_does(pictures, tmp_path):
    """Weights, average and all that is remembered within float error, which Muon makes ten times as large."""
    config = small(pictures, seed=3, **DRAWN)
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    with Started(two, *as_flags(config)) as started:
        assert main(["run", *as_flags(config), "--out", str(one.root)]) == 0
        assert started.ended() == 0, started.log.read_text()

    last = 2 * STEPS_PER_EPOCH
    assert steps_of(one) == steps_of(two) == list(range(1, last + 1))
    assert [run["resolved"]["processes"] for run in map(read_config, (one, two))] == [1, 2]
    said = two.log_file.read_text()
    assert said.count("Total parameters") == said.count(f"Finished at step {last}") == 1
    assert started.log.read_text().count(f"Finished at step {last}") == 1
    for name in ("resume", "last"):
        alone, shared = (load_file(run.checkpoint(name)) for run in (one, two))
        assert alone.keys() == shared.keys()
        for key, expected in alone.items():
            np.testing.assert_allclose(
                shared[key], expected, rtol=0, atol=5e-5 * abs(expected).max(), err_msg=key
            )
    for key in ("loss", "lr", "epoch"):
        expected = [row[key] for row in read_metrics(one)]
        np.testing.assert_allclose([row[key] for row in read_metrics(two)], expected, rtol=1e-5)


@pytest.mark.parametrize("of_several", [True, False])
def test_a_worker_leaves_with_its_code_and_all_it_said_without_a_teardown_that_could_abort(of_several):
    code = (
        "import atexit; from train.workers import leave; "
        "atexit.register(print, 'taken down'); print('said'); leave(3)"
    )
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = alone | ({"RANK": "0", "WORLD_SIZE": "2"} if of_several else {})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    assert done.returncode == 3
    assert done.stdout.split(b"\n")[:-1] == ([b"said"] if of_several else [b"said", b"taken down"])


# --- killed, stopped --------------------------------------------------------------------------------------


@pytest.mark.slow
@in_proc
def test_a_killed_worker_ends_the_run_with_a_reason_and_one_process_goes_on(pictures, tmp_path):
    run = Run(tmp_path / "run")
    with Started(run, *long(pictures)) as started:
        started.wait_for_step(20)
        started.signal(1, signal.SIGKILL)
        assert started.ended(25) == 1
    status = read_status(run)
    assert status.state == "failed"
    assert status.reason.startswith(f"a worker was lost at step {status.step}; resume to go on")
    assert (
        run.log_file.read_text().splitlines()[-1].endswith(f"Failed at step {status.step}: {status.reason}")
    )
    finish(run, lambda: main(["run", "--resume", "--out", str(run.root)]), status.step)


@pytest.mark.slow
@in_proc
def test_where_the_first_is_killed_the_run_has_vanished_and_two_go_on(pictures, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    with Started(run, *long(pictures)) as started:
        started.wait_for_step(20)
        started.signal(0, signal.SIGKILL)
        assert started.ended(25) == 1  # the other one does not wait for it
    assert state_in_file(run)["state"] == "running"  # nobody is left to say otherwise
    monkeypatch.setattr(runs, "VANISHED_SECONDS", 0.0)
    status = read_status(run)
    assert (status.state, "--resume goes on" in status.reason) == ("vanished", True)
    step = steps_of(run)[-1]

    def resume() -> None:
        with Started(run, "--resume") as again:
            assert again.ended() == 0, again.log.read_text()

    monkeypatch.undo()
    finish(run, resume, step)


@pytest.mark.slow
@in_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "Ctrl-C"])
def test_whoever_stops_the_agent_stops_the_run_with_a_checkpoint(pictures, tmp_path, number):
    """SIGTERM reaches the agent, which hands it on; Ctrl-C all three, and the agent hands it on once more."""
    run = Run(tmp_path / "run")
    with Started(run, *long(pictures)) as started:
        started.wait_for_step(20)
        if number == signal.SIGINT:
            started.signal(1, number)  # no order is promised, and this is the worst
            time.sleep(0.2)
            os.killpg(started.agent.pid, number)
        else:
            started.agent.send_signal(number)
        started.ended(25)
    status = read_status(run)
    assert (status.state, status.reason) == ("stopped", "stopped as asked"), started.log.read_text()
    finish(run, lambda: main(["run", "--resume", "--out", str(run.root)]), steps_of(run)[-1])


# --- who joins whom ---------------------------------------------------------------------------------------


def test_alone_nothing_is_asked_of_anybody(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = Workers.start("cpu")
    assert alone == Workers()
    assert (alone.is_first, alone.count) == (True, 1)
    net = torch.nn.Linear(2, 2)
    assert alone.wrap(net) is net
    assert alone.agree(0.25, 1.0) == [0.25, 1.0]
    assert alone.mean(torch.tensor(3.0)) == 3.0
    alone.end()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("asked", "has_gpu", "backend"),
    [("auto", True, "nccl"), ("cuda", True, "nccl"), ("auto", False, "gloo"), ("cpu", True, "gloo")],
)
def test_gpus_talk_over_nccl_and_decide_over_gloo(monkeypatch, asked, has_gpu, backend):
    """What `auto` comes to counts, not the word. No group here may give up on a paused run within hours."""
    joined, on = [], []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * has_gpu)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", on.append)
    monkeypatch.setattr(workers.dist, "init_process_group", lambda kind, **o: joined.append((kind, o)))
    monkeypatch.setattr(workers.dist, "new_group", lambda backend, **o: joined.append((backend, o)))
    monkeypatch.setattr(workers.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(workers.dist, "get_world_size", lambda: 2)
    found = Workers.start(asked)
    assert (found.rank, found.count, found.local_rank, found.is_first) == (1, 2, 1, False)
    assert [kind for kind, _ in joined] == (["nccl", "gloo"] if backend == "nccl" else ["gloo"])
    assert joined[-1][1]["timeout"].days >= 7
    assert on == ([1] if backend == "nccl" else [])


def test_a_device_that_is_not_here_is_one_sentence(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="is not a device"):
        Workers.start("quantum")
    assert not dist.is_initialized()
