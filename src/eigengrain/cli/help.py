"""The help of the command line: a usage line, options by subject, defaults and examples."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eigengrain.cli.parser import COMMON
from eigengrain.options import Option, options_of

if TYPE_CHECKING:
    from eigengrain.cli.commands import Command, Program

#: column where the text of an option starts, and width of the widest page
COLUMN, WIDEST = 26, 120
#: a space at which no line is broken
_JOINT = "\0"

#: headings for options that are not in a nested config, in their order; other options stand under "options"
_SUBJECTS = {
    "model": "checkpoint backbone backbones head heads num_classes reduce last_stride stride_on weights class_names",
    "data": "data root data_options split skip_unreadable images kind img_size flip datasets options",
    "result": "topk accept min_probability mistakes subset subsets rules split_at cut target measures measure_count count "
    "scale perturb toward perturb_lr format dynamic_batch dtype opset verify",
    "training": "recipe freeze epochs batch_size accumulate clip_grad label_smoothing mixup cutmix snapmix "
    "mix_probability ema early_stop select eval_every seed seeds resume fresh dry_run",
    "speed and devices": "device workers amp cache cache_features channels_last compile cuda_graphs sync_bn check_images",
    "page": "host port password browser",
    "output": "out license report log save_every per_class",
}
_SUBJECT_OF = {name: subject for subject, names in _SUBJECTS.items() for name in names.split()}
#: options with another meaning in some command
_EXCEPTIONS = {
    **dict.fromkeys(("demo per_class", "explain seed"), "data"),
    **dict.fromkeys(
        ("explain batch_size", "evaluate batch_size", "predict batch_size", "report batch_size"), "speed and devices"
    ),
}


def subject_of(command: str, option: Option) -> str:
    """The heading under which an option is shown."""
    return option.group or _EXCEPTIONS.get(f"{command} {option.name}", _SUBJECT_OF.get(option.name, "options"))


def command_help(command: "Command", program: str) -> str:
    """The text of ``eigengrain COMMAND --help``."""
    parts = [f"usage: {usage(command, program)}", _wrap(f"{command.help[:1].upper()}{command.help[1:]}.")]
    parts += [_section(subject, rows) for subject, rows in subjects(command)]
    common = [
        (f"{f'-{short}, ' if short else ''}--{name}{f' {metavar}' if metavar else ''}", text)
        for name, short, metavar, text in COMMON
        if command.has_result or name != "json"
    ]
    parts.append(_section("every command", common))
    if command.examples:
        parts.append(_examples(command.examples))
    return "\n\n".join(parts) + "\n"


def subjects(command: "Command") -> list[tuple[str, list[tuple[str, str]]]]:
    """The arguments and options of a command by subject, each with its text; not those that every command has."""
    options = {option.name: option for option in options_of(command.config)}
    rows: dict[str, list[tuple[str, str]]] = {}
    for name, many in command.positional.items():
        text = f"{_text(options[name])}; also as --{name}"
        rows.setdefault("arguments", []).append((_placeholder(options[name], many), text))
    for option in options.values():
        if option.name not in command.positional:
            shown = f"--{option.name}" if option.switch else f"--{option.name} {option.metavar}"
            rows.setdefault(subject_of(command.name, option), []).append((shown, _text(option)))
    groups = dict.fromkeys(option.group for option in options.values() if option.group)
    order = ["arguments", "training", *groups, *_SUBJECTS, "options"]  # the recipe comes first
    return [(subject, rows[subject]) for subject in sorted(rows, key=order.index)]


def usage(command: "Command", program: str) -> str:
    """The usage line of a command, such as 'eigengrain train [--recipe NAME] [options]'."""
    options = {option.name: option for option in options_of(command.config)}
    positional = [f"[{_placeholder(options[name], many)}]" for name, many in command.positional.items()]
    return " ".join(filter(None, [program, command.name, *positional, command.usage, "[options]"]))


def overview(program: "Program") -> str:
    """The text of ``eigengrain --help``."""
    helps = {command.name: command.help for command in program.commands}
    parts = [f"usage: {program.name} COMMAND [options]", *([_wrap(program.about)] if program.about else [])]
    for title, names in (program.sections or {"commands": list(helps)}).items():
        parts.append(_section(title, [(name, helps[name]) for name in names], 14))
    if program.sections:
        parts.append(_examples([f"{program.name} {words}" for words in ("demo", "train --help", "doctor", "--version")]))
    parts.append(f"Run '{program.name} COMMAND --help' for the options of a command.")
    return "\n\n".join(parts) + "\n"


def _placeholder(option: Option, many: str) -> str:
    return f"{option.argument} ..." if many == "*" else option.argument


def _text(option: Option) -> str:
    text = option.help.removesuffix(".")
    # a default stays on the line of its word
    return f"{text} (default:{_JOINT}{option.default_text})" if option.default_text else text


def _wrap(text: str, indent: int = 0) -> str:
    space, width = " " * indent, max(40, min(shutil.get_terminal_size().columns - 2, WIDEST))  # of the terminal, in bounds
    wrapper = textwrap.TextWrapper(width, space, space, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text).replace(_JOINT, " ")


def _section(title: str, rows: Sequence[tuple[str, str]], column: int = COLUMN) -> str:
    """A heading and its rows: the text stands beside the name if there is room, else below it."""
    lines = [f"{title}:"]
    for name, text in rows:
        body = _wrap(text, column)
        fits = len(name) + 4 <= column
        lines.append(f"  {name}".ljust(column) + body[column:] if fits else f"  {name}\n{body}")
    return "\n".join(line.rstrip() for line in lines)


def _examples(examples: Sequence[str]) -> str:
    return "\n".join(["examples:", *(f"  {example}" for example in examples)])
