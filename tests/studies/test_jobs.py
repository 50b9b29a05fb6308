"""Jobs of a study: done once, continued where they stopped, with analyses that see what was trained_runs."""

import errno
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
from studies.comparison import best_rate, final_jobs, job_name, rate_jobs
from studies.jobs import Job, described, read_record, run_jobs

from eigengrain.training import train
from studies import claims, jobs
from training.small_run import colours, small
from training.test_distributed import run_two, said


@pytest.fixture
def drawn(monkeypatch):
    def sources(data, seed):
        return colours(val=6 if data.val_fraction else 0)

    monkeypatch.setattr(jobs, "open_sources", sources)


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
    found = run_jobs(lambda: planned, tmp_path, keep_models=False)
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["seed0"]
    # on another machine, with the records alone
    again = run_jobs(lambda: planned, tmp_path / "other", places=[tmp_path / "records"], keep_models=False)
    assert trained_runs == ["seed0", "seed1", "seed0"]
    assert (tmp_path / "other" / "runs" / "seed0" / "model").is_dir()
    assert again["seed0"]["scores"] == found["seed0"]["scores"]
    wild = replace(first.config, optimiser=replace(first.config.optimiser, lr=1e30))
    lost = [replace(planned[0], name="lost", config=wild)]
    assert run_jobs(lambda: lost, tmp_path)["lost"]["scores"] == {}  # there is no model, and there would be none again


def test_a_job_of_another_process_is_waited_for(drawn, trained_runs, tmp_path, monkeypatch):
    """The other one holds the first job, and ends it while this one waits."""
    other = run_jobs(lambda: two()[:1], tmp_path / "other")
    trained_runs.clear()
    with ExitStack() as stack:
        assert stack.enter_context(claims.claimed(tmp_path, "seed0"))

        def the_other_ends(seconds):
            jobs.write_record(other["seed0"], tmp_path)
            stack.close()

        monkeypatch.setattr(jobs.time, "sleep", the_other_ends)
        found = run_jobs(two, tmp_path)
    assert trained_runs == ["seed1"]
    assert found["seed0"] == other["seed0"]


