"""The help of the command line as a person reads it: a short usage line, options by subject, defaults, examples."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eigengrain.cli.values import choices_of, values_of
from eigengrain.options import Option, options_of

if TYPE_CHECKING:
    from eigengrain.cli.catalogue import Command

#: where the text of an option starts, and the widest page
COLUMN, WIDEST = 26, 120
#: a blank at which no line is broken
_JOINT = "\0"

#: subjects of options in the order in which they are shown
_SUBJECTS = {
    "model": "checkpoint backbone backbones head heads num_classes reduce last_stride stride_on weights class_names",
    "data": "data root data_options split images kind img_size flip datasets options",
    "what is made": "topk subset subsets rules split_at cut target measures measure_count count scale perturb toward "
    "perturb_lr format dynamic_batch opset verify",
    "training": "recipe epochs batch_size accumulate clip_grad label_smoothing ema early_stop select eval_every seed seeds "
    "rates protocol resume fresh dry_run",
    "sizes": "batch channels positions at_batch at_channels side condition samples svd_batch size dtype dtypes methods "
    "reference perturbation_steps limit",
    "measurement": "repeats warmup measure seconds",
    "speed and devices": "device workers amp cache channels_last compile cuda_graphs sync_bn check_images",
    "page": "host port password browser",
    "output": "out label log save_every redraw records only_report drop_models per_class",
}
_SUBJECT_OF = {name: subject for subject, names in _SUBJECTS.items() for name in names.split()}
#: where an option means something else
_EXCEPTIONS = {
    "demo per_class": "data",
    "study scale": "training",
    "explain seed": "data",
    "explain batch_size": "speed and devices",
    "evaluate batch_size": "speed and devices",
    "predict batch_size": "speed and devices",
    "bench explain subsets": "sizes",
    "bench explain rules": "sizes",
    "bench explain img_size": "sizes",
    "bench step img_size": "sizes",
    "bench loader batch_size": "sizes",
}

#: options of every command, as they are shown
COMMON = (
    ("-q, --quiet", "no progress and no decoration: the result in bare lines, and errors"),
    ("--json", "the result as one JSON document on stdout"),
    ("--config FILE", "a YAML file with these options; those of the command line after it win"),
    ("--print_config", "print the options as YAML, for --config, and stop"),
    ("-h, --help", "print this help and stop"),
)


def subject_of(command: str, option: Option) -> str:
    """The heading under which an option is shown."""
    if option.group:
        return option.group.rsplit(".", 1)[-1]
    default = _SUBJECT_OF.get(option.name, "what is made")
    if command.startswith("bench") and default == "training":
        default = "measurement"
    return _EXCEPTIONS.get(f"{command} {option.name}", default)


def width_of_page() -> int:
    """Columns of the terminal, or ``COLUMNS``, within reason."""
    return max(40, min(shutil.get_terminal_size().columns - 2, WIDEST))


def command_help(command: "Command", program: str) -> str:
    """What ``eigengrain COMMAND --help`` prints."""
    options = {option.name: option for option in options_of(command.config)}
    parts = [f"usage: {usage(command, program)}", _wrapped(_sentence(command.help))]
    named = [(_placeholder(name, many), options[name]) for name, many in command.positional.items()]
    if named:
        rows = [(shown, _argument_text(option)) for shown, option in named]
        parts.append(_section("arguments", rows))
    subjects: dict[str, list[tuple[str, str]]] = {}
    for option in options.values():
        if option.name not in command.positional:
            shown = f"--{option.name}" if option.switch else f"--{option.name} {_metavar(command, option)}"
            subjects.setdefault(subject_of(command.name, option), []).append((shown, _text(option)))
    groups = dict.fromkeys(option.group.rsplit(".", 1)[-1] for option in options.values() if option.group)
    order = ["training", *groups, *_SUBJECTS]  # the recipe comes first
    for subject in sorted(subjects, key=order.index):
        parts.append(_section(subject, subjects[subject]))
    parts.append(_section("every command", [row for row in COMMON if command.speaks or row[0] not in ("--json",)]))
    if command.examples:
        parts.append(_examples(command.examples))
    return "\n\n".join(parts) + "\n"


def usage(command: "Command", program: str) -> str:
    """The line that says how a command is written.

    Example:
        >>> from eigengrain.cli.catalogue import COMMANDS
        >>> usage(next(command for command in COMMANDS if command.name == "train"), "eigengrain")
        'eigengrain train [--recipe NAME] [options]'
    """
    words = [program, command.name, *(_in_usage(name, many) for name, many in command.positional.items())]
    words += [command.usage] if command.usage else []
    return " ".join([*words, "[options]"])


def overview(
    program: str, about: str, sections: Mapping[str, Sequence[tuple[str, str]]], examples: Sequence[str] = ()
) -> str:
    """What ``eigengrain --help`` prints, and a word that has commands of its own: (command, what it does) by section."""
    parts = [f"usage: {program} COMMAND [options]", _wrapped(about)]
    parts += [_section(title, rows, 14) for title, rows in sections.items()]
    parts += [_examples(examples)] if examples else []
    parts.append(f"'{program} COMMAND --help' says more about a command.")
    return "\n\n".join(parts) + "\n"


def _metavar(command: "Command", option: Option) -> str:
    if option.name == "data" and values_of(command.name, option):
        return "NAME"  # of a data set, where other commands take a folder
    return option.metavar(choices_of(command.name, option))


def _placeholder(name: str, many: str) -> str:
    return f"{name.upper()} ..." if many == "*" else name.upper()


def _in_usage(name: str, many: str) -> str:
    return f"[{_placeholder(name, many)}]"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _text(option: Option) -> str:
    said = option.help.removesuffix(".")
    # a default is not torn from its word
    return f"{said} (default:{_JOINT}{option.default_text})" if option.default_text else said


def _argument_text(option: Option) -> str:
    return f"{_text(option)}; also as --{option.name}"


def _wrapped(text: str, indent: int = 0) -> str:
    space = " " * indent
    wrapper = textwrap.TextWrapper(width_of_page(), space, space, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text).replace(_JOINT, " ")


def _section(title: str, rows: Sequence[tuple[str, str]], column: int = COLUMN) -> str:
    """A heading and its rows: the text beside the name where there is room, and below it otherwise."""
    lines = [f"{title}:"]
    for name, text in rows:
        body = _wrapped(text, column)
        fits = len(name) + 4 <= column
        lines.append(f"  {name}".ljust(column) + body[column:] if fits else f"  {name}\n{body}")
    return "\n".join(line.rstrip() for line in lines)


def _examples(examples: Sequence[str]) -> str:
    return "\n".join(["examples:", *(f"  {example}" for example in examples)])
