"""A data set in the memory of the device: decoded once, augmented there."""

import copy
import logging
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from eigengrain.data.image_set import ImageSet, check_sizes
from eigengrain.data.loader import Batches
from eigengrain.data.sampler import BatchSampler, derive
from eigengrain.data.transforms import Pipeline, to_pixels
from eigengrain.data.workers import Workers
from eigengrain.errors import ArgumentError
from eigengrain.progress import track

#: images that are decoded and sent to the device together
_CHUNK = 32

_log = logging.getLogger(__name__)

#: decoded files on a device, by their preparation and path
Decoded = MutableMapping[Any, Tensor]


class DeviceCache(Batches):
    """The batches of a :class:`~eigengrain.data.Loader`, made on the device from images that are decoded once.

    The steps of the transform that are the same in every epoch are done once, and their result is stored as uint8. Crops
    and flips are drawn from (seed, epoch, index) as in the loader, so the batches are the same. Crops of random size
    (``scale``) are the same up to rounding: they are resized on the device, see :func:`resize_all`.

    Args:
        dataset: data set with a transform of ``build_transform``, but not the augmentation of timm, which needs the CPU.
        batch_size, train, seed, rank, world_size, drop_last, balanced: as in :func:`~eigengrain.data.make_loader`; in
            evaluation only the samples of this rank are stored.
        device: device that stores the images and makes the batches.
        workers: processes that decode the images, once.
        decoded: images of earlier caches; missing ones are added. Trainings that share it decode each file once.

    Raises:
        ArgumentError: for a transform that is not supported, numbers out of range, or a device with too little free memory.
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
        balanced: bool = False,
        progress: bool = True,
        decoded: Decoded | None = None,
    ):
        self.pipeline = _supported_pipeline(dataset)
        labels = dataset.labels if balanced else None
        ranks = {"rank": rank, "world_size": world_size}
        self.sampler = BatchSampler(
            len(dataset), batch_size, train=train, seed=seed, **ranks, drop_last=drop_last, labels=labels
        )
        dataset.seed = seed
        self.dataset, self.device = dataset, torch.device(device)
        self.pipeline.mean, self.pipeline.std = (t.to(self.device) for t in (self.pipeline.mean, self.pipeline.std))
        self._labels = torch.tensor(dataset.labels, device=self.device)
        indices = list(range(len(dataset)) if train else [index for batch in self.sampler for index in batch])
        keys = {index: (str(self.device), *self.pipeline.preparation, dataset.path(index)) for index in indices}
        shared = decoded if decoded is not None and dataset.paths is not None else {}
        self._images: dict[int, Tensor] = {index: shared[key] for index, key in keys.items() if key in shared}
        self._fill([index for index in indices if index not in self._images], workers, progress)
        shared.update({key: self._images[index] for index, key in keys.items()})
        self.nbytes = sum(image.numel() for image in self._images.values())
        _log.info("%d images of %s stored on %s: %.2f GiB", len(indices), dataset.name, self.device, self.nbytes / 2**30)

    def _fill(self, indices: list[int], workers: int, progress: bool) -> None:
        if not indices:
            return
        images, generator = _Prepared(self.dataset, self.pipeline), torch.Generator()
        chunks = Workers(images, _flatten, workers=workers, batch_size=_CHUNK, sampler=indices, generator=generator)
        title = f"decoding {self.dataset.name} ({self.dataset.split}) to {self.device}"
        for number, (chunk, shapes, pixels) in enumerate(track(chunks, len(chunks), title, show=progress)):
            if number == 0:
                self._check_memory(pixels.numel() / len(chunk) * len(indices))
            # one copy for the chunk, whose memory the images share; on the CPU too, because tensors of a worker are in
            # shared memory, which may be small, and keep a file open
            parts = pixels.to(self.device, copy=True).split([shape.numel() for shape in shapes])
            self._images |= {index: part.view(shape) for index, part, shape in zip(chunk, parts, shapes, strict=True)}

    def _check_memory(self, needed: float) -> None:
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else float("inf")
        if needed > free:
            sizes = f"{free / 2**30:.1f} GiB of free memory, and {self.dataset.name} needs {needed / 2**30:.1f} GiB"
            raise ArgumentError("device", f"{self.device} has {sizes}", remedy="use no cache, or smaller images")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.sampler.epoch
        for batch in self.sampler:
            yield self._make_batch(batch, epoch)

    def _make_batch(self, indices: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        crops, flips = [], []
        generator = torch.default_generator.get_state()  # the only one that a Pipeline draws from
        for index in indices:
            image = self._images[index % len(self.dataset)]
            torch.default_generator.manual_seed(derive(self.dataset.seed, epoch, index))
            crop, flip = self.pipeline.choose(image)
            if crop is not None:
                top, left, height, width = crop
                image = image[:, top : top + height, left : left + width]
            crops.append(image)
            flips.append(flip)
        torch.default_generator.set_state(generator)
        if self.pipeline.random_size is not None and self.pipeline.crop is not None:
            images = resize_all(crops, self.pipeline.crop)
        else:
            check_sizes(crops)
            images = torch.stack(crops)
        labels = [index % len(self.dataset) for index in indices]
        flipped, places = _send(list(zip(flips, labels, strict=True)), self.device).unbind(1)
        if any(flips):
            images = torch.where(flipped.bool().view(-1, 1, 1, 1), images.flip(-1), images)
        return self.pipeline.normalise(images), self._labels[places]


def _supported_pipeline(dataset: ImageSet) -> Pipeline:
    """A copy of the transform of a data set, if the cache supports it."""
    pipeline = dataset.transform
    if not isinstance(pipeline, Pipeline):
        problem = f"must have a transform that only resizes, crops and flips to be stored, not {type(pipeline).__name__}"
        remedy = "use the transforms paper, scripts, imagenet or none, or no cache"
        raise ArgumentError("dataset", problem, remedy=remedy)
    if pipeline.random_size is not None and pipeline.interpolation.value != "bilinear":
        problem = f"must be resized by bilinear interpolation for crops of random size, not {pipeline.interpolation.value}"
        raise ArgumentError("dataset", problem, remedy="use bilinear, or no cache")
    return copy.copy(pipeline)


class _Prepared(Dataset[tuple[int, Tensor]]):
    def __init__(self, dataset: ImageSet, pipeline: Pipeline):
        self.dataset, self.pipeline = dataset, pipeline

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, to_pixels(self.pipeline.prepare(self.dataset.image(index)))


def _flatten(samples: Sequence[tuple[int, Tensor]]) -> tuple[list[int], list[Any], Tensor]:
    """Indices, shapes, and all pixels in one vector."""
    indices, images = zip(*samples, strict=True)
    return list(indices), [image.shape for image in images], torch.cat([image.flatten() for image in images])


def resize_all(images: Sequence[Tensor], side: int) -> Tensor:
    """Resize uint8 images of different sizes to squares, with the antialiased bilinear interpolation of Pillow.

    Resizing is linear in the rows and in the columns of an image, so it is two matrix products, for all images at once.
    The result (B, C, side, side) differs from Pillow by at most one of 256 levels: it rounds once, and Pillow also rounds
    between rows and columns.
    """
    sizes = _send([image.shape[1:] for image in images], images[0].device)
    height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
    padded = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    for place, image in zip(padded, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    rows, columns = (_resize_weights(sizes[:, k], longest, side) for k, longest in ((0, height), (1, width)))
    resized = rows.unsqueeze(1) @ padded.float() @ columns.unsqueeze(1).mT
    return resized.round_().to(torch.uint8)


def _resize_weights(lengths: Tensor, longest: int, side: int) -> Tensor:
    """The weight of each old pixel in each new one, (B, side, longest); 0 beyond the length of an image."""
    old = torch.arange(longest, device=lengths.device) + 0.5
    ratio = (lengths.float() / side).view(-1, 1, 1)
    centres = (torch.arange(side, device=lengths.device) + 0.5).view(-1, 1) * ratio
    # a triangle around each new pixel: two old pixels wide, or two new ones if the image becomes smaller
    weights = (1 - (old - centres).abs() / ratio.clamp(min=1)).clamp_(min=0)
    weights = weights * (old < lengths.view(-1, 1, 1))
    return weights / weights.sum(-1, keepdim=True)


def _send(numbers: Any, device: torch.device) -> Tensor:
    """Copy integers to a device without waiting for its current work."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
