"""Batches are the same for any number of workers and ranks, and resuming opens no skipped image."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time
import traceback
import warnings

import pytest
import torch

from data.batches import COUNT, images, same
from eigengrain.data import Batches, DeviceCache, ImageSet, make_loader
from eigengrain.data import workers as processes
from eigengrain.data.sampler import BatchSampler
from eigengrain.errors import ArgumentError, BatchError, ImageError


class Graph:
    """An object whose deletion is recorded; deleting a tensor of the device in a forked process would be an error."""

    def __init__(self, folder):
        self.folder, self.itself = folder, self

    def __del__(self):
        (self.folder / str(os.getpid())).touch()


class Collects(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        gc.collect()
        return gc.isenabled()


def test_workers_do_not_collect_the_garbage_of_their_parent(tmp_path):
    gc.disable()
    try:
        Graph(tmp_path)
        batches = iter(processes.Workers(Collects(), list, workers=1, batch_size=2))
        assert list(tmp_path.iterdir()) == []
        assert list(batches) == [[True, True], [True, True]]
        assert list(tmp_path.iterdir()) == []
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()
    gc.collect()
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_workers_survive_garbage_on_the_device():
    gc.disable()
    try:
        kept = [torch.zeros(1, device="cuda")]
        kept[0].record_stream(torch.cuda.Stream())  # so that deleting it calls CUDA
        kept.append(kept)
        del kept
        assert list(processes.Workers(Collects(), list, workers=2, batch_size=2)) == [[True, True], [True, True]]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "options"), [("imagenet", {}), ("timm", {"auto_augment": "rand-m9-mstd0.5", "reprob": 0.5})]
)
def test_workers_change_nothing(files, kind, options):
    single = make_loader(images(files, kind, **options), 4, train=True, seed=3)
    parallel = make_loader(images(files, kind, **options), 4, train=True, seed=3, workers=2)
    epochs = []
    for epoch in (0, 1, 5):  # the workers persist between the epochs
        single.set_epoch(epoch)
        parallel.set_epoch(epoch)
        epochs.append(list(single))
        assert same(epochs[-1], parallel)
        assert len(epochs[-1]) == len(single) == 5
    assert not same(epochs[0], epochs[1])
    next(iter(parallel))  # an epoch that is not finished has no effect on the next
    parallel.set_epoch(0)
    assert same(epochs[0], parallel)
    assert isinstance(single, Batches)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not report who sends a signal")
def test_workers_ignore_signals_to_all_processes(files):
    """A cluster, torchrun, timeout and Ctrl-C signal all processes; only the parent reacts."""
    whole = list(make_loader(images(files), 4, train=True, seed=3))
    before = set(multiprocessing.active_children())
    loader = make_loader(images(files), 4, train=True, seed=3, workers=2)
    batches = iter(loader)
    first = next(batches)
    workers = [worker for worker in multiprocessing.active_children() if worker not in before]
    for name in ("-TERM", "-INT", "-TERM"):
        subprocess.run(["kill", name, *(str(worker.pid) for worker in workers)], check=True)
    assert same(whole, [first, *batches])
    loader.set_epoch(0)
    assert same(whole, loader)
    assert all(worker.is_alive() for worker in workers)
    for worker in workers:
        worker.terminate()
        worker.join(10)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)


start_worker = processes._start_worker


def start_late(worker):
    time.sleep(0.3)
    start_worker(worker)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not report who sends a signal")
def test_workers_ignore_signals_while_they_start(files, monkeypatch):
    monkeypatch.setattr(processes, "_start_worker", start_late)
    before, mask = set(multiprocessing.active_children()), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    batches = iter(make_loader(images(files), 4, train=True, seed=3, workers=1))
    [worker] = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert same(make_loader(images(files), 4, train=True, seed=3), batches)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_no_more_workers_than_cores(files, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of more workers than cores
        loader = make_loader(images(files), 4, train=False, workers=9)
        assert sum(len(labels) for _, labels in loader) == len(loader.dataset)
    assert loader._batches._loader.num_workers == 1


def test_loading_does_not_use_the_global_generator(files):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(make_loader(images(files), 4, train=True))
    list(make_loader(images(files), 4, train=True, workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        sampler = BatchSampler(50, 10, train=True, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler.indices())

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
    assert all(sorted(order(seed, 1)) == list(range(50)) for seed in range(3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 23, 40])
def test_evaluation_sees_each_sample_once(world_size, batch_size):
    seen = []
    for rank in range(world_size):
        sampler = BatchSampler(COUNT, batch_size, train=False, rank=rank, world_size=world_size)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(len(batch) for batch in batches)
        seen += [index for batch in batches for index in batch]
    assert sorted(seen) == list(range(COUNT))


def test_ranks_share_the_batches_of_one_process(files):
    alone = make_loader(images(files), 6, train=True, seed=1)
    ranks = [make_loader(images(files), 6, train=True, seed=1, rank=rank, world_size=2) for rank in (0, 1)]
    for epoch in (0, 3):
        for loader in (alone, *ranks):
            loader.set_epoch(epoch)
        joined = [tuple(torch.cat(parts) for parts in zip(*both, strict=True)) for both in zip(*ranks, strict=True)]
        assert same(alone, joined)
        assert [len(loader) for loader in ranks] == [3, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_opens_no_skipped_image(files, tmp_path, workers):
    class Counted(ImageSet):
        def image(self, index):
            (tmp_path / f"opened-{index}").touch()
            return super().image(index)

    plain = images(files)
    counted = Counted("x", "train", plain.classes, plain.labels, files, plain.transform)
    whole = make_loader(plain, 5, train=True, seed=2)
    whole.set_epoch(4)
    loader = make_loader(counted, 5, train=True, seed=2, workers=workers)
    loader.set_epoch(4, start_batch=3)
    assert same(list(whole)[3:], loader)
    assert len(loader) == 4  # of the whole epoch
    opened = {int(file.name.split("-")[1]) for file in tmp_path.glob("opened-*")}
    assert opened == set(whole.sampler.indices()[15:20])
    loader.set_epoch(4, start_batch=4)
    assert list(loader) == []
    loader.set_epoch(4)
    assert same(whole, loader)


def test_labels_belong_to_images(files):
    loader = make_loader(images(files, train=False), 4, train=False)
    batches = list(loader)
    assert torch.cat([labels for _, labels in batches]).tolist() == [i % 3 for i in range(COUNT)]
    assert torch.equal(torch.cat([x for x, _ in batches])[17], images(files, train=False)[17][0])
    assert batches[0][1].dtype == torch.int64


@pytest.mark.parametrize(
    ("count", "options", "argument"),
    [
        (3, {"batch_size": 4, "train": True}, "batch_size"),
        (0, {"batch_size": 4, "train": False}, "count"),
        (9, {"batch_size": 0, "train": False}, "batch_size"),
        (9, {"batch_size": 3, "train": True, "seed": -1}, "seed"),
        (9, {"batch_size": 3, "train": True, "world_size": 2}, "batch_size"),
        (9, {"batch_size": 4, "train": True, "world_size": 2, "drop_last": False}, "batch_size"),
        (3, {"batch_size": 4, "train": True, "world_size": 2, "drop_last": False}, "batch_size"),
        (9, {"batch_size": 4, "train": True, "world_size": 2, "rank": 2}, "rank"),
    ],
)
def test_numbers_are_checked(count, options, argument):
    with pytest.raises(ArgumentError) as error:
        BatchSampler(count, **options)
    assert error.value.argument == argument


def test_epoch_is_checked(files):
    sampler = BatchSampler(9, 3, train=True)
    for epoch, start, argument in ((0, 4, "start_batch"), (-1, 0, "epoch")):
        with pytest.raises(ArgumentError) as error:
            sampler.set_epoch(epoch, start)
        assert error.value.argument == argument
    assert len(BatchSampler(10, 3, train=True, drop_last=False)) == 4
    assert len(BatchSampler(10, 3, train=True)) == 3
    with pytest.raises(ArgumentError):
        make_loader(images(files), 4, train=True, workers=-1)


def error_of(kind, loader):
    """The error of reading a loader, and its text with the traceback.

    The traceback is removed: it would keep the loader until the garbage collector waits 5 seconds for each worker.
    """
    try:
        list(loader)
    except kind as error:
        text = "".join(traceback.format_exception(error))
        return error.with_traceback(None), text
    pytest.fail(f"no {kind.__name__}")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_about_images_have_no_traceback_of_the_worker(files, tmp_path, workers):
    truncated = tmp_path / "bad.png"
    truncated.write_bytes(files[0].read_bytes()[:200])
    broken = ImageSet("x", "train", ["a"], [0] * 3, [files[0], files[1], truncated], images(files).transform)
    loader = make_loader(broken, 2, train=False, workers=workers, pin_memory=torch.cuda.is_available())
    error, _ = error_of(ImageError, loader)
    assert (error.path, error.truncated) == (truncated, True)
    assert "\n" not in str(error)
    differing, _ = error_of(BatchError, make_loader(images(files, "none", train=False), 4, train=False, workers=workers))
    assert differing.sizes[0] == (3, 30, 41)
    assert len(differing.sizes) == 4
    assert "\n" not in str(differing)
    plain = images(files)
    plain.transform = None
    untransformed, _ = error_of(BatchError, make_loader(plain, 4, train=False, workers=workers))
    assert untransformed.sizes == ()


def test_a_mistake_in_code_keeps_its_traceback(files):
    wrong = images(files)
    wrong.transform = divide_by_zero
    for workers in (0, 1):
        _, text = error_of(ZeroDivisionError, make_loader(wrong, 4, train=False, workers=workers))
        assert divide_by_zero.__name__ in text


def divide_by_zero(image):
    return 1 / 0


UNBALANCED = [0] * 15 + [1] * 6 + [2] * 2


def unbalanced(files, **options):
    dataset = images(files, **options)
    dataset.labels = list(UNBALANCED)
    return dataset


def test_a_balanced_epoch_has_all_classes_equally_often():
    sampler = BatchSampler(COUNT, 4, train=True, seed=3, drop_last=False, labels=UNBALANCED)
    seen = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        order = list(sampler.indices())
        assert order == list(sampler.indices())
        assert len(order) == COUNT == len(set(order))  # a repetition has its own number
        index = torch.tensor(order) % COUNT
        counts = torch.bincount(torch.tensor(UNBALANCED)[index])
        assert sorted(counts.tolist()) == [7, 8, 8]
        times = torch.bincount(index, minlength=COUNT)
        for part in (times[:15], times[15:21], times[21:]):
            assert part.max() - part.min() <= 1
        assert all(number - COUNT in order for number in order if number >= COUNT)
        seen.append(order)
    assert len(set(map(tuple, seen))) == 6
    assert {number % COUNT for order in seen for number in order} == set(range(COUNT))  # none is left out for ever


def test_a_balanced_epoch_with_a_class_without_samples():
    sampler = BatchSampler(6, 2, train=True, labels=[0, 0, 0, 0, 3, 3])
    assert sorted(number % 6 >= 4 for number in sampler.indices()) == [False] * 3 + [True] * 3


def test_balanced_batches_for_workers_ranks_resuming_and_the_cache(files):
    options = {"train": True, "seed": 3, "balanced": True, "drop_last": True}
    whole = make_loader(unbalanced(files), 4, **options)
    whole.set_epoch(2)
    expected = list(whole)
    for other in (
        make_loader(unbalanced(files), 4, workers=2, **options),
        DeviceCache(unbalanced(files), 4, device="cpu", **options),
    ):
        other.set_epoch(2)
        assert same(expected, other)
        other.set_epoch(2, start_batch=3)
        assert same(expected[3:], other)
    parts = [make_loader(unbalanced(files), 4, rank=rank, world_size=2, **options) for rank in (0, 1)]
    for part in parts:
        part.set_epoch(2)
    joined = [tuple(torch.cat(pair) for pair in zip(*both, strict=True)) for both in zip(*parts, strict=True)]
    assert same(expected, joined)


def test_a_repeated_sample_has_another_augmentation(files):
    dataset = unbalanced(files, scale=(0.1, 1.0))
    views = [dataset.sample(22 + k * COUNT) for k in range(3)]
    assert {label for _, label in views} == {2}
    assert len({image.sum().item() for image, _ in views}) == 3
    assert torch.equal(views[0][0], dataset[22][0])