def test_two_processes_share_a_study(tmp_path):
    """Both come to the same end, and nothing is trained twice."""
    words = [sys.executable, "-m", "eigengrain.cli.main", "study", "spectrum", "--scale", "smoke", "--out", str(tmp_path)]
    words += ["--device", "cpu", "--datasets", "cub"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    begun = [line for _, errors in said for line in errors.splitlines() if " of " in line and "run " in line]
    assert len(begun) == len(list((tmp_path / "records").iterdir())) > 2
    assert said[0][0] == said[1][0]


def test_processes_of_torchrun_share_every_run(tmp_path):
    """The model goes when both have analysed it, and both come to the same end."""
    words = ["study", "spectrum", "--scale", "smoke", "--out", str(tmp_path), "--device", "cpu", "--datasets", "cub"]
    out, _ = run_two("eigengrain.cli.main", *words, "--drop_models")
    assert out.count("written to") == 2
    records = [json.loads(file.read_text()) for file in (tmp_path / "records").iterdir()]
    assert sum("spectrum" in record["analyses"] for record in records) == 2
    assert not list((tmp_path / "runs").iterdir())


def test_processes_of_torchrun_stop_together(tmp_path):
    out, _ = run_two("studies.two_clocks", str(tmp_path))
    assert said(out) == ["['seed0']"] * 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_folder_on_a_file_system_without_locks(monkeypatch, tmp_path, number):
    fcntl = pytest.importorskip("fcntl")

    def refused(file, operation):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    with claims.claimed(tmp_path, "seed0") as mine:
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
    real = jobs.train

    def stopped(config, sources):
        if config.out.endswith("seed1"):
            raise KeyboardInterrupt
        return real(config, sources)

    monkeypatch.setattr(jobs, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(two, tmp_path)
    monkeypatch.setattr(jobs, "train", real)
    assert set(run_jobs(two, tmp_path)) == {"seed0", "seed1"}
    assert trained_runs == ["seed0", "seed1"]


def test_a_training_whose_record_finds_no_room_is_not_lost(drawn, tmp_path, monkeypatch):
    real, steps = jobs.write_record, []

    def full(record, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jobs, "write_record", full)
    with pytest.raises(OSError, match="No space left"):
        run_jobs(lambda: two()[:1], tmp_path)
    monkeypatch.setattr(jobs, "write_record", real)
    monkeypatch.setattr(jobs, "train", lambda config, sources: train(config, sources, lambda *step: steps.append(step)))
    assert run_jobs(lambda: two()[:1], tmp_path)["seed0"]["scores"]
    assert steps == []
    assert not list((tmp_path / "runs").rglob("*.pt"))


def test_a_record_of_other_options_is_not_taken_for_this_one(drawn, tmp_path):
    run_jobs(lambda: two()[:1], tmp_path)
    with pytest.raises(ValueError, match=r"seed0.json is of a run with other options \(epochs\)"):
        run_jobs(lambda: two(epochs=2)[:1], tmp_path)


PARTS = ("config", "scores", "seconds", "epochs", "environment", "analyses")


def parts_of(config, scores):
    return dict(zip(PARTS, (config, scores, 1.0, [], {}, {}), strict=True))


@pytest.mark.parametrize("part", [*PARTS, "half", "list", "text"])
def test_a_part_of_a_record_is_refused_by_its_name(part, tmp_path):
    job, path = two()[0], tmp_path / "seed0.json"
    whole = parts_of(described(job.config), {})
    path.write_text(json.dumps(whole))
    assert read_record([tmp_path], job) == whole
    texts = {"half": json.dumps(whole)[:100], "list": "[1]", "text": json.dumps(" ".join(PARTS))}
    without = {key: value for key, value in whole.items() if key != part}
    for text in (texts.get(part) or json.dumps(without), texts.get(part) or json.dumps({**without, part: None})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"seed0\.json is not a record of a run \(.*\): remove it"):
            read_record([tmp_path], job)


@pytest.mark.parametrize(
    ("scores", "said"), [({"val_top1": 1.0}, "number test_top1"), ({"test_top1": 1.0, "val_top1": "80"}, "number val_top1")]
)
def test_scores_of_a_record_are_numbers(scores, said, tmp_path):
    job, path = two()[0], tmp_path / "seed0.json"
    path.write_text(json.dumps(parts_of(described(job.config), scores)))
    with pytest.raises(ValueError, match=rf"seed0\.json is not a record of a run \(it has no {said}\): remove it"):
        read_record([tmp_path], job)


def test_a_record_of_other_options_from_elsewhere_names_the_option_that_brought_it(tmp_path):
    job = two()[0]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "seed0.json").write_text(json.dumps(parts_of({}, {})))
    with pytest.raises(ValueError, match=r"or choose another --records$"):
        read_record([tmp_path / "ours", tmp_path / "theirs"], job)
    with pytest.raises(ValueError, match=r"or choose another --out$"):
        read_record([tmp_path / "theirs"], job)


def test_a_training_that_diverges_is_a_result_and_the_others_go_on(drawn, trained_runs, tmp_path):
    first, second = two()
    wild = replace(first.config, optimiser=replace(first.config.optimiser, lr=1e30))
    jobs_of_it = [replace(first, config=wild), second]
    found = run_jobs(lambda: jobs_of_it, tmp_path)
    assert found["seed0"]["diverged"] == "features are NaN or infinite in epoch 1 at batch 2 of 5"
    assert (found["seed0"]["scores"], found["seed0"]["epoch"], found["seed0"]["analyses"]) == ({}, None, {})
    assert found["seed1"]["scores"]
    assert run_jobs(lambda: jobs_of_it, tmp_path) == found
    assert trained_runs == ["seed0", "seed1"]


def test_no_job_begins_that_would_end_too_late(drawn, trained_runs, tmp_path):
    assert set(run_jobs(two, tmp_path, seconds=1e-3)) == {"seed0"}  # how long one takes is not known before the first


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
