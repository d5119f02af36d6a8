"""A script for plain submitit, without this project; it prints a line of JSON for each job."""

import json
import sys
import time

import submitit


def add(a, b):
    print(f"adding {a} and {b}")
    print("to the error stream", file=sys.stderr)
    return a + b


def summed():
    import torch
    import torch.distributed as dist

    place = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    dist.init_process_group("gloo")
    total = torch.tensor([place.rank + 1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [total.item(), place.local_rank]


def meet(executor):
    """Return a job of `summed` whose port was free.

    submitit computes MASTER_PORT from the job's id and keeps no socket, so the port may be another
    process's. Another job has another port.
    """
    for _ in range(4):
        job = executor.submit(summed)
        if "EADDRINUSE" not in str(job.task(0).exception()):
            break
    return job


def fail():
    raise ValueError("nothing can be done")


class Count:
    """Count up to a number; the count survives a preemption."""

    def __init__(self, end):
        self.end, self.done, self.calls = end, 0, 0

    def __call__(self):
        self.calls += 1
        print("at work", flush=True)
        while self.done < self.end:
            time.sleep(0.1)
            self.done += 1
        return [self.done, self.calls, submitit.JobEnvironment().global_rank]

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)


class Unsaved(Count):
    def checkpoint(self):
        raise OSError("no room for a checkpoint")


def say(**found):
    print(json.dumps(found), flush=True)


def wait_for(condition):
    while not condition():
        time.sleep(0.3)


def at_work(job):
    """Wait until both of a job's ranks are: submitit gives the output of all ranks as one text."""
    wait_for(lambda: (job.stdout() or "").count("at work") == 2)


def ended(job):
    wait_for(lambda: job.get_info(mode="force")["State"] not in ("RUNNING", "PENDING", "UNKNOWN"))
    return job.state


def main(folder):
    executor = submitit.AutoExecutor(folder=folder)
    executor.update_parameters(timeout_min=5, nodes=1, tasks_per_node=1, name="array")
    jobs = executor.map_array(add, range(3), range(3))
    say(results=[job.result() for job in jobs], states=[ended(job) for job in jobs])
    say(stdout=jobs[2].stdout(), stderr=jobs[2].stderr(), path=str(jobs[2].paths.stdout))
    job = executor.submit(fail)
    say(error=str(job.exception()), state=ended(job))
    executor.update_parameters(nodes=2, tasks_per_node=2)
    job = meet(executor)
    say(results=job.results(), script=job.paths.submission_file.exists())
    executor.update_parameters(tasks_per_node=1)
    job = executor.submit(Count(60))
    at_work(job)
    job._interrupt()
    say(results=job.results(), state=ended(job))
    job = executor.submit(Count(6000))
    at_work(job)
    job.cancel()
    say(state=ended(job))
    job = executor.submit(Unsaved(6000))
    at_work(job)
    job._interrupt()
    say(error=str(job.task(0).exception()), state=ended(job))  # the other rank has no result
    job = executor.submit(Count(6000))
    job.cancel()  # before it has begun
    say(state=ended(job))


if __name__ == "__main__":
    main(sys.argv[1])
