"""Batches: the same for any number of workers and ranks, resumed without opening what is skipped, made on the device."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from eigengrain.data import DeviceCache, ImageSet, Transforms, build_transform, make_loader, split_validation
from eigengrain.data import workers as processes
from eigengrain.data.decode import ImageError
from eigengrain.data.loader import Order

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COUNT = 23


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of many proportions."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for i in range(COUNT):
        pixels = generator.integers(0, 256, (30 + i, 41 - i % 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return [folder / f"{i}.png" for i in range(COUNT)]


def images(files, kind="imagenet", train=True, **options):
    transform = build_transform(Transforms(kind, 21, **options), train, MEAN, STD)
    return ImageSet("x", "train", ["a", "b", "c"], [i % 3 for i in range(COUNT)], files, transform)


def same(first, second):
    pairs = list(zip(first, second, strict=True))
    return len(pairs) > 0 and all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


class Graph:
    """Something whose end is seen: in a forked process that of a tensor on the device would be an error."""

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


def test_workers_leave_the_garbage_of_their_parent_alone(tmp_path):
    gc.disable()
    try:
        Graph(tmp_path)
        batches = iter(processes.Workers(Collects(), list, workers=2, batch_size=2))
        assert list(tmp_path.iterdir()) == []
        assert list(batches) == [[True, True], [True, True]]
        assert list(tmp_path.iterdir()) == []
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()
    gc.collect()
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_workers_survive_what_is_garbage_on_the_device():
    gc.disable()
    try:
        kept = [torch.zeros(1, device="cuda")]
        kept[0].record_stream(torch.cuda.Stream())  # so that its end is a call of CUDA
        kept.append(kept)
        del kept
        assert list(processes.Workers(Collects(), list, workers=2, batch_size=2)) == [[True, True], [True, True]]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "options"), [("imagenet", {}), ("timm", {"auto_augment": "rand-m9-mstd0.5", "reprob": 0.5})]
)
def test_workers_change_nothing(files, kind, options):
    alone = make_loader(images(files, kind, **options), 4, train=True, seed=3)
    helped = make_loader(images(files, kind, **options), 4, train=True, seed=3, workers=2)
    epochs = []
    for epoch in (0, 1, 5):  # the workers live on between the epochs
        alone.set_epoch(epoch)
        helped.set_epoch(epoch)
        epochs.append(list(alone))
        assert same(epochs[-1], helped)
        assert len(epochs[-1]) == len(alone) == 5
    assert not same(epochs[0], epochs[1])
    iter(helped).__next__()  # an epoch that is broken off leaves nothing behind
    helped.set_epoch(0)
    assert same(epochs[0], helped)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not say who sends a signal")
def test_workers_outlive_signals_that_are_meant_for_their_parent(files):
    """A cluster, torchrun, timeout and Ctrl-C reach all processes; the parent decides what becomes of its work."""
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


heed = processes._heed_the_parent_alone


def heed_late():
    time.sleep(0.5)
    heed()


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not say who sends a signal")
def test_workers_outlive_signals_that_come_while_they_start(files, monkeypatch):
    monkeypatch.setattr(processes, "_heed_the_parent_alone", heed_late)
    before, held = set(multiprocessing.active_children()), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    batches = iter(make_loader(images(files), 4, train=True, seed=3, workers=1))
    [worker] = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert same(make_loader(images(files), 4, train=True, seed=3), batches)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == held


def test_no_more_workers_than_cores(files, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of more workers than cores
        loader = make_loader(images(files), 4, train=False, workers=9)
        assert sum(len(labels) for _, labels in loader) == len(loader.dataset)
    assert loader._batches._loader.num_workers == 1


def test_loading_leaves_the_models_generator_alone(files):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(make_loader(images(files), 4, train=True))
    list(make_loader(images(files), 4, train=True, workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        found = Order(50, 10, train=True, seed=seed)
        found.set_epoch(epoch)
        return list(found.samples())

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
    assert all(sorted(order(seed, 1)) == list(range(50)) for seed in range(3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 23, 40])
def test_evaluation_sees_each_sample_once(world_size, batch_size):
    seen = []
    for rank in range(world_size):
        order = Order(COUNT, batch_size, train=False, rank=rank, world_size=world_size)
        batches = list(order)
        assert len(batches) == len(order)
        assert all(len(batch) for batch in batches)
        seen += [number for batch in batches for number in batch]
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
def test_resume_opens_nothing_that_is_skipped(files, tmp_path, workers):
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
    assert opened == set(whole.order.samples()[15:20])
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
    ("count", "options", "message"),
    [
        (3, {"batch_size": 4, "train": True}, "3 samples do not fill one batch of 4"),
        (0, {"batch_size": 4, "train": False}, "no samples"),
        (9, {"batch_size": 0, "train": False}, "batch_size must be at least 1"),
        (9, {"batch_size": 3, "train": True, "seed": -1}, "seed at least 0"),
        (
            9,
            {"batch_size": 3, "train": True, "world_size": 2},
            "2 ranks cannot share it equally: use .* such as 2",
        ),
        (9, {"batch_size": 4, "train": True, "world_size": 2, "drop_last": False}, "last batch has 1 samples for 2 ranks"),
        (3, {"batch_size": 4, "train": True, "world_size": 2, "drop_last": False}, "last batch has 3 samples for 2 ranks"),
        (9, {"batch_size": 4, "train": True, "world_size": 2, "rank": 2}, "rank below world_size"),
    ],
)
def test_numbers_are_checked(count, options, message):
    with pytest.raises(ValueError, match=message):
        Order(count, **options)


def test_epoch_is_checked():
    order = Order(9, 3, train=True)
    with pytest.raises(ValueError, match="has 3 batches; got epoch 0, batch 4"):
        order.set_epoch(0, 4)
    assert len(Order(10, 3, train=True, drop_last=False)) == 4
    assert len(Order(10, 3, train=True)) == 3


def test_sizes_that_differ_and_damaged_files_are_said(files, tmp_path):
    with pytest.raises(ValueError, match=r"differ in size, \(3, 30, 41\) and .*use a transform that crops"):
        next(iter(make_loader(images(files, "none", train=False), 4, train=False)))
    plain = images(files)
    plain.transform = None
    with pytest.raises(ValueError, match="set the data set's transform"):
        next(iter(make_loader(plain, 4, train=False)))
    bad = tmp_path / "bad.png"
    bad.write_bytes(files[0].read_bytes()[:200])
    broken = ImageSet("x", "train", ["a"], [0] * 3, [files[0], files[1], bad], images(files).transform)
    differing = images(files, "none", train=False)
    for workers in (0, 1):  # in one line, whoever opened the file
        with pytest.raises(ImageError, match=rf"^{bad}: damaged \(image file is truncated.*\)$"):
            list(make_loader(broken, 2, train=False, workers=workers, pin_memory=torch.cuda.is_available()))
        with pytest.raises(ImageError, match=r"^the images of a batch differ in size.*crops$"):
            list(make_loader(differing, 4, train=False, workers=workers))


def test_a_mistake_in_code_keeps_its_traceback(files):
    wrong = images(files)
    wrong.transform = divide_by_zero
    for workers in (0, 1):
        with pytest.raises(ZeroDivisionError) as error:
            list(make_loader(wrong, 4, train=False, workers=workers))
        shown = str(error.value) + "".join(map(str, error.traceback))
        assert "divide_by_zero" in shown


def divide_by_zero(image):
    return 1 / 0


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("paper", {}), ("scripts", {}), ("scripts", {"keep_aspect": False}), ("imagenet", {})],
)
def test_cached_batches_are_the_loaders(files, kind, options, train):
    plain = make_loader(images(files, kind, train, **options), 5, train=train, seed=7)
    cached = DeviceCache(images(files, kind, train, **options), 5, train=train, seed=7, device="cpu", workers=0)
    assert len(cached) == len(plain)
    for epoch, start in ((0, 0), (2, 1)):
        plain.set_epoch(epoch, start)
        cached.set_epoch(epoch, start)
        assert same(plain, cached)


def test_cache_decodes_once_and_says_its_size(files, monkeypatch):
    opened = []
    original = ImageSet.image
    monkeypatch.setattr(ImageSet, "image", lambda self, index: opened.append(index) or original(self, index))
    cached = DeviceCache(images(files, "paper"), 5, train=True, device="cpu")
    assert cached.nbytes == COUNT * 3 * 21 * 21
    for epoch in range(3):
        cached.set_epoch(epoch)
        list(cached)
    assert sorted(opened) == list(range(COUNT))


def test_cache_on_the_cpu_holds_no_shared_memory(files):
    """What workers send lies there: a cache of it would fill a container's 64 MB, and keep a file open for each batch."""
    cached = DeviceCache(images(files, "paper"), 5, train=True, device="cpu", workers=1)
    assert not any(image.is_shared() for image in cached._images.values())


