"""Jobs of a study: done once, continued where they stopped, with analyses that see what was trained_runs."""

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from studies.runs import Job, best_rate, describe_run, final_jobs, job_name, lock, rate_jobs, read_record, run_jobs

from eigengrain.errors import FileError
from eigengrain.training import train
from studies import runs
from training.small_run import colours, small

ROOT = Path(__file__).parents[2]


def run_two(module, *words):
    """The standard output of two processes of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module, *words]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "studies")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def drawn(monkeypatch):
    def sources(data, seed):
        return colours(val=6 if data.val_fraction else 0)

    monkeypatch.setattr(runs, "open_sources", sources)


def two(epochs=1):
    config = small("unused", epochs=epochs)
    return [Job(f"seed{seed}", replace(config, seed=seed), ("spectrum", "subset-accuracy")) for seed in (0, 1)]


def test_each_job_is_done_once(drawn, trained_runs, tmp_path):
    first = run_jobs(two, tmp_path)
    assert trained_runs == ["seed0", "seed1"]
    assert run_jobs(two, tmp_path) == first
    assert trained_runs == ["seed0", "seed1"]
    (tmp_path / "records" / "seed1.json").unlink()
    again = run_jobs(two, tmp_path)
    assert again["seed1"]["analyses"] == first["seed1"]["analyses"]


def test_a_model_that_others_start_from_is_kept_and_made_again_where_it_is_gone(drawn, trained_runs, tmp_path):
    first, second = two()
    planned = [replace(first, kept=True), second]
    outcome = run_jobs(lambda: planned, tmp_path, keep_models=False)
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["seed0"]
    # on another machine, with the records alone
    again = run_jobs(lambda: planned, tmp_path / "other", more_records=[tmp_path / "records"], keep_models=False)
    assert trained_runs == ["seed0", "seed1", "seed0"]
    assert (tmp_path / "other" / "runs" / "seed0" / "model").is_dir()
    assert again["seed0"]["scores"] == outcome["seed0"]["scores"]
    wild = replace(first.config, optimiser=replace(first.config.optimiser, lr=1e30))
    lost = [replace(planned[0], name="lost", config=wild)]
    assert run_jobs(lambda: lost, tmp_path)["lost"]["scores"] == {}  # there is no model, and there would be none again


def test_a_job_of_another_process_is_waited_for(drawn, trained_runs, tmp_path, monkeypatch):
    """The other one holds the first job, and ends it while this one waits."""
    other = run_jobs(lambda: two()[:1], tmp_path / "other")
    trained_runs.clear()
    with ExitStack() as stack:
        assert stack.enter_context(lock(tmp_path, "seed0"))

        def the_other_ends(seconds):
            runs.write_record(other["seed0"], tmp_path)
            stack.close()

        monkeypatch.setattr(runs.time, "sleep", the_other_ends)
        outcome = run_jobs(two, tmp_path)
    assert trained_runs == ["seed1"]
    assert outcome["seed0"] == other["seed0"]


def test_two_processes_share_a_study(tmp_path):
    """Both come to the same end, and nothing is trained twice."""
    words = [sys.executable, "-m", "studies", "spectrum", "--scale", "smoke", "--out", str(tmp_path)]
    words += ["--device", "cpu", "--datasets", "cub", "--heads", "mpncov"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    begun = [line for _, errors in printed for line in errors.splitlines() if " of " in line and "run " in line]
    assert len(begun) == len(list((tmp_path / "records").iterdir())) > 2
    assert printed[0][0] == printed[1][0]


def test_processes_of_torchrun_share_every_run_and_stop_together(tmp_path):
    """The model goes when both have analysed it, both come to the same end, and a limit of one ends both."""
    printed = run_two("two_clocks", str(tmp_path))
    assert printed.count("written to") == 2
    records = [json.loads(file.read_text()) for file in (tmp_path / "study" / "records").iterdir()]
    assert sum("spectrum" in record["analyses"] for record in records) == 1
    assert not list((tmp_path / "study" / "runs").iterdir())
    assert printed.splitlines().count("ended with ['seed0']") == 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_folder_on_a_file_system_without_locks(monkeypatch, tmp_path, number):
    fcntl = pytest.importorskip("fcntl")

    def refused(file, operation):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    with lock(tmp_path, "seed0") as mine:
        assert mine


def test_records_hold_what_was_measured_and_no_place_of_this_machine(drawn, tmp_path):
    record = run_jobs(lambda: two(epochs=2)[:1], tmp_path)["seed0"]
    text = (tmp_path / "records" / "seed0.json").read_text()
    assert json.loads(text) == record
    assert str(tmp_path) not in text
    assert len(record["epochs"]) == 2
    assert record["epochs"][-1]["test_top1"] == pytest.approx(record["scores"]["test_top1"], abs=1e-4)
    assert record["analyses"]["subset-accuracy"]["all"]["top1"] == pytest.approx(record["scores"]["test_top1"])
    spectrum = record["analyses"]["spectrum"]
    assert (spectrum["images"], spectrum["channels"]) == (10, 3)
    assert sum(spectrum["histogram"]) == 30
    assert spectrum["log10_condition"] == sorted(spectrum["log10_condition"])


def test_an_interrupted_study_goes_on(drawn, trained_runs, tmp_path, monkeypatch):
    real = runs.train

    def stopped(config, sources):
        if config.out.endswith("seed1"):
            raise KeyboardInterrupt
        return real(config, sources)

    monkeypatch.setattr(runs, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(two, tmp_path)
    monkeypatch.setattr(runs, "train", real)
    assert set(run_jobs(two, tmp_path)) == {"seed0", "seed1"}
    assert trained_runs == ["seed0", "seed1"]


def test_a_training_whose_record_finds_no_room_is_not_lost(drawn, tmp_path, monkeypatch):
    real, steps = runs.write_record, []

    def full(record, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runs, "write_record", full)
    with pytest.raises(OSError, match="No space left"):
        run_jobs(lambda: two()[:1], tmp_path)
    monkeypatch.setattr(runs, "write_record", real)
    monkeypatch.setattr(runs, "train", lambda config, sources: train(config, sources, lambda *step: steps.append(step)))
    assert run_jobs(lambda: two()[:1], tmp_path)["seed0"]["scores"]
    assert steps == []
    assert not list((tmp_path / "runs").rglob("*.pt"))


def test_a_record_of_other_options_is_not_taken_for_this_one(drawn, tmp_path):
    run_jobs(lambda: two()[:1], tmp_path)
    with pytest.raises(FileError) as error:
        run_jobs(lambda: two(epochs=2)[:1], tmp_path)
    assert error.value.path.name == "seed0.json"


PARTS = ("config", "scores", "seconds", "epochs", "environment", "analyses")


def parts_of(config, scores):
    return dict(zip(PARTS, (config, scores, 1.0, [], {}, {}), strict=True))


@pytest.mark.parametrize("part", [*PARTS, "half", "list", "text"])
def test_a_part_of_a_record_is_refused_by_its_name(part, tmp_path):
    job, path = two()[0], tmp_path / "seed0.json"
    whole = parts_of(describe_run(job.config), {})
    path.write_text(json.dumps(whole))
    assert read_record([tmp_path], job) == whole
    texts = {"half": json.dumps(whole)[:100], "list": "[1]", "text": json.dumps(" ".join(PARTS))}
    without = {key: value for key, value in whole.items() if key != part}
    for text in (texts.get(part) or json.dumps(without), texts.get(part) or json.dumps({**without, part: None})):
        path.write_text(text)
        with pytest.raises(FileError) as error:
            read_record([tmp_path], job)
        assert error.value.path == path
        time.sleep(0.01)  # a file is read again when it has changed


@pytest.mark.parametrize("scores", [{"val_top1": 1.0}, {"test_top1": 1.0, "val_top1": "80"}])
def test_scores_of_a_record_are_numbers(scores, tmp_path):
    job, path = two()[0], tmp_path / "seed0.json"
    path.write_text(json.dumps(parts_of(describe_run(job.config), scores)))
    with pytest.raises(FileError) as error:
        read_record([tmp_path], job)
    assert error.value.path == path


def test_a_record_of_other_options_from_another_folder_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    path = tmp_path / "theirs" / "seed0.json"
    path.write_text(json.dumps(parts_of({}, {})))
    with pytest.raises(FileError) as error:
        read_record([tmp_path / "ours", tmp_path / "theirs"], two()[0])
    assert error.value.path == path


def test_a_training_that_diverges_is_a_result_and_the_others_go_on(drawn, trained_runs, tmp_path):
    first, second = two()
    wild = replace(first.config, optimiser=replace(first.config.optimiser, lr=1e30))
    jobs_of_it = [replace(first, config=wild), second]
    outcome = run_jobs(lambda: jobs_of_it, tmp_path)
    assert outcome["seed0"]["diverged"].endswith("in epoch 1 at batch 2 of 5")
    assert (outcome["seed0"]["scores"], outcome["seed0"]["epoch"], outcome["seed0"]["analyses"]) == ({}, None, {})
    assert outcome["seed1"]["scores"]
    assert run_jobs(lambda: jobs_of_it, tmp_path) == outcome
    assert trained_runs == ["seed0", "seed1"]


def test_no_job_begins_that_would_end_too_late(drawn, trained_runs, tmp_path, monkeypatch):
    """How long one takes is not known before the first."""
    real = runs.write_record
    monkeypatch.setattr(runs, "write_record", lambda record, folder: real(record | {"seconds": 1000.0}, folder))
    assert set(run_jobs(two, tmp_path, seconds=600)) == {"seed0"}


def test_the_rate_with_the_best_validation_accuracy_is_trained_on_everything(drawn, tmp_path):
    config = small("unused", epochs=1)
    tried = rate_jobs(config, (1, 5))
    assert [job.config.data.val_fraction for job in tried] == [0.1, 0.1]
    assert best_rate(tried, {}) is None
    scores = {tried[0].name: 50.0, tried[1].name: 60.0}
    records = {name: {"scores": {"val_top1": score}} for name, score in scores.items()}
    rate = best_rate(tried, records)
    assert rate == 5
    records[tried[0].name]["scores"]["val_top1"] = 60.0
    assert best_rate(tried, records) == 1
    records[tried[0].name]["scores"] = {}  # it diverged
    assert best_rate(tried, records) == 5
    last = final_jobs(config, rate, seeds=(0, 1), analyses=("spectrum",))
    assert [(job.config.seed, job.analyses) for job in last] == [(0, ("spectrum",)), (1, ())]
    assert all(not job.config.data.val_fraction and job.config.optimiser.classifier_lr_scale == 5 for job in last)
    names = [job_name(job.config) for job in (*tried, *last)]
    assert len(set(names)) == 4
    record = run_jobs(lambda: tried[:1], tmp_path)[tried[0].name]
    assert 0 <= record["scores"]["val_top1"] <= 100
