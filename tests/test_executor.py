"""Executors: every call once, in this process or in others, also when workers die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from curvlab.exceptions import SpecError
from curvlab.studies.executor import Process, Serial, Workers, place_of, run

DIE = "__import__('os')._exit(1)"


def test_serial_gives_each_result_before_it_starts_the_next_call():
    log: list[str] = []
    for done in run(lambda x: log.append(f"run {x}"), [1, 2], "serial"):
        log.append(f"took {done.argument}")
    assert log == ["run 1", "took 1", "run 2", "took 2"]


def test_an_exception_is_the_outcome_of_its_call_and_the_others_go_on():
    outcomes = list(run(lambda x: 1 / x, [1, 0, 2], "serial"))
    assert [done.result for done in outcomes] == [1.0, None, 0.5]
    assert isinstance(outcomes[1].error, ZeroDivisionError)


def test_processes_and_a_given_executor_give_the_results_of_serial():
    arguments = [f"{n}*{n}" for n in range(8)]
    expected = sorted(n * n for n in range(8))
    assert sorted(done.result for done in run(eval, arguments, "process[workers=2]")) == expected
    with ThreadPoolExecutor(2) as pool:
        assert sorted(done.result for done in run(eval, arguments, pool)) == expected
        assert pool.submit(int).result() == 0


def test_a_call_that_ends_its_workers_is_given_up_and_no_other_is_lost():
    outcomes = list(run(eval, ["1+1", DIE, "2+2", "3+3"], Process(workers=2)))
    assert sorted(done.argument for done in outcomes) == sorted(["1+1", DIE, "2+2", "3+3"])
    results = {done.argument: done.result for done in outcomes if done.error is None}
    assert results == {"1+1": 2, "2+2": 4, "3+3": 6}


def test_workers_stay_between_the_stages_of_a_study_and_end_with_it():
    identify = "__import__('os').getpid()"
    with Workers("process[workers=1]") as workers:
        before, after = ([done.result for done in workers.run(eval, [identify])] for _ in range(2))
        assert before == after
        (given_up,) = workers.run(eval, [DIE])
        assert given_up.error is not None
        assert [done.result for done in workers.run(eval, [identify])] != before
    with pytest.raises(ProcessLookupError):
        os.kill(before[0], 0)


def test_places_by_name():
    assert place_of("serial") == Serial()
    assert place_of("process[workers=3]") == Process(3)
    with pytest.raises(SpecError, match="at least one process"):
        place_of("process[workers=0]")


KILLED = """
import os, signal
from curvlab.studies.executor import Process
if __name__ == "__main__":
    pool = Process(workers=1).start()
    print(pool.submit(os.getpid).result(), flush=True)
    # PyDLL keeps the interpreter's lock, as the loading of a large module does: no thread of the worker runs.
    pool.submit(eval, "__import__('ctypes').PyDLL(None).sleep(60)")
    __import__("time").sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread of the worker has to run")
def test_a_worker_whose_parent_is_killed_ends_at_once_whatever_it_does(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(KILLED)
    started = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, check=False)
    worker = Path(f"/proc/{int(started.stdout)}/stat")
    deadline = time.monotonic() + 10
    while worker.exists() and worker.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
