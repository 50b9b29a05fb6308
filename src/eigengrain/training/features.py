"""Features of a frozen backbone: computed once, kept in memory, and given out in the batches of a loader of images."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eigengrain import output
from eigengrain.data import Batches, build_transform, make_loader
from eigengrain.data.sampler import BatchSampler, derive
from eigengrain.data.transforms import Pipeline
from eigengrain.errors import ArgumentError
from eigengrain.heads import Head, TransformerHead
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.models.model import eval_mode
from eigengrain.progress import track
from eigengrain.text import counted
from eigengrain.training.config import Train
from eigengrain.training.distributed import Process
from eigengrain.training.sources import Loaders

#: share of the free memory of a device, and of the host, that features may fill
DEVICE_SHARE, HOST_SHARE = 0.5, 0.8

#: images as a loader returns them -> features, without gradient
Compute = Callable[[Tensor], Tensor]


class FeatureBatches(Batches):
    """Batches of (features, labels) instead of (images, labels), in the same order; the base of two kinds.

    Args:
        images: the loader of the images.
        compute: function from its images to features.
        store: device that keeps the features; on the CPU in page-locked memory if they are used on a GPU.
        process: this process and its device.
    """

    def __init__(self, images: Batches, compute: Compute, store: torch.device, process: Process):
        self.images, self.sampler, self.dataset = images, images.sampler, images.dataset
        self.compute, self.store, self.process = compute, store, process
        #: function that is called after each batch of images whose features are computed, and may raise to stop
        self.each: Callable[[], object] = lambda: None

    @property
    def title(self) -> str:
        return f"features of {self.dataset.name} ({self.dataset.split})"

    @property
    def _pinned(self) -> bool:
        return self.store.type == "cpu" and self.process.device.type == "cuda"

    def computed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches with features that are computed from the images and not kept."""
        for images, labels in self.images:
            with torch.no_grad():
                features = self.compute(images)
            yield features, labels

    @abstractmethod
    def fill(self) -> None:
        """Compute the features, unless they are already there; otherwise the first batch does it."""


class EvaluationFeatures(FeatureBatches):
    """Features of the images of an evaluation: the batches of this process themselves are kept."""

    _batches: list[tuple[Tensor, Tensor]] | None = None

    def fill(self) -> None:
        if self._batches is not None:
            return
        batches = []
        for features, labels in track(self.computed(), len(self.images), self.title, show=self.process.is_main):
            kept = features.to(self.store)
            batches.append((kept.pin_memory() if self._pinned else kept, labels))
            self.each()
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.fill()
        return iter(self._batches or ())


