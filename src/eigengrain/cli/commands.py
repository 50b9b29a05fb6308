"""The table of all commands. To add one, write its module and add a :class:`Command` to ``COMMANDS``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from eigengrain.cli.completion import Completion
from eigengrain.cli.datasets import Datasets
from eigengrain.cli.demo import Demo
from eigengrain.cli.doctor import Doctor
from eigengrain.cli.evaluate import Evaluate
from eigengrain.cli.explain import Explain
from eigengrain.cli.explore import Explore
from eigengrain.cli.export import Export
from eigengrain.cli.listing import Heads, Models
from eigengrain.cli.predict import Predict
from eigengrain.cli.report import Report
from eigengrain.cli.serve import Serve
from eigengrain.training.config import Train

PROGRAM = "eigengrain"
ABOUT = "Second-order (global covariance) pooling for fine-grained visual recognition."

#: commands that are scripts of the repository, and how to run them
MOVED = {"study": "python -m studies", "bench": "python -m benchmarks"}


@dataclass(frozen=True)
class Command:
    """A command.

    Its options, their types, defaults and help are read from the fields and the docstring of ``config``, a dataclass in a
    module that does not import torch. ``run`` receives the config and may return an exit code.
    """

    name: str  # word that is typed for it; empty for the only command of a program
    help: str  # one line
    config: type[Any]
    run: str | Callable[[Any], int | None] = ""  # a function, or module:function; by default "run" beside the config
    positional: dict[str, str] = field(default_factory=dict)  # options without a name: ? for one word, * for any number
    implied: dict[str, Any] = field(default_factory=dict)  # other options that a positional one sets if they are not given
    choose_recipe: str = ""  # module:function from the values to (recipe, reason), for a positional option without a recipe
    rewrite_words: Callable[[Sequence[str]], list[str]] = list  # applied to the words after the name
    aliases: dict[str, str] = field(default_factory=dict)  # Python argument to option, for errors
    usage: str = ""  # what the usage line shows besides the positional options
    examples: tuple[str, ...] = ()  # lines to type
    has_result: bool = True  # whether it accepts --json

    def function(self) -> Callable[[Any], int | None]:
        """Import the function that runs the command."""
        return load(self.run or f"{self.config.__module__}:run") if isinstance(self.run, str) else self.run


def load(place: str) -> Callable[[Any], Any]:
    """Import a function by module:function."""
    module, _, name = place.partition(":")
    function: Callable[[Any], Any] = getattr(import_module(module), name)
    return function


@dataclass(frozen=True)
class Program:
    """A table of commands, what is typed in front of them, and what is printed about them."""

    name: str
    commands: Sequence[Command]
    about: str = ""
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)  # heading to names of commands, for the help
    moved: Mapping[str, str] = field(default_factory=dict)  # former command to what is typed instead
    version: str = ""


#: arguments of ``TrainedModel.dataset``
_DATA = {"name": "data", "options": "data_options"}

COMMANDS = (
    Command(
        "train",
        "train a model, from a recipe or from options",
        Train,
        "eigengrain.cli.train:run",
        positional={"data.root": "?"},
        implied={"data.name": "folder"},
        choose_recipe="eigengrain.cli.train:choose_recipe",
        usage="[--recipe NAME]",
        examples=(
            "eigengrain train photos --out runs/mine",
            "eigengrain train --recipe birds-resnet50-paper --data.root /data --dry_run",
            "eigengrain train --config runs/mine/args.yaml --resume",
        ),
    ),
    Command(
        "evaluate",
        "measure the accuracy of a trained model, also with subsets of the eigenvalues",
        Evaluate,
        positional={"checkpoint": "?"},
        aliases=_DATA,
        examples=(
            "eigengrain evaluate runs/mine",
            "eigengrain evaluate runs/mine --subset top:206 --subset top:1+last:50",
            "eigengrain evaluate models/birds --data cub --root /data --json",
        ),
    ),
    Command(
        "report",
        "write a page about a training: accuracy, confusion matrix, worst mistakes, calibration, data problems",
        Report,
        positional={"checkpoint": "?"},
        aliases=_DATA,
        examples=(
            "eigengrain report runs/mine",
            "eigengrain report runs/mine --mistakes 40 --out mistakes.html",
            "eigengrain report runs/mine --root /moved/photos --json",
        ),
    ),
    Command(
        "predict",
        "classify images with a trained model",
        Predict,
        positional={"images": "*"},
        usage="--checkpoint PATH",
        examples=(
            "eigengrain predict photos --checkpoint runs/mine",
            "eigengrain predict 'photos/*.jpg' --checkpoint runs/mine --topk 3",
            "eigengrain predict bird.jpg --checkpoint runs/mine --json",
        ),
    ),
    Command(
        "explain",
        "show what large and small eigenvalues see in images: maps, measures and a page",
        Explain,
        positional={"checkpoint": "?"},
        aliases=_DATA,
        examples=(
            "eigengrain explain runs/demo/mpncov",
            "eigengrain explain runs/mine --images photos/1.jpg photos/2.jpg",
            "eigengrain explain runs/mine --perturb 200 --toward small --out runs/small",
        ),
    ),
    Command(
        "explore",
        "open a local web page: split the eigenvalues of an image and compare the predictions and maps of the parts",
        Explore,
        positional={"checkpoint": "*"},
        aliases=_DATA,
        examples=(
            "eigengrain explore",
            "eigengrain explore runs/mine runs/other --browser",
            "eigengrain explore --checkpoint runs/mine --port 8000",
        ),
    ),
    Command(
        "export",
        "write a trained model for ONNX Runtime or torch.export",
        Export,
        positional={"checkpoint": "?"},
        examples=(
            "eigengrain export runs/mine --out birds.onnx",
            "eigengrain export runs/mine --format pt2 --img_size 448",
            "eigengrain export my.pth --backbone resnet50 --head gap --num_classes 200",
        ),
    ),
    Command(
        "serve",
        "answer HTTP requests with a trained model: post an image, get JSON back",
        Serve,
        positional={"checkpoint": "?"},
        examples=(
            "eigengrain serve runs/mine",
            "eigengrain serve runs/mine --port 8080 --device cpu",
            "eigengrain serve runs/mine --host 0.0.0.0 --password secret",
        ),
    ),
    Command(
        "models",
        "list backbones and the sizes of their feature maps",
        Models,
        "eigengrain.cli.listing:run_models",
        positional={"pattern": "?"},
        examples=("eigengrain models", "eigengrain models 'resnet*'", "eigengrain models resnet50 --json"),
    ),
    Command(
        "heads",
        "list heads and the lengths of their vectors",
        Heads,
        "eigengrain.cli.listing:run_heads",
        positional={"pattern": "?"},
        examples=("eigengrain heads", "eigengrain heads '*+seb'", "eigengrain heads --quiet"),
    ),
    Command(
        "datasets",
        "list data sets and their layouts, or check the images of a folder",
        Datasets,
        positional={"action": "?", "name": "?", "root": "?"},
        examples=(
            "eigengrain datasets list cub",
            "eigengrain datasets check photos --out problems.csv",
            "eigengrain datasets check cub /data/CUB_200_2011 --json",
        ),
    ),
    Command(
        "demo",
        "train four heads on drawn birds in a few minutes and write a report",
        Demo,
        examples=(
            "eigengrain demo",
            "eigengrain demo --heads gap,mpncov --epochs 2 --out runs/try",
            "eigengrain demo --seeds 0,1,2",
        ),
    ),
    Command(
        "doctor",
        "report installed packages, devices, eigensolvers, data sets and problems",
        Doctor,
        examples=("eigengrain doctor", "eigengrain doctor --data /data", "eigengrain doctor --json"),
    ),
    Command(
        "completion",
        "print a script with which bash, zsh or fish complete commands, options and names",
        Completion,
        positional={"shell": "?"},
        examples=(
            "echo 'source <(eigengrain completion bash)' >> ~/.bashrc",
            """echo 'eval "$(eigengrain completion zsh)"' >> ~/.zshrc""",
            "eigengrain completion fish > ~/.config/fish/completions/eigengrain.fish",
        ),
        has_result=False,
    ),
)

#: the order of commands in 'eigengrain --help'
SECTIONS = {
    "train and use a model": ("train", "evaluate", "report", "predict", "serve", "export"),
    "see what eigenvalues see": ("explain", "explore"),
    "try it": ("demo",),
    "lists": ("models", "heads", "datasets"),
    "set-up": ("doctor", "completion"),
}