def test_cache_of_ranks(files):
    parts = [
        DeviceCache(images(files, train=False), 5, train=False, device="cpu", rank=rank, world_size=2, workers=rank)
        for rank in (0, 1)
    ]
    whole = torch.cat([x for x, _ in make_loader(images(files, train=False), 5, train=False)])
    found = torch.cat([x for part in parts for x, _ in part])
    assert found.shape == whole.shape
    assert sorted(found.flatten(1).sum(1).tolist()) == sorted(whole.flatten(1).sum(1).tolist())
    assert sum(part.nbytes for part in parts) < 1.2 * COUNT * 3 * 28 * 28  # each keeps its own samples only


def test_cache_refuses_what_it_cannot_follow(files):
    with pytest.raises(ValueError, match="transform is Compose: use the paper"):
        DeviceCache(images(files, "timm"), 5, train=True, device="cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cache_on_a_gpu(files):
    cached = DeviceCache(images(files), 5, train=True, seed=7, device="cuda")
    plain = make_loader(images(files), 5, train=True, seed=7)
    for (x, y), (a, b) in zip(cached, plain, strict=True):
        assert x.is_cuda
        torch.testing.assert_close(x.cpu(), a, rtol=0, atol=1e-6)
        assert torch.equal(y.cpu(), b)


def drawn(counts):
    labels = [k for k, n in enumerate(counts) for _ in range(n)]
    return ImageSet(
        "x", "train", [str(k) for k in range(len(counts))], labels, [Path(f"{i}.jpg") for i in range(len(labels))]
    )


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.33, 0.5, 0.9])
def test_validation_is_stratified(fraction):
    counts = [30, 29, 41, 7, 1, 12]
    whole = drawn(counts)
    train, validation = split_validation(whole, fraction, seed=4)
    assert sorted(train.paths + validation.paths) == sorted(whole.paths)
    assert len(validation) == round(fraction * 120) or fraction == 0.9  # a class keeps one sample for training
    for n, kept, held in zip(counts, train.class_counts(), validation.class_counts(), strict=True):
        assert kept >= 1
        assert kept + held == n
        assert abs(held - fraction * n) < 1 or n == 1 or kept == 1
    again = split_validation(whole, fraction, seed=4)[1]
    assert again.paths == validation.paths
    assert split_validation(whole, fraction, seed=5)[1].paths != validation.paths
    assert (train.split, validation.split, whole.split) == ("train", "validation", "train")
    validation.transform = print
    assert train.transform is None


def test_validation_is_checked():
    with pytest.raises(ValueError, match=r"above 0 and below 1, got 1\.5"):
        split_validation(drawn([5]), 1.5, 0)
    with pytest.raises(ValueError, match="leaves none for validation"):
        split_validation(drawn([1, 1]), 0.4, 0)


def test_image_sets_are_checked():
    with pytest.raises(ValueError, match=r"1 paths for 2 labels"):
        ImageSet("x", "train", ["a"], [0, 0], ["p.jpg"])
    with pytest.raises(ValueError, match=r"sample 1 \(q.jpg\) has the label 1, and there are 1 classes"):
        ImageSet("x", "train", ["a"], [0, 1], ["p.jpg", "q.jpg"])
    with pytest.raises(ValueError, match="there is no number 9"):
        drawn([3]).subset([0, 9])
    with pytest.raises(IndexError, match="has 3 samples, got index 3"):
        drawn([3])[3]
    with pytest.raises(ValueError, match="there is no such file"):
        drawn([3])[0]