class TrainingFeatures(FeatureBatches):
    """Features of training images that are the same in every epoch, except that they may be flipped.

    The features of each image and, with flips, of its mirror image are kept. Order and flips of an epoch are drawn from
    (seed, epoch, index) as the loader of the images draws them. Of several processes, each keeps the features of the images
    ``rank``, ``rank + world_size``, …, and the processes exchange those of a batch.

    Args:
        workers: processes that read the images, once.
        images, compute, store, process: as for :class:`FeatureBatches`.
    """

    def __init__(self, images: Batches, compute: Compute, store: torch.device, process: Process, workers: int = 0):
        super().__init__(images, compute, store, process)
        self.workers = workers
        own = images.sampler
        self.global_sampler = BatchSampler(
            own.count,
            own.batch_size,
            train=True,
            seed=own.seed,
            drop_last=own.drop_last,
            labels=None if own.labels is None else own.labels.tolist(),
        )
        self._labels = torch.tensor(self.dataset.labels)
        self._features: Tensor | None = None  # (images of this process, views, C, h, w)

    @property
    def pipeline(self) -> Pipeline:
        assert isinstance(self.dataset.transform, Pipeline)
        return self.dataset.transform

    @property
    def views(self) -> int:
        """Number of views of each image: 2 with flips."""
        return 2 if self.pipeline.flip else 1

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        super().set_epoch(epoch, start_batch)
        self.global_sampler.set_epoch(epoch, start_batch)

    def fill(self) -> None:
        if self._features is not None:
            return
        own = range(self.process.rank, len(self.dataset), self.process.world_size)
        dataset = self.dataset.subset(own)
        dataset.transform = copy.copy(self.pipeline)
        dataset.transform.flip = False
        size = max(self.batch_size // self.process.world_size, 1)
        on_gpu = self.process.device.type == "cuda"
        batches = make_loader(dataset, size, train=False, workers=self.workers, pin_memory=on_gpu)
        features, start = torch.empty(0), 0
        with torch.no_grad():
            for images, _ in track(batches, len(batches), self.title, show=self.process.is_main):
                views = [images, images.flip(-1)][: self.views]
                part = torch.stack([self.compute(view) for view in views], dim=1)
                if start == 0:
                    features = torch.empty(
                        len(own), *part.shape[1:], dtype=part.dtype, device=self.store, pin_memory=self._pinned
                    )
                if part.shape[1:] != features.shape[1:]:
                    raise ArgumentError("cache_features", "needs images of one size", remedy="set it to false")
                features[start : start + len(part)] = part
                start += len(part)
                self.each()
        self._features = features

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.fill()
        epoch = self.sampler.epoch
        for own, everyone in zip(self.sampler, self.global_sampler, strict=True):
            places = [index % len(self.dataset) for index in own]
            if self.process.distributed:
                start = len(everyone) * self.process.rank // self.process.world_size
                features = self._gather(everyone, epoch)[start : start + len(own)]
            else:
                features = self._take(own, epoch)
            yield features, self._labels[places]

    def _take(self, indices: Sequence[int], epoch: int) -> Tensor:
        """The features of samples that this process keeps."""
        assert self._features is not None
        rows = [index % len(self.dataset) // self.process.world_size for index in indices]
        chosen = torch.tensor([rows, self._flips(indices, epoch)], dtype=torch.int64)
        if self.store.type == "cuda":
            chosen = chosen.pin_memory().to(self.store, non_blocking=True)
        features = self._features[chosen[0], chosen[1]]
        return features.pin_memory() if self._pinned else features

    def _gather(self, indices: Sequence[int], epoch: int) -> Tensor:
        """The features of a batch of all processes: each gives its own, and zeros for the others."""
        assert self._features is not None
        rank, world_size = self.process.rank, self.process.world_size
        held = [place for place, index in enumerate(indices) if index % len(self.dataset) % world_size == rank]
        part = self._take([indices[place] for place in held], epoch).to(self.process.device)
        part = part.to(torch.promote_types(part.dtype, torch.float32))  # gloo does not add all types
        whole = part.new_zeros(len(indices), *part.shape[1:])
        whole[held] = part
        return self.process.sum(whole)

    def _flips(self, indices: Sequence[int], epoch: int) -> list[int]:
        state = torch.default_generator.get_state()  # the only one that a Pipeline draws from
        flips = []
        for index in indices:
            torch.default_generator.manual_seed(derive(self.dataset.seed, epoch, index))
            flips.append(int(self.pipeline.choose_flip()))
        torch.default_generator.set_state(state)
        return flips


def keep_features(images: Loaders, net: MixedPrecision, config: Train, process: Process) -> Loaders:
    """Loaders of the features of a frozen backbone, which are computed at their first use.

    Raises:
        ArgumentError: if there is too little memory for them.
    """
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model, plain = net.model, MixedPrecision(net.model, config.amp)

    def compute(batch: Tensor, training: bool = False) -> Tensor:
        batch = batch.to(process.device, non_blocking=True).contiguous(memory_format=layout)
        if training:  # the model is told the size of training images
            model.train()
            return net.raw_features(batch)
        with eval_mode(model):
            return plain.raw_features(batch)

    pipeline = images.train.dataset.transform
    assert isinstance(pipeline, Pipeline)
    with torch.no_grad():
        each = compute(images.test.dataset[0][0][None])
    views = 2 if pipeline.flip else 1
    counts = [len(split.dataset) for split in images if split is not None]
    number = views * counts[0] + sum(counts[1:])
    needed = -(-number // process.world_size) * each.numel() * each.element_size()
    store = choose_store(needed, sum(counts), process)
    if process.is_main:
        both = ", with their mirror images" if views == 2 else ""
        size = f"{needed / 2**30:.2f} GiB on {store}" if needed >= 2**27 else f"{needed / 2**20:.1f} MiB on {store}"
        output.note(f"features of {counted(sum(counts), 'image')} are computed once{both} for training: {size}")
    place = (store, process)
    return Loaders(
        TrainingFeatures(images.train, partial(compute, training=True), *place, workers=config.workers),
        EvaluationFeatures(images.test, compute, *place),
        None if images.val is None else EvaluationFeatures(images.val, compute, *place),
    )


def reason_against(config: Train, head: Head) -> str | None:
    """Why the features of training images are different in every epoch; None if they can be kept."""
    if isinstance(head, TransformerHead):
        return f"{type(head).__name__} makes its own features of the blocks of the backbone"
    if config.mixup or config.cutmix or config.snapmix:
        return "mixup, cutmix and snapmix make other images in every epoch"
    transform = build_transform(config.data.transforms, train=True, mean=(0, 0, 0), std=(1, 1, 1))
    if not isinstance(transform, Pipeline) or transform.random_crop:
        return f"the transforms {config.data.transforms.kind!r} make other crops of the training images in every epoch"
    return None


def choose_store(needed: int, images: int, process: Process) -> torch.device:
    """The device that keeps ``needed`` bytes of features: that of the process if it is a GPU with room, else the CPU.

    Raises:
        ArgumentError: if neither has enough free memory.
    """
    places = []
    if process.device.type == "cuda":
        places.append((process.device, torch.cuda.mem_get_info(process.device)[0], DEVICE_SHARE))
    places.append((torch.device("cpu"), free_memory(), HOST_SHARE))
    for device, free, share in places:
        if needed <= share * free:
            return device
    sizes = " and ".join(f"{free / 2**30:.1f} GiB on {device}" for device, free, _ in places)
    problem = f"needs {needed / 2**30:.1f} GiB for the features of {images:,} images, and {sizes} are free"
    remedy = "set it to false, use smaller images, or leave out the flips ({data.transforms.flip} false)"
    raise ArgumentError("cache_features", problem, remedy=remedy)


def free_memory() -> int:
    """Bytes of memory of this machine that programs can still use; where the system does not tell, more than it has."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass  # not Linux
    return 1 << 50
