"""All commands as data: to add one, add a :class:`Command` to ``COMMANDS``.

Its config is a dataclass in a module without torch (the options, their types, defaults and help are read from it), and
``run`` names the function that receives the config. Nothing heavy is imported before the command is known.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

from benchmarks.config import Doctor, FunctionalBench, GrowthBench, HeadsBench, SolversBench, StepBench
from benchmarks.explain_config import ExplainBench
from benchmarks.loader import LoaderBench
from studies.config import Demo, GradientTour, StudyRun

from eigengrain.cli.completion import Completion
from eigengrain.cli.datasets import Datasets
from eigengrain.cli.evaluate import Evaluate
from eigengrain.cli.explain import Explain
from eigengrain.cli.explore import Explore
from eigengrain.cli.export import Export
from eigengrain.cli.listing import Heads, Models
from eigengrain.cli.predict import Predict
from eigengrain.training.config import Train

PROGRAM = "eigengrain"
ABOUT = "Second-order (global covariance) pooling for fine-grained visual recognition."


def imported(path: str) -> Callable[..., Any]:
    """What ``module:function`` names, imported now."""
    module, name = path.split(":")
    return cast(Callable[..., Any], getattr(import_module(module), name))


@dataclass(frozen=True)
class Command:
    """A command: its words, its line in the help, the dataclass of its options and ``module:function`` that runs it.

    Example:
        >>> Command("bench functional", "time the layers", FunctionalBench, "benchmarks.functional:run").group
        'bench'
    """

    name: str
    help: str
    config: type[Any]
    run: str
    #: options that may be given without their name, as many of them as argparse's nargs says: ? or *
    positional: dict[str, str] = field(default_factory=dict)
    #: ``module:function`` that rewrites the words after the command's name before they are parsed, as for ``--recipe NAME``
    expand: str | None = None
    #: what the usage line shows besides these options
    usage: str = ""
    #: lines to type, at the end of the help
    examples: tuple[str, ...] = ()
    #: whether it has a result, so that --json says something
    speaks: bool = True

    @property
    def group(self) -> str | None:
        """The first of two words, or None."""
        return self.name.split()[0] if " " in self.name else None

    @property
    def last_word(self) -> str:
        return self.name.split()[-1]

    def function(self) -> Callable[[Any], int | None]:
        """What runs the command, imported now; it may return an exit code."""
        return imported(self.run)


#: help of the words that have commands of their own
GROUPS = {"bench": "measure speed, memory and gradients"}

COMMANDS = (
    Command(
        "train",
        "train a model, from a recipe or from options",
        Train,
        "eigengrain.cli.train:run",
        expand="eigengrain.recipes:expand",
        usage="[--recipe NAME]",
        examples=(
            "eigengrain train --recipe birds-resnet50-paper --data.root /data --dry_run",
            "eigengrain train --data.name folder --data.root photos --out runs/mine",
            "eigengrain train --config runs/mine/args.yaml --resume",
        ),
    ),
    Command(
        "evaluate",
        "accuracy of a trained model on a split, also with eigenvalue subsets",
        Evaluate,
        "eigengrain.cli.evaluate:run",
        positional={"checkpoint": "?"},
        expand="eigengrain.cli.evaluate:expand",
        examples=(
            "eigengrain evaluate runs/mine",
            "eigengrain evaluate runs/mine --subset top:206 --subset top:1+last:50",
            "eigengrain evaluate models/birds --data cub --root /data --json",
        ),
    ),
    Command(
        "predict",
        "name what images show, with a trained model",
        Predict,
        "eigengrain.cli.predict:run",
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
        "what large and small eigenvalues see in images: maps, measures and a page",
        Explain,
        "eigengrain.cli.explain:run",
        positional={"checkpoint": "?"},
        expand="eigengrain.cli.explain:expand",
        examples=(
            "eigengrain explain runs/demo/mpncov",
            "eigengrain explain runs/mine --images photos/1.jpg photos/2.jpg",
            "eigengrain explain runs/mine --perturb 200 --toward small --out runs/small",
        ),
    ),
    Command(
        "explore",
        "a local web page: split the eigenvalues of an image, and see what each part says and where it looks",
        Explore,
        "eigengrain.cli.explore:run",
        positional={"checkpoint": "*"},
        expand="eigengrain.cli.explore:expand",
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
        "eigengrain.cli.export:run",
        positional={"checkpoint": "?"},
        examples=(
            "eigengrain export runs/mine --out birds.onnx",
            "eigengrain export runs/mine --format pt2 --img_size 448",
            "eigengrain export my.pth --backbone resnet50 --head gap --num_classes 200",
        ),
    ),
    Command(
        "models",
        "the backbones, and the size of their feature maps",
        Models,
        "eigengrain.cli.listing:run_models",
        positional={"pattern": "?"},
        examples=(
            "eigengrain models",
            "eigengrain models 'resnet*'",
            "eigengrain models resnet50 --json",
        ),
    ),
    Command(
        "heads",
        "the heads, and the length of their vectors",
        Heads,
        "eigengrain.cli.listing:run_heads",
        positional={"pattern": "?"},
        examples=(
            "eigengrain heads",
            "eigengrain heads '*+seb'",
            "eigengrain heads --quiet",
        ),
    ),
    Command(
        "datasets",
        "the data sets, their layouts, and a check of a folder's images",
        Datasets,
        "eigengrain.cli.datasets:run",
        positional={"action": "?", "name": "?", "root": "?"},
        examples=(
            "eigengrain datasets list cub",
            "eigengrain datasets check photos --out problems.csv",
            "eigengrain datasets check cub /data/CUB_200_2011 --json",
        ),
    ),
    Command(
        "demo",
        "train four heads on drawn birds in a few minutes, and write a report",
        Demo,
        "eigengrain.cli.demo:run",
        examples=(
            "eigengrain demo",
            "eigengrain demo --heads gap,mpncov --epochs 2 --out runs/try",
            "eigengrain demo --seeds 0,1,2",
        ),
    ),
    Command(
        "study",
        "a table or figure of the paper: train what is missing, show ours beside the paper's",
        StudyRun,
        "studies.campaign:run",
        positional={"name": "?"},
        examples=(
            "eigengrain study list",
            "eigengrain study gcp-methods --scale smoke",
            "eigengrain study spectrum --data /data --datasets cub --seconds 3600",
        ),
    ),
    Command(
        "bench functional",
        "time and memory of every square root of a covariance",
        FunctionalBench,
        "benchmarks.functional:run",
        examples=(
            "eigengrain bench functional",
            "eigengrain bench functional --batch 1,10 --channels 64 --methods eigh",
        ),
    ),
    Command(
        "bench gradients",
        "every gradient rule of the covariance root against the exact one",
        GradientTour,
        "benchmarks.gradients:run",
        examples=(
            "eigengrain bench gradients",
            "eigengrain bench gradients --channels 16 --positions 49 --samples 4",
        ),
    ),
    Command(
        "bench heads",
        "time and memory of every head on a feature map",
        HeadsBench,
        "benchmarks.heads:run",
        examples=(
            "eigengrain bench heads",
            "eigengrain bench heads --heads gap,mpncov+seb --side 14 --repeats 3",
        ),
    ),
    Command(
        "bench step",
        "time and memory of whole training steps (Table 8 of the paper)",
        StepBench,
        "benchmarks.step:run",
        examples=(
            "eigengrain bench step",
            "eigengrain bench step --heads isqrt,mpncov+seb --amp bf16 --channels_last",
        ),
    ),
    Command(
        "bench growth",
        "how the time of the SEB layer grows with batch and channels",
        GrowthBench,
        "benchmarks.growth:run",
        examples=(
            "eigengrain bench growth --batch 1,2,4 --channels 64,128",
            "eigengrain bench growth --redraw --out benchmarks/growth-cpu.csv",
        ),
    ),
    Command(
        "bench solvers",
        "time of every eigensolver, and the errors of every root of a covariance",
        SolversBench,
        "benchmarks.solvers:run",
        examples=(
            "eigengrain bench solvers",
            "eigengrain bench solvers --batch 4 --channels 64 --condition 1e6,1e10",
        ),
    ),
    Command(
        "bench explain",
        "what maps of eigenvalue subsets cost beside the backbone's own passes, and a perturbation",
        ExplainBench,
        "benchmarks.explain:run",
        examples=(
            "eigengrain bench explain",
            "eigengrain bench explain --backbone resnet18 --batch 4 --img_size 224",
        ),
    ),
    Command(
        "bench loader",
        "images a second of the loader, beside torchvision's",
        LoaderBench,
        "benchmarks.loader:run",
        examples=(
            "eigengrain bench loader",
            "eigengrain bench loader --images 64 --size 224 --workers 2",
        ),
    ),
    Command(
        "doctor",
        "what is installed, which devices and data sets there are, which eigensolver each device gets",
        Doctor,
        "eigengrain.cli.doctor:run",
        examples=(
            "eigengrain doctor",
            "eigengrain doctor --data /data",
            "eigengrain doctor --json",
        ),
    ),
    Command(
        "completion",
        "a script with which bash, zsh or fish complete commands, options and names",
        Completion,
        "eigengrain.cli.completion:run",
        positional={"shell": "?"},
        examples=(
            "echo 'source <(eigengrain completion bash)' >> ~/.bashrc",
            "echo 'source <(eigengrain completion zsh)' >> ~/.zshrc",
            "eigengrain completion fish > ~/.config/fish/completions/eigengrain.fish",
        ),
        speaks=False,
    ),
)

#: the first words of commands, as 'eigengrain --help' lists them
SECTIONS = {
    "train and use a model": ("train", "evaluate", "predict", "export"),
    "see what eigenvalues see": ("explain", "explore"),
    "experiments": ("demo", "study", "bench"),
    "what there is": ("models", "heads", "datasets"),
    "set-up": ("doctor", "completion"),
}
