"""A whole data set in the device's memory: decoded once, augmented there."""

import copy
import logging
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from eigengrain.data.image_set import ImageSet
from eigengrain.data.loader import Batches, Order
from eigengrain.data.randomness import derive
from eigengrain.data.transforms import Pipeline, pixels_of
from eigengrain.data.workers import Workers
from eigengrain.progress import tracked

#: images that are decoded and sent to the device together
_TOGETHER = 32

_log = logging.getLogger(__name__)

#: decoded files on a device, by how they were prepared and by their paths
Decoded = MutableMapping[Any, Tensor]


class DeviceCache(Batches):
    """The batches of a :class:`~eigengrain.data.loader.Loader`, made on the device from images that were decoded once.

    The data set's transform is followed as it stands: what is the same in every epoch is done once and kept as uint8, crops
    and mirroring are drawn from (seed, epoch, index) as the loader draws them, so the batches are the loader's.

    Args:
        dataset: with a transform of ``build_transform``; timm's augmentation works on images on the CPU and is refused.
        batch_size: samples of a batch, over all ranks together.
        train: whether to shuffle.
        device: where the images are kept and the batches are made.
        workers: processes that decode the images, once.
        seed: of the order and of the augmentation.
        rank: of this process; in evaluation only its own samples are kept.
        world_size: how many processes there are.
        drop_last: whether the last batch is left out if it is not full; by default in training.
        progress: whether to show a bar.
        decoded: images of earlier caches; those that it lacks are added. Trainings that are given the same one decode a
            file once, also where they split the images in other ways.

    Raises:
        ValueError: for a transform that cannot be followed, numbers out of range, or a device without room for the images.
    """

    def __init__(
        self,
        dataset: ImageSet,
        batch_size: int,
        *,
        train: bool,
        device: torch.device | str,
        workers: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool | None = None,
        progress: bool = True,
        decoded: Decoded | None = None,
    ):
        if not isinstance(dataset.transform, Pipeline):
            raise ValueError(
                "the images can be kept on the device if they are resized, cropped and mirrored only, and this data set's "
                f"transform is {type(dataset.transform).__name__}: use the paper, scripts, imagenet or none transforms, "
                "or no cache"
            )
        self.order = Order(
            len(dataset), batch_size, train=train, seed=seed, rank=rank, world_size=world_size, drop_last=drop_last
        )
        dataset.seed = seed
        self.dataset, self.device = dataset, torch.device(device)
        self.pipeline = copy.copy(dataset.transform)  # with its numbers where the images are
        self.pipeline.mean, self.pipeline.std = (t.to(self.device) for t in (self.pipeline.mean, self.pipeline.std))
        wanted = list(range(len(dataset)) if train else [number for batch in self.order for number in batch])
        self._labels = torch.tensor(dataset.labels, device=self.device)
        keys = {number: (str(self.device), *self.pipeline.preparation, dataset.path(number)) for number in wanted}
        known = decoded if decoded is not None and dataset.paths is not None else {}
        self._images: dict[int, Tensor] = {number: known[key] for number, key in keys.items() if key in known}
        self._fill([number for number in wanted if number not in self._images], workers, progress)
        known.update({key: self._images[number] for number, key in keys.items()})
        self.nbytes = sum(image.numel() for image in self._images.values())
        _log.info("%d images of %s are kept on %s: %.2f GiB", len(wanted), dataset.name, self.device, self.nbytes / 2**30)

    def _fill(self, wanted: list[int], workers: int, progress: bool) -> None:
        if not wanted:
            return
        decoded = Workers(
            _Prepared(self.dataset, self.pipeline),
            _flat,
            batch_size=_TOGETHER,
            sampler=wanted,
            workers=workers,
            generator=torch.Generator(),
        )
        title = f"decoding {self.dataset.name} ({self.dataset.split}) to {self.device}"
        for turn, (numbers, shapes, pixels) in enumerate(tracked(decoded, len(decoded), title, show=progress)):
            if turn == 0:
                self._check_room(pixels.numel() / len(numbers) * len(wanted))
            # one copy for all of them, whose memory the parts share; on the CPU too, as what a worker sends lies in shared
            # memory, of which there may be little, and holds a file open
            parts = pixels.to(self.device, copy=True).split([shape.numel() for shape in shapes])
            self._images |= {n: part.view(shape) for n, part, shape in zip(numbers, parts, shapes, strict=True)}

    def _check_room(self, needed: float) -> None:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if needed > free:
                raise ValueError(
                    f"{self.dataset.name} needs {needed / 2**30:.1f} GiB on {self.device}, and {free / 2**30:.1f} GiB "
                    "are free: read the images from the disk (no cache) or use smaller ones"
                )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.order.epoch
        for batch in self.order:
            yield self._batch(list(batch), epoch)

    def _batch(self, numbers: list[int], epoch: int) -> tuple[Tensor, Tensor]:
        crops, mirrored = [], []
        generator = torch.default_generator.get_state()  # the only one that a Pipeline draws from
        for number in numbers:
            image = self._images[number]
            torch.default_generator.manual_seed(derive(self.dataset.seed, epoch, number))
            top, left, mirror = self.pipeline.choose(image)
            size = self.pipeline.crop if self.pipeline.random_crop else None
            crops.append(image if size is None else image[:, top : top + size, left : left + size])
            mirrored.append(mirror)
        torch.default_generator.set_state(generator)
        if len({crop.shape for crop in crops}) > 1:
            raise ValueError("the images of a batch differ in size: use a transform that crops")
        images = torch.stack(crops)
        which, places = self._sent(list(zip(mirrored, numbers, strict=True))).unbind(1)
        if any(mirrored):
            images = torch.where(which.bool().view(-1, 1, 1, 1), images.flip(-1), images)
        return self.pipeline.normalise(images), self._labels[places]

    def _sent(self, numbers: Any) -> Tensor:
        """Numbers on the device, without waiting for what it does at the moment."""
        made = torch.tensor(numbers, dtype=torch.int64)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made.to(self.device)


class _Prepared(Dataset[tuple[int, Tensor]]):
    def __init__(self, dataset: ImageSet, pipeline: Pipeline):
        self.dataset, self.pipeline = dataset, pipeline

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, pixels_of(self.pipeline.prepare(self.dataset.image(number)))


def _flat(samples: Sequence[tuple[int, Tensor]]) -> tuple[list[int], list[Any], Tensor]:
    """Numbers, shapes and all pixels in one row."""
    numbers, images = zip(*samples, strict=True)
    return list(numbers), [image.shape for image in images], torch.cat([image.flatten() for image in images])
