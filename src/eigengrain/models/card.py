"""The model card: ``README.md`` in the folder of a model, in the layout of the Hugging Face Hub."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from timm.data import resolve_data_config

import eigengrain
from eigengrain.options import check, setting
from eigengrain.pages import render
from eigengrain.text import describe_accuracy, few, printable

if TYPE_CHECKING:
    from eigengrain.models.model import CovarianceNet

CARD_FILE = "README.md"
#: class names in the card; config.json has all of them
MAX_NAMES = 200


@dataclass(frozen=True)
class ModelCard:
    """Facts for the card of a model that its weights do not show; everything is optional.

    Args:
        data: name of the data set.
        train_images, test_images: numbers of images.
        accuracy: share of the test images that are classified correctly, in percent.
        license: licence of the model, such as apache-2.0 or cc-by-4.0.
        remark: plain text for the section about limits.
    """

    data: str | None = None
    train_images: int | None = setting(None, least=0)
    test_images: int | None = setting(None, least=1)
    accuracy: float | None = setting(None, least=0, below=100.0001)
    license: str | None = None
    remark: str = ""

    def __post_init__(self) -> None:
        check(self)


def escape_markdown(text: str) -> str:
    r"""A user's text as one line of Markdown that shows it as it is: no markup, links or HTML.

    Example:
        >>> print(escape_markdown("<b>*wren*</b>\n# 1"))
        \<b\>\*wren\*\<\/b\>\\n\# 1
    """
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", printable(text))


def render_card(model: "CovarianceNet", description: dict[str, Any], class_names: list[str] | None, card: ModelCard) -> str:
    """The card of a model with the preprocessing of a ``pretrained_cfg``."""
    backbone, head = model.config["backbone"], model.config["head"]
    names = [escape_markdown(name) for name in class_names or ()]
    right = None if card.accuracy is None or card.test_images is None else round(card.accuracy * card.test_images / 100)
    front = _front_matter(card, f"{backbone} {head}")
    return render(
        "card.md",
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=10**6),
        backbone=escape_markdown(backbone),
        head=escape_markdown(head),
        vector=model.num_classes == 0,
        num_classes=model.num_classes,
        names=few(names, MAX_NAMES),
        card=card,
        data=escape_markdown(card.data or ""),
        remark=escape_markdown(card.remark),
        accuracy="" if right is None else describe_accuracy(right, card.test_images or 1),
        prepared=resolve_data_config({}, pretrained_cfg=description),
        calibrated=(model.calibration or {}).get("familiarity_threshold") is not None,
        version=eigengrain.__version__,
    )


def _front_matter(card: ModelCard, name: str) -> dict[str, Any]:
    """The metadata that the hub reads."""
    values: dict[str, Any] = {
        "library_name": "eigengrain",
        "pipeline_tag": "image-classification",
        **({} if card.license is None else {"license": printable(card.license)}),
        "tags": ["image-classification", "fine-grained", "covariance-pooling", "pytorch", "eigengrain"],
        "metrics": ["accuracy"],
    }
    if card.accuracy is not None:
        metric = {"type": "accuracy", "name": "top-1 accuracy", "value": round(card.accuracy / 100, 4)}
        task = {"type": "image-classification", "name": "image classification"}
        dataset = {"type": "image-classification", "name": printable(card.data or "test images"), "split": "test"}
        values["model-index"] = [{"name": name, "results": [{"task": task, "dataset": dataset, "metrics": [metric]}]}]
    return values
